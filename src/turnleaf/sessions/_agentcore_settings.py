"""What AgentCoreHttpSession is told, checked."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs

from turnleaf.core import SettingsError, excerpt
from turnleaf.sessions._exchange import positive

__all__ = ["RuntimeSettings"]

SESSION = "AgentCoreHttpSession"
ARN_EXAMPLE = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/my_agent-a1B2c3D4e5"
ARN = re.compile(
    r"arn:aws(-[^:]+)?:bedrock-agentcore:(?P<region>[a-z0-9-]+):[0-9]{12}:"
    r"runtime/[a-zA-Z]\w*-[a-zA-Z0-9]+"
)
QUALIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MOST_SESSIONS = 10_000
MOST_SECONDS = 1_000_000
"""Of a timeout: the system counts them in milliseconds of 32 bits."""
_EXCERPT = 200


def _text(pattern: re.Pattern[str], expected: str) -> Callable[[Any, Any, Any], None]:
    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, str) or pattern.fullmatch(value) is None or not value.isascii():
            raise _wrong(field.name, value, expected)

    return check


def _one_of(choices: Sequence[str]) -> Callable[[Any, Any, Any], None]:
    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if value not in choices:
            raise _wrong(field.name, value, " or ".join(map(repr, choices)))

    return check


def _is_address(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
    expected = "the http(s) address of an endpoint, such as http://127.0.0.1:8080, or null"
    if not isinstance(value, str) or value.split() != [value]:
        raise _wrong(field.name, value, expected)
    try:
        parts = urlsplit(value)
        is_plain = not (parts.query or parts.fragment) and parts.port != 0
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain
    except ValueError:
        is_address = False
    else:
        # A password would be printed with the settings.
        if parts.username is not None:
            raise SettingsError(f"{SESSION}: endpoint_url must have no user name; give {expected}")
    if not is_address:
        raise _wrong(field.name, value, expected)


def _is_count(high: int) -> Callable[[Any, Any, Any], None]:
    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        # type() and not isinstance: YAML's `yes` is a bool, which is an int.
        if type(value) is not int or not 1 <= value <= high:
            raise _wrong(field.name, value, f"a whole number from 1 to {high}")

    return check


def _wrong(name: str, value: object, expected: str) -> SettingsError:
    said = excerpt(value, length=_EXCERPT)
    return SettingsError(f"{SESSION}: {name} is {said}; give {expected}")


def _is_positive(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
    positive(SESSION, field.name, value)


def _is_timeout(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
    if positive(SESSION, field.name, value) > MOST_SECONDS:
        raise _wrong(field.name, value, f"a number of seconds up to {MOST_SECONDS}")


@attrs.frozen(kw_only=True)
class RuntimeSettings:
    """The arguments of AgentCoreHttpSession; its docstring says what each means.

    Equal settings share what a process has for a runtime. Raises SettingsError, which names the
    argument.
    """

    agentcore_runtime_arn: str = attrs.field(
        validator=_text(ARN, f"the ARN of an AgentCore runtime, which looks like {ARN_EXAMPLE}")
    )
    qualifier: str | None = attrs.field(
        validator=attrs.validators.optional(
            _text(QUALIFIER, "the name of the runtime's endpoint, such as DEFAULT, or null")
        )
    )
    endpoint_url: str | None = attrs.field(validator=attrs.validators.optional(_is_address))
    envelope: Literal["auto", "never"] = attrs.field(validator=_one_of(("auto", "never")))
    max_sessions: int = attrs.field(validator=_is_count(MOST_SESSIONS))
    sessions_per_minute: float = attrs.field(validator=_is_positive)
    polls_per_second: float = attrs.field(validator=_is_positive)
    timeout: float = attrs.field(validator=_is_timeout)
    connect_timeout: float = attrs.field(validator=_is_timeout)
    retry_time: float = attrs.field(validator=_is_positive)
    max_response_bytes: int = attrs.field(validator=_is_count(2**31 - 1))

    @property
    def region(self) -> str:
        """The AWS region that the ARN names."""
        match = ARN.fullmatch(self.agentcore_runtime_arn)
        assert match is not None  # noqa: S101  # the validator's
        return match["region"]

    @property
    def target(self) -> dict[str, str]:
        """The runtime and its endpoint, in the names of botocore's operations."""
        target = {"agentRuntimeArn": self.agentcore_runtime_arn}
        return target if self.qualifier is None else {**target, "qualifier": self.qualifier}
