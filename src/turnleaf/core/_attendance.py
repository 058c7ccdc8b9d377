"""A session from its making to its leaving, with the result handed over in between."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import anyio
import attrs

from turnleaf.core._described import described, hidden, unwrapped
from turnleaf.core._errors import SessionError
from turnleaf.core._protocols import RolloutSession
from turnleaf.core._tasks import cancel_and_wait, drained, is_interrupt, start_task

__all__ = ["LEAVE_LIMIT", "Attendance"]

logger = logging.getLogger(__name__)

LEAVE_LIMIT = 60.0
"""Seconds that a session may take to be left, once it is dismissed."""

CANCEL_AGAIN = 10.0
"""Seconds after which a session whose `run` goes on is cancelled once more."""

STOP_LIMIT = 5.0
"""Seconds that it may take to end after that, cancelled."""


@attrs.define(eq=False)
class Attendance:
    """Makes one session, enters it, runs it and leaves it, all in one task of its own.

    Whatever the session raises stays in that task: no group of tasks has it as a member.

    admitted: set once there is room for the session, or never will be.
    settled: set once there is a `result`, or a `failure` that explains why there is none.
    session_id: what the session calls itself, where it has such a name.
    """

    name: str
    session: Callable[[], RolloutSession]
    admitted: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    settled: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    session_id: str | None = attrs.field(init=False, default=None)
    result: object = attrs.field(init=False, default=None)
    failure: BaseException | None = attrs.field(init=False, default=None)
    _request: dict[str, Any] = attrs.field(init=False, factory=dict, repr=False)
    _secret: str = attrs.field(init=False, default="", repr=False)
    _begun: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    _task: asyncio.Task[None] | None = attrs.field(init=False, default=None)
    _may_be_cut: bool = attrs.field(init=False, default=False)
    _dismissed: bool = attrs.field(init=False, default=False)

    def start(self) -> None:
        """Make the session, and wait for room where it has to."""
        self._task = start_task(self._attend(), name=self.name)

    def begin(self, request: dict[str, Any], *, secret: str) -> None:
        """Enter the session and run it on `request`; the rest follows by itself."""
        self._request, self._secret = request, secret
        self._begun.set()

    async def dismiss(self) -> None:
        """Have the session left, whatever it is doing; return when it is, or is given up."""
        self._dismissed = True
        if self._task is None:
            return
        until = anyio.current_time() + LEAVE_LIMIT
        try:
            # Entering is never cut short: a session that is half made could not be stopped.
            while not self._task.done() and (left := until - anyio.current_time()) > 0:
                if self._may_be_cut:
                    self._task.cancel()
                await asyncio.wait([self._task], timeout=min(CANCEL_AGAIN, left))
        finally:
            if not self._task.done():
                logger.error(
                    "%s: the session was not left within %g s; its remote side may still run",
                    self.name,
                    LEAVE_LIMIT,
                )
                if not await cancel_and_wait([self._task], limit=STOP_LIMIT):
                    logger.error("%s: the session ignores its cancellation; given up", self.name)

    async def _attend(self) -> None:
        try:
            session = self.session()
            session_id = getattr(session, "session_id", None)
            self.session_id = session_id if isinstance(session_id, str) else None
            room = getattr(session, "room", None)
            async with contextlib.AsyncExitStack() as stack:
                self._may_be_cut = True
                if room is not None:
                    await stack.enter_async_context(room())
                self.admitted.set()
                await self._begun.wait()
                self._may_be_cut = False
                # A cancellation that came with the beginning is not to cut the entering.
                await drained()
                if not self._dismissed:
                    agent = await stack.enter_async_context(session)
                    if not self._dismissed:
                        await self._run(agent)
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._break_off(error)
        finally:
            if not self.settled.is_set():
                self._settle(failure=SessionError(f"{self.name}: the session was cut off"))
        await drained()

    async def _run(self, agent: RolloutSession) -> None:
        self._may_be_cut = True
        try:
            self._settle(result=await agent.run(self._request))
            await drained()
        except asyncio.CancelledError:
            # A task of the session's own may have failed, which shows when the session is left.
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._settle(failure=error)
            await drained()
        finally:
            self._may_be_cut = False

    def _break_off(self, error: BaseException) -> None:
        cancelled = isinstance(error, asyncio.CancelledError)
        if self._dismissed and cancelled:
            return
        if self.settled.is_set() or self._dismissed:
            # The text may quote the request, and with it the key.
            text = hidden(described(unwrapped(error)), self._secret)
            logger.warning("%s: leaving the session raised %s", self.name, text)
        elif cancelled:
            self._settle(failure=SessionError(f"{self.name}: the session cancelled itself"))
        else:
            self._settle(failure=error)

    def _settle(self, *, result: object = None, failure: BaseException | None = None) -> None:
        self.result, self.failure = result, failure
        self.admitted.set()
        self.settled.set()
