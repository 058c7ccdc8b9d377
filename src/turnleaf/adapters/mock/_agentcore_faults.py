"""What goes wrong at an emulated runtime, by a test's wish."""

import time
from typing import Literal

import attrs
from attrs.validators import ge, gt, in_, optional

from turnleaf.adapters.mock._agentcore_errors import STATUS
from turnleaf.adapters.mock._agentcore_payload import Payload

__all__ = ["AgentCoreFault", "Faults", "Operation"]

Operation = Literal["invoke", "stop"]
_ONCE: int | None = 1


@attrs.frozen(kw_only=True)
class AgentCoreFault:
    """Something that goes wrong with some of the calls of one operation.

    Which calls: session, of the session with this id; payload, of which the text has this in it;
    polls, only those that ask for a background invocation's result, or only the others. Of those,
    `skip` go well and then `times` do not (None: all). seconds: for so long after it was injected.

    What goes wrong: delay, it begins so many seconds late. after_stop, an invocation begins only
    once a stop of its session was carried out or refused. error: it is answered with this code
    instead of being done. lose_answer: it is done, then the connection closes without an answer.
    answer_error: it is done, then answered with this code. answer_delay: it is done, then answered
    so many seconds late. kill_after: so many seconds after the agent was given the payload, the
    session's container dies.

    Raises TypeError or ValueError for values that are none.
    """

    operation: Operation = attrs.field(validator=in_(("invoke", "stop")))
    session: str | None = None
    payload: str | None = None
    polls: bool | None = None
    skip: int = attrs.field(default=0, validator=ge(0))
    times: int | None = attrs.field(default=_ONCE, validator=optional(ge(1)))
    seconds: float | None = attrs.field(default=None, validator=optional(gt(0)))
    delay: float = attrs.field(default=0.0, validator=ge(0))
    after_stop: bool = False
    error: str | None = attrs.field(default=None, validator=optional(in_(STATUS)))
    lose_answer: bool = False
    answer_error: str | None = attrs.field(default=None, validator=optional(in_(STATUS)))
    answer_delay: float = attrs.field(default=0.0, validator=ge(0))
    kill_after: float | None = attrs.field(default=None, validator=optional(ge(0)))

    def _concerns(self, operation: Operation, session_id: str, payload: Payload | None) -> bool:
        if operation != self.operation or self.session not in (None, session_id):
            return False
        if payload is None:
            return self.payload is None and self.polls is None
        return (self.payload is None or self.payload.encode() in payload.body) and (
            self.polls is None or self.polls == payload.polls
        )


NONE = AgentCoreFault(operation="invoke")


@attrs.define
class _Injected:
    fault: AgentCoreFault
    since: float = attrs.field(init=False, factory=time.monotonic)
    seen: int = attrs.field(init=False, default=0)

    def strikes(self) -> bool:
        """Whether it does at the next call that it concerns."""
        fault = self.fault
        if fault.seconds is not None and time.monotonic() > self.since + fault.seconds:
            return False
        self.seen += 1
        return self.seen > fault.skip and (
            fault.times is None or self.seen <= fault.skip + fault.times
        )


class Faults:
    """Those that were injected. A call has one at most: the earliest that strikes; the others do
    not count the call."""

    def __init__(self) -> None:
        self._injected: list[_Injected] = []

    def inject(self, fault: AgentCoreFault) -> None:
        """Add one."""
        self._injected.append(_Injected(fault))

    def clear(self) -> None:
        """Have everything go well from now on."""
        self._injected.clear()

    def of(
        self, operation: Operation, session_id: str, payload: Payload | None = None
    ) -> AgentCoreFault:
        """What goes wrong with this call; a fault that does nothing when it goes well."""
        for one in self._injected:
            if one.fault._concerns(operation, session_id, payload) and one.strikes():
                return one.fault
        return NONE
