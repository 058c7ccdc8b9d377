"""The configuration, as the trainer's YAML file gives it."""

import difflib
import ipaddress
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import attrs

from turnleaf.core._described import excerpt
from turnleaf.core._errors import SettingsError

__all__ = ["Settings"]

_EXCERPT = 200
_YEAR = 31_536_000
_MAX_TOKENS = 2**31 - 1
_HOST_NAME = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")


@attrs.frozen
class _Expect:
    """An attrs validator that names the setting, its value and what was expected."""

    expects: str
    accepts: Callable[[Any], bool]
    hint: Callable[[Any], str] = lambda _: ""

    def __call__(self, _: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if self.accepts(value):
            return
        raise SettingsError(
            f"{_path(field)} is {excerpt(value, length=_EXCERPT)}, but must be "
            f"{self.expects}{self.hint(value)}"
        )


def _number_as_text(value: object) -> str:
    try:
        float(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return "; YAML read it as text: write it without quotes, an exponent as in 1.0e-5"


def _ending_in_v1(value: object) -> str:
    ends = isinstance(value, str) and _ends_in_v1(value)
    return "; leave /v1 out, which is added to it" if ends else ""


def _session_without_module(value: Any) -> str:
    backend = value.get("backend") if isinstance(value, Mapping) else value
    named = backend if isinstance(backend, str) else ""
    ours = ("AgentCoreHttpSession", "HttpSession", "LocalSession")
    near = difflib.get_close_matches(named, ours, n=1)
    return f"; did you mean turnleaf.sessions.{near[0]}?" if near else ""


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    # type() and not isinstance: YAML's `yes` is a bool, which is an int.
    return lambda value: type(value) is int and low <= value <= high


def _or_null(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _positive(high: float = sys.float_info.max) -> Callable[[Any], bool]:
    # By default what a float can hold, which YAML's whole numbers may exceed.
    return lambda value: type(value) in (int, float) and 0 < value <= high


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() == value != "" and value.isprintable()


def _is_host(value: Any) -> bool:
    if not _is_text(value):
        return False
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return _HOST_NAME.fullmatch(value) is not None and _is_name_on_the_wire(value)
    return True


def _is_name_on_the_wire(host: str) -> bool:
    """Whether DNS takes a name in its form without accents, which may be longer."""
    try:
        return len(host.encode("idna")) <= 253
    except UnicodeError:
        return False


def _is_backend(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    backend = value.get("backend")
    if not isinstance(backend, str):
        return False
    names = backend.split(".")
    return len(names) > 1 and all(name.isidentifier() for name in names)


def _ends_in_v1(value: str) -> bool:
    # Agents would be told …/v1/v1, where nothing answers.
    return value.rstrip("/").endswith("/v1")


def _is_address(value: Any) -> bool:
    if not _is_text(value) or any(character.isspace() for character in value):
        return False
    filled = value.replace("{port}", "80")
    try:
        address = urlsplit(filled)
        port_fits = address.port is None or address.port > 0
    except ValueError:
        return False
    if _ends_in_v1(value):
        return False
    plain = not (address.query or address.fragment or address.username or set(filled) & set("{}"))
    reachable = address.scheme in ("http", "https") and _is_host(address.hostname)
    return plain and port_fits and reachable


_TEXT = _Expect("text", _is_text)
_TEXT_OR_NULL = _Expect("text or null", _or_null(_is_text))
_COUNT_OR_NULL = _Expect(
    f"a whole number from 1 to {_MAX_TOKENS}, or null",
    _or_null(_whole(1, _MAX_TOKENS)),
    _number_as_text,
)
_UNDER_TURNLEAF = {"section": "turnleaf."}
_UNDER_HISTORY = {"section": "turnleaf.history."}


@attrs.frozen
class Settings:
    """Every setting, checked; docs/settings.md says what each does.

    Raises SettingsError, which names the setting, when a value is not of its kind.
    """

    rollout_session_backend: Mapping[str, Any] = attrs.field(
        validator=_Expect(
            "a mapping whose `backend` is the import path of a session class",
            _is_backend,
            _session_without_module,
        )
    )
    gateway_port: int = attrs.field(
        default=9090,
        validator=_Expect("a whole number from 0 to 65535", _whole(0, 65535), _number_as_text),
    )
    gateway_host: str | None = attrs.field(
        default=None, validator=_Expect("a host name, an IP address or null", _or_null(_is_host))
    )
    max_rollout_time: float = attrs.field(
        default=900,
        validator=_Expect(f"a number above 0, at most {_YEAR}", _positive(_YEAR), _number_as_text),
    )
    tps_limit: float = attrs.field(
        default=5, validator=_Expect("a number above 0", _positive(), _number_as_text)
    )
    model_id: str | None = attrs.field(default=None, validator=_TEXT_OR_NULL)
    public_url: str | None = attrs.field(
        default=None,
        validator=_Expect(
            "an http(s) address, in which only `{port}` is filled in, or null",
            _or_null(_is_address),
            _ending_in_v1,
        ),
        metadata=_UNDER_TURNLEAF,
    )
    client_reasoning: Literal["restore", "as_sent"] = attrs.field(
        default="restore",
        validator=_Expect("`restore` or `as_sent`", lambda value: value in ("restore", "as_sent")),
        metadata=_UNDER_HISTORY,
    )
    thinking_retention: Literal["template", "tool_cycle", "all"] = attrs.field(
        default="template",
        validator=_Expect(
            "`template`, `tool_cycle` or `all`",
            lambda value: value in ("template", "tool_cycle", "all"),
        ),
        metadata=_UNDER_HISTORY,
    )
    constraints: Literal["hint", "refuse", "enforce"] = attrs.field(
        default="hint",
        validator=_Expect(
            "`hint`, `refuse` or `enforce`", lambda value: value in ("hint", "refuse", "enforce")
        ),
        metadata=_UNDER_TURNLEAF,
    )
    max_context_tokens: int | None = attrs.field(
        default=None,
        validator=_COUNT_OR_NULL,
        metadata=_UNDER_TURNLEAF,
    )
    max_turns: int | None = attrs.field(
        default=None, validator=_COUNT_OR_NULL, metadata=_UNDER_TURNLEAF
    )
    max_rollout_tokens: int | None = attrs.field(
        default=None, validator=_COUNT_OR_NULL, metadata=_UNDER_TURNLEAF
    )
    max_requests_in_flight: int = attrs.field(
        default=64,
        validator=_Expect("a whole number from 1 to 65536", _whole(1, 65536), _number_as_text),
        metadata=_UNDER_TURNLEAF,
    )
    on_bad_result: Literal["raise", "fail_rollout"] = attrs.field(
        default="raise",
        validator=_Expect(
            "`raise` or `fail_rollout`", lambda value: value in ("raise", "fail_rollout")
        ),
        metadata=_UNDER_TURNLEAF,
    )
    on_infrastructure_failure: Literal["zero", "remove"] = attrs.field(
        default="zero",
        validator=_Expect("`zero` or `remove`", lambda value: value in ("zero", "remove")),
        metadata=_UNDER_TURNLEAF,
    )
    failure_window: float = attrs.field(
        default=600,
        validator=_Expect(f"a number above 0, at most {_YEAR}", _positive(_YEAR), _number_as_text),
        metadata=_UNDER_TURNLEAF,
    )
    retry_grace: float = attrs.field(
        default=30,
        validator=_Expect(
            "a number from 0 to 3600",
            lambda value: type(value) in (int, float) and 0 <= value <= 3600,
            _number_as_text,
        ),
        metadata=_UNDER_TURNLEAF,
    )
    metrics_port: int | None = attrs.field(
        default=None,
        validator=_Expect(
            "a whole number from 1 to 65535, or null", _or_null(_whole(1, 65535)), _number_as_text
        ),
        metadata=_UNDER_TURNLEAF,
    )
    log_format: Literal["json", "text"] = attrs.field(
        default="json",
        validator=_Expect("`json` or `text`", lambda value: value in ("json", "text")),
        metadata=_UNDER_TURNLEAF,
    )
    tool_call_parser: str = attrs.field(default="auto", validator=_TEXT, metadata=_UNDER_TURNLEAF)
    reasoning_parser: str = attrs.field(default="auto", validator=_TEXT, metadata=_UNDER_TURNLEAF)

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], *, ignore_unknown_top_level: bool = False
    ) -> Self:
        """Read the configuration as YAML gives it: nested under `turnleaf:`.

        ignore_unknown_top_level: the mapping also holds what is not ours to judge, such as a
        trainer's own arguments.

        Raises SettingsError for unknown, missing or wrong settings; its text names all of them.
        """
        values, faults = cls._read(mapping, ignore_unknown_top_level)
        if len(faults) > 1:
            listed = "\n".join(f"- {textwrap.indent(fault, '  ').strip()}" for fault in faults)
            raise SettingsError(f"{len(faults)} settings are wrong:\n{listed}")
        for fault in faults:
            raise SettingsError(fault)
        return cls(**values)

    @classmethod
    def faults(
        cls, mapping: Mapping[str, Any], *, ignore_unknown_top_level: bool = False
    ) -> list[str]:
        """What `from_mapping` would refuse, one text for each; empty when it would not."""
        return cls._read(mapping, ignore_unknown_top_level)[1]

    @classmethod
    def _read(
        cls, mapping: Mapping[str, Any], ignore_unknown_top_level: bool
    ) -> tuple[dict[str, Any], list[str]]:
        """The values by field, and what is wrong with the mapping."""
        if not isinstance(mapping, Mapping):
            return {}, [
                f"the settings are {excerpt(mapping, length=_EXCERPT)}, but must be a mapping of "
                "names to values"
            ]
        fields = {_path(field): field for field in attrs.fields(cls)}
        sections = {
            path[:at] for path in fields for at, character in enumerate(path) if character == "."
        }
        values: dict[str, Any] = {}
        faults = []
        for path, value in _flatten(mapping, "", sections):
            if path in sections:
                said = excerpt(value, length=_EXCERPT)
                faults.append(f"{path} is {said}, but must be a mapping")
            elif path in fields:
                values[fields[path].name] = value
                faults += _fault(fields[path], value)
            elif not ignore_unknown_top_level or _dotted(path).startswith("turnleaf."):
                faults.append(_unknown(path, [*fields, *sections]))
        if "rollout_session_backend" not in values:
            faults.append(
                "rollout_session_backend is missing; it must be a mapping such as "
                "{backend: turnleaf.sessions.HttpSession, url: …}"
            )
        return values, faults


def _fault(field: "attrs.Attribute[Any]", value: object) -> list[str]:
    assert field.validator is not None  # noqa: S101  # every setting has one
    try:
        field.validator(None, field, value)
    except SettingsError as error:
        return [str(error)]
    return []


def _unknown(path: str, known: list[str]) -> str:
    dotted = _dotted(path)
    # A name that stands at another place is nearer than any that is spelled alike.
    moved = [one for one in known if one.rpartition(".")[2] == dotted.rpartition(".")[2]]
    nearest = moved[0] if moved else difflib.get_close_matches(dotted, known, n=1, cutoff=0)[0]
    if dotted == path:
        return f"unknown setting {path!r}; the nearest valid one is {nearest!r}"
    nested = (f"{'  ' * depth}{name}:" for depth, name in enumerate(nearest.split(".")))
    return (
        f"unknown setting {dotted!r}: names do not nest by dots inside a key; write the nearest "
        "valid one as\n" + "\n".join(nested) + " …"
    )


def _dotted(path: str) -> str:
    """A path as it was meant, by someone who joined names by dots inside a key."""
    return path.replace("'", "")


def _path(field: "attrs.Attribute[Any]") -> str:
    return f"{field.metadata.get('section', '')}{field.name}"


def _flatten(
    mapping: Mapping[Any, Any], prefix: str, sections: set[str]
) -> Iterator[tuple[str, Any]]:
    """Each path with its value; that of a section only where it is no mapping."""
    for key, value in mapping.items():
        # A key that is no plain name must not pass for a path of names.
        is_plain = isinstance(key, str) and "." not in key
        path = prefix + (key if is_plain else excerpt(key, length=_EXCERPT))
        if path in sections and isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.", sections)
        elif path not in sections or value is not None:
            yield path, value
