"""One invocation of an agent on AgentCore Runtime, from its start to its session's end."""

import asyncio
import functools
import logging
import random
import uuid
from collections.abc import Callable
from typing import Any

import anyio
import attrs

from turnleaf.core import (
    AgentError,
    ContractError,
    PayloadError,
    RolloutError,
    SessionBusy,
    SessionError,
)
from turnleaf.sessions import _envelope as envelope
from turnleaf.sessions._agentcore_calls import CallFailed, Kind
from turnleaf.sessions._agentcore_runtime import Runtime, call_in_thread
from turnleaf.sessions._envelope import State
from turnleaf.sessions._exchange import encoded
from turnleaf.sessions._reporting import Redaction
from turnleaf.sessions._retrying import Backoff, delays
from turnleaf.sessions._room import Place

__all__ = ["Invocation", "poll_interval"]

logger = logging.getLogger(__name__)

MOST_BYTES = 100_000_000
"""Of a payload, by AgentCore's service model."""

POLL_FIRST = 0.25  # seconds
POLL_SHARE = 0.1  # of the time that has passed
POLL_LONGEST = 4.0
POLL_HELD = 30.0
"""Seconds for which an agent is asked to hold a poll until it is done."""

STOP_LIMIT = 45.0
"""Seconds that a session may take to be stopped; core gives up leaving it after 60."""

LATE = 15.0
"""Seconds after which a start whose outcome is not known makes no session any more. It was seen to
take 12.6."""

DID_NOT_RUN: frozenset[Kind] = frozenset({"conflict", "full", "throttled", "unreachable"})
"""How a start fails that may be repeated: the agent has provably not run."""

MADE_NONE: frozenset[Kind] = frozenset({"missing", "refused", "unreachable"})
"""How a start fails after which there is no session to be stopped."""

ADVICE: dict[Kind, str] = {
    "agent": "the agent's log in CloudWatch says why; AgentCore drops the text of an answer with "
    'an error status: have the agent return {"error": …} instead',
    "conflict": "AgentCore is still making or ending the session; raise the backend's retry_time",
    "full": "the account has as many active sessions as it may; lower the backend's max_sessions, "
    "or have the quota raised",
    "lost": "nobody knows whether the agent ran, so it is not run again",
    "missing": "correct agentcore_runtime_arn, or the qualifier; is the runtime deployed?",
    "refused": "correct the backend's arguments, or this process's AWS credentials and their "
    "permissions for bedrock-agentcore:InvokeAgentRuntime",
    "throttled": "AgentCore takes fewer invocations per second; lower tps_limit or the backend's "
    "sessions_per_minute, or have the quota raised",
    "unreachable": "is AgentCore reachable from here, and are the region and endpoint_url right?",
}


def poll_interval(elapsed: float) -> float:
    """Seconds between two polls, of an invocation that began `elapsed` seconds ago.

    A tenth of what has passed, within limits, so that little is lost beyond the agent's own time.
    """
    return min(max(POLL_FIRST, POLL_SHARE * elapsed), POLL_LONGEST) * random.uniform(0.8, 1.2)


@attrs.define(eq=False)
class Invocation:
    """Runs an agent once in the session `session_id`, and ends that.

    place: of the session; calls that cannot be cut short hold it until they end.
    """

    runtime: Runtime
    session_id: str
    place: Place
    redaction: Redaction
    _id: str = attrs.field(init=False, factory=lambda: uuid.uuid4().hex)
    _call: "asyncio.Task[Any] | None" = attrs.field(init=False, default=None)
    _may_exist: bool = attrs.field(init=False, default=False)
    _trouble: str = attrs.field(init=False, default="")
    """Why the session was not stopped."""

    async def result(self, payload: dict[str, Any]) -> Any:
        """Start the agent, and wait until it has a result; for what is raised, see the session."""
        is_background = self.runtime.settings.envelope == "auto"
        body = encoded(envelope.start(payload, self._id) if is_background else payload)
        if len(body) > MOST_BYTES:
            raise PayloadError(
                f"the payload has {len(body)} bytes as JSON; AgentCore takes {MOST_BYTES} at most"
            )
        self.runtime.prepare()
        began = anyio.current_time()
        try:
            reply = await self._started(body)
        except CallFailed as failure:
            # Any agent but one that keeps its invocations apart would run again when asked.
            if failure.kind != "lost" or not (is_background and self.runtime.speaks_envelope):
                raise self._error(failure) from None
            logger.info("session %s: asking what became of it: %s", self.session_id, failure)
            state = await self._asked()
        else:
            read = State.read(reply, self._id) if is_background else None
            if read is None:
                return reply
            self.runtime.speaks_envelope = True
            state = read
        return self._outcome(await self._ended(state, began=began))

    async def end(self) -> None:
        """Stop the session, whatever it is doing, and return when it is gone.

        One that cannot be stopped is reported in the log and left to the process's keeper.
        """
        if self._call is None:
            return
        with anyio.move_on_after(STOP_LIMIT):
            try:
                await self._end(self._call)
                return
            except CallFailed as error:  # refused
                self._trouble = (
                    f"{error}; it takes the permission bedrock-agentcore:StopRuntimeSession"
                )
            except ContractError as error:
                self._trouble = str(error)
        logger.warning(
            "session %s could not be stopped and ends by itself once it is idle: %s",
            self.session_id,
            self._trouble or f"no answer within {STOP_LIMIT:g} s",
        )

    async def _started(self, body: bytes) -> Any:
        backoff = Backoff(self.runtime.settings.retry_time)
        start = functools.partial(self.runtime.start, self.session_id, body, self.redaction)
        while True:
            existed, self._may_exist = self._may_exist, True
            try:
                return await self._called(start)
            except ContractError:
                self._may_exist = existed
                raise
            except CallFailed as failure:
                if failure.kind in MADE_NONE:
                    self._may_exist = existed
                if failure.kind not in DID_NOT_RUN or not await backoff.wait():
                    raise

    async def _ended(self, state: State, *, began: float) -> State:
        """Poll until the agent is no longer at work."""
        polled = anyio.current_time()
        while state.status == "in_progress":
            # An agent that has held the last poll back has waited in our place.
            await anyio.sleep_until(polled + poll_interval(anyio.current_time() - began))
            polled = anyio.current_time()
            state = await self._asked()
        return state

    async def _asked(self) -> State:
        """How far the invocation is; failures are tolerated for `retry_time` seconds."""
        backoff = Backoff(self.runtime.settings.retry_time)
        body = encoded(envelope.get(self._id, wait=POLL_HELD))
        ask = functools.partial(self.runtime.ask, self.session_id, body, self.redaction)
        while True:
            await self.runtime.poll_rate.wait()
            try:
                reply = await self._called(ask)
            except CallFailed as failure:
                if not await backoff.wait():
                    raise self._error(failure) from None
                logger.info("session %s: a poll failed: %s", self.session_id, failure)
                continue
            state = State.read(reply, self._id)
            if state is None:
                raise SessionError(
                    f"session {self.session_id}: another agent answers than the one that was "
                    "started; was the runtime deployed anew? The payload is not run again"
                )
            return state

    def _outcome(self, state: State) -> Any:
        if state.status == "completed":
            if state.error is None:
                return state.result
            text = self.redaction.failure(state.error) or "an error without a text"
            raise AgentError(f"the agent raised {text}")
        if state.status == "interrupted":
            what = "the agent's process was started anew while it ran"
        else:
            what = "AgentCore has replaced the session's machine, or the start never arrived"
        raise SessionError(
            f"session {self.session_id}: {state.status}: {what}; the payload is not run again"
        )

    def _error(self, failure: CallFailed) -> RolloutError:
        text = f"session {self.session_id}: {failure.text}; {ADVICE[failure.kind]}"
        if failure.kind in ("full", "throttled"):
            return SessionBusy(text)
        return AgentError(text) if failure.kind == "agent" else SessionError(text)

    async def _called(self, function: Callable[[], Any]) -> Any:
        """What a function that blocks returns; one that is cut short runs on, unheard."""
        call = self._call = call_in_thread(function, place=self.place)
        await asyncio.wait([call])
        return call.result()

    async def _end(self, call: "asyncio.Task[Any]") -> None:
        again, until = 1.0, anyio.current_time() + LATE
        was_there = False
        while self._may_exist:
            # What is on its way now may make the session after it was stopped, even before the stop
            # is answered. So may what was lost, for a while.
            was_over = call.done()
            was_there = await self._stopped() or was_there
            if was_over and (was_there or not _is_lost(call) or anyio.current_time() >= until):
                break
            if was_over:
                await anyio.sleep(min(again, LATE))
            else:
                await asyncio.wait([call], timeout=again)
            again *= 2
        await self.runtime.forget(self.session_id)

    async def _stopped(self) -> bool:
        """Stop it, however often that fails; whether it was there. Raises what cannot pass."""
        waits = delays()
        while True:
            try:
                return await self.runtime.stop(self.session_id)
            except CallFailed as failure:
                if failure.kind == "refused":
                    raise
                self._trouble = str(failure)
            await anyio.sleep(next(waits))


def _is_lost(call: "asyncio.Task[Any]") -> bool:
    failure = None if call.cancelled() else call.exception()
    return isinstance(failure, CallFailed) and failure.kind == "lost"
