"""A session from its making to its leaving, with the result handed over in between."""

import asyncio
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
    """Enters one session, runs it on `request` and leaves it, all in one task of its own.

    Whatever the session raises stays in that task: no group of tasks has it as a member.

    settled: set once there is a `result`, or a `failure` that explains why there is none.
    session_id: what the session calls itself, where it has such a name.
    """

    name: str
    session: Callable[[], RolloutSession]
    request: dict[str, Any] = attrs.field(repr=False)
    secret: str = attrs.field(repr=False)
    settled: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    session_id: str | None = attrs.field(init=False, default=None)
    result: object = attrs.field(init=False, default=None)
    failure: BaseException | None = attrs.field(init=False, default=None)
    _task: asyncio.Task[None] | None = attrs.field(init=False, default=None)
    _is_running: bool = attrs.field(init=False, default=False)
    _dismissed: bool = attrs.field(init=False, default=False)

    def start(self) -> None:
        """Enter the session; the rest follows by itself."""
        self._task = start_task(self._attend(), name=self.name)

    async def dismiss(self) -> None:
        """Have the session left, whatever it is doing; return when it is, or is given up."""
        self._dismissed = True
        if self._task is None:
            return
        until = anyio.current_time() + LEAVE_LIMIT
        try:
            # Entering is never cut short: a session that is half made could not be stopped.
            while not self._task.done() and (left := until - anyio.current_time()) > 0:
                if self._is_running:
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
            async with session as agent:
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
        self._is_running = True
        try:
            self._settle(result=await agent.run(self.request))
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
            self._is_running = False

    def _break_off(self, error: BaseException) -> None:
        cancelled = isinstance(error, asyncio.CancelledError)
        if self._dismissed and cancelled:
            return
        if self.settled.is_set() or self._dismissed:
            # The text may quote the request, and with it the key.
            text = hidden(described(unwrapped(error)), self.secret)
            logger.warning("%s: leaving the session raised %s", self.name, text)
        elif cancelled:
            self._settle(failure=SessionError(f"{self.name}: the session cancelled itself"))
        else:
            self._settle(failure=error)

    def _settle(self, *, result: object = None, failure: BaseException | None = None) -> None:
        self.result, self.failure = result, failure
        self.settled.set()
