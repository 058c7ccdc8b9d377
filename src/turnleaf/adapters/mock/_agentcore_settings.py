"""What an emulated AgentCore Runtime is like."""

from collections.abc import Iterable
from typing import Any

import attrs
from attrs.validators import ge, gt, instance_of, min_len, optional

__all__ = ["AGENTCORE_ARN", "AgentCoreSettings"]

AGENTCORE_ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/turnleaf_agent-a1B2c3D4e5"
"""The ARN of an emulated runtime that was given none."""


def _words(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError(f"{values!r} is one string, not a list of them")
    return tuple(values)


def _seconds(default: float) -> Any:
    return attrs.field(default=default, validator=ge(0))


def _quota(default: float | None) -> Any:
    return attrs.field(default=default, validator=optional(gt(0.0)))


@attrs.frozen(kw_only=True)
class AgentCoreSettings:
    """One runtime. Give either `command` or `agent_url`.

    command: starts an agent's process; its port is appended. Every session gets a process of its
    own, as it gets a microVM on AgentCore. agent_url: an agent that is running already and serves
    all sessions.

    arn, qualifiers: what requests must name. provision_time: seconds that a new session takes at
    least. initialization_timeout: seconds until its agent must answer `/ping`. teardown_time:
    seconds for which the id of an ended session answers 409. idle_timeout, max_lifetime: seconds
    after which a session is ended. The rest are quotas, of which None is no limit:
    invocations_per_second, stops_per_second, new_sessions_per_minute and active_sessions. Defaults
    are AgentCore's published ones, as far as there are any.

    Raises TypeError or ValueError for values that are none.
    """

    command: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_words),
        validator=optional(min_len(1)),
    )
    agent_url: str | None = attrs.field(default=None, validator=optional(instance_of(str)))
    arn: str = attrs.field(default=AGENTCORE_ARN, validator=instance_of(str))
    qualifiers: tuple[str, ...] = attrs.field(default=("DEFAULT",), converter=_words)
    provision_time: float = _seconds(0.0)
    initialization_timeout: float = _seconds(60.0)
    teardown_time: float = _seconds(0.0)
    idle_timeout: float = _seconds(900.0)
    max_lifetime: float = _seconds(28_800.0)
    invocations_per_second: float | None = _quota(200)
    stops_per_second: float | None = _quota(200)
    new_sessions_per_minute: float | None = _quota(400)
    active_sessions: float | None = _quota(500)

    def __attrs_post_init__(self) -> None:
        if (self.command is None) == (self.agent_url is None):
            raise ValueError("give either command or agent_url")
