"""What happened at an emulated runtime, and whether a client left it as it should."""

import time
from collections import defaultdict
from typing import Any, Literal, Self

import attrs

from turnleaf.adapters.mock._agentcore_payload import Payload

__all__ = ["AgentCoreLog", "End", "InvocationRecord", "SessionRecord", "StopRecord"]

End = Literal["stopped", "reaped", "expired", "killed", "died", "failed", "lost"]
"""How a session ended: by request, idle, at its maximal lifetime, by a test, because its agent's
process ended, because it never got ready, or with the emulator."""


@attrs.define(eq=False)
class SessionRecord:
    """A session from its start, in seconds since the epoch. id: the caller's; an id that is used
    again after its session's end is another session. ready: when its agent answered. speaks:
    whether the agent has answered in the envelope of background invocations."""

    number: int
    id: str
    started: float
    ready: float | None = None
    ended: float | None = None
    how: End | None = None
    speaks: bool = False


@attrs.define(eq=False)
class InvocationRecord:
    """A request to invoke. session: its session's number, None where it got to none.
    executed: whether the agent was given the payload. outcome: "answered" (a response was
    written), "unread" (its caller had left), "lost" (by a fault), "cut" (the session ended),
    "broken" (the agent broke off), or the code of the error; None while it runs."""

    session_id: str
    digest: str
    operation: str | None
    invocation_id: str | None
    began: float
    session: int | None = None
    executed: bool = False
    ended: float | None = None
    outcome: str | None = None

    def end(self, outcome: str) -> None:
        """Note how it ended."""
        self.outcome, self.ended = outcome, time.time()


@attrs.frozen(eq=False)
class StopRecord:
    """A request to stop a session. outcome: "stopped", or the code of the error."""

    session_id: str
    at: float
    outcome: str


@attrs.define(eq=False)
class AgentCoreLog:
    """Everything, in the order in which it began."""

    sessions: list[SessionRecord] = attrs.Factory(list)
    invocations: list[InvocationRecord] = attrs.Factory(list)
    stops: list[StopRecord] = attrs.Factory(list)

    def session_started(self, session_id: str) -> SessionRecord:
        """Add a session."""
        record = SessionRecord(len(self.sessions), session_id, time.time())
        self.sessions.append(record)
        return record

    def invoked(self, session_id: str, payload: Payload) -> InvocationRecord:
        """Add an invocation."""
        record = InvocationRecord(
            session_id, payload.digest, payload.operation, payload.invocation_id, time.time()
        )
        self.invocations.append(record)
        return record

    def stop_requested(self, session_id: str, outcome: str) -> None:
        """Add a stop."""
        self.stops.append(StopRecord(session_id, time.time(), outcome))

    def not_stopped(self) -> list[SessionRecord]:
        """Sessions that no client stopped: those without a later stop that was carried out, or
        that was answered with 404 since the session was gone already. Should be empty."""
        last = {
            stop.session_id: stop.at
            for stop in self.stops
            if stop.outcome in ("stopped", "ResourceNotFoundException")
        }
        return [one for one in self.sessions if last.get(one.id, float("-inf")) < one.started]

    def executed_twice(self) -> dict[str, list[InvocationRecord]]:
        """Payloads that agents were given more often than once, by digest. Should be empty where
        all payloads are distinct, `_config` and the envelope apart.

        Polls count for nothing, and neither does a repeated start of one background invocation in
        one session whose agent has answered in the envelope.
        """
        executions = defaultdict[str, dict[Any, InvocationRecord]](dict)
        for number, one in enumerate(self.invocations):
            if not one.executed or one.operation == "get" or one.session is None:
                continue
            once = one.invocation_id is not None and self.sessions[one.session].speaks
            key = (one.session, one.invocation_id) if once else number
            executions[one.digest].setdefault(key, one)
        return {digest: list(runs.values()) for digest, runs in executions.items() if len(runs) > 1}

    def to_mapping(self) -> dict[str, Any]:
        """As a JSON object."""
        return attrs.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Self:
        """Read what `to_mapping` made."""
        return cls(
            [SessionRecord(**one) for one in mapping["sessions"]],
            [InvocationRecord(**one) for one in mapping["invocations"]],
            [StopRecord(**one) for one in mapping["stops"]],
        )
