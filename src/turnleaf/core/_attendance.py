"""A session from its making to its leaving, with the result handed over in between."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
import attrs

from turnleaf.core._background import is_cancelled
from turnleaf.core._described import described, hidden, unwrapped
from turnleaf.core._errors import SessionError
from turnleaf.core._protocols import RolloutSession

__all__ = ["LEAVE_LIMIT", "Attendance"]

logger = logging.getLogger(__name__)

LEAVE_LIMIT = 60.0
"""Seconds that a session may take to be left, once its result is there or not wanted any more."""


@attrs.define(eq=False)
class Attendance:
    """Enters one session, runs it on `request` and leaves it, all in the task of `attend`.

    settled: set once there is a `result`, or a `failure` that explains why there is none.
    """

    name: str
    session: Callable[[], RolloutSession]
    request: dict[str, Any] = attrs.field(repr=False)
    secret: str = attrs.field(repr=False)
    settled: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    result: object = attrs.field(init=False, default=None)
    failure: Exception | None = attrs.field(init=False, default=None)
    _running: anyio.CancelScope = attrs.field(init=False, factory=anyio.CancelScope)
    _leaving: anyio.CancelScope = attrs.field(init=False, factory=anyio.CancelScope)

    async def attend(self) -> None:
        """Return when the session is left; raises nothing."""
        try:
            # Entering is never cut short: a session that is half made could not be stopped.
            with self._leaving:
                async with self.session() as agent:
                    with self._running:
                        await self._run(agent)
                    self._leaving.deadline = anyio.current_time() + LEAVE_LIMIT
        except Exception as error:  # noqa: BLE001  # whatever it is, it ends this rollout only
            self._break_off(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._break_off(SessionError(f"{self.name}: the session cancelled itself"))
        finally:
            if not self.settled.is_set():
                self._settle(failure=SessionError(f"{self.name}: the session was cut off"))
        if self._leaving.cancelled_caught:
            logger.error(
                "%s: the session was not left within %g s; its remote side may still run",
                self.name,
                LEAVE_LIMIT,
            )

    def dismiss(self) -> None:
        """Have the session left, whatever it is doing."""
        self._running.cancel()
        self._leaving.deadline = anyio.current_time() + LEAVE_LIMIT

    async def _run(self, agent: RolloutSession) -> None:
        if self._running.cancel_called:
            return
        try:
            self._settle(result=await agent.run(self.request))
        except Exception as error:  # noqa: BLE001  # whatever it is, it ends this rollout only
            self._settle(failure=error)

    def _break_off(self, error: Exception) -> None:
        if self.settled.is_set() or self._running.cancel_called:
            # The text may quote the request, and with it the key.
            text = hidden(described(unwrapped(error)), self.secret)
            logger.warning("%s: leaving the session raised %s", self.name, text)
        else:
            self._settle(failure=error)

    def _settle(self, *, result: object = None, failure: Exception | None = None) -> None:
        self.result, self.failure = result, failure
        self.settled.set()
