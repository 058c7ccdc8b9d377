"""slime's abort, seen from the service's thread."""

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import attrs

__all__ = ["AbortWatch"]

logger = logging.getLogger(__name__)

INTERVAL = 0.05
"""Seconds between two looks at slime's flag; nothing tells of it."""


@attrs.define(eq=False)
class AbortWatch:
    """Gives training rollouts the event that is set when slime aborts them.

    is_aborting: reads slime's flag. close_keys: ends every training key at the gateway, and with
    them the engine calls; it begins before any rollout ends its own, so that no agent starts
    another call.
    """

    _is_aborting: Callable[[], bool]
    _close_keys: Callable[[], Awaitable[None]]
    _waiting: int = attrs.field(init=False, default=0)
    _event: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    _wanted: anyio.Event = attrs.field(init=False, factory=anyio.Event)

    def enter(self) -> anyio.Event:
        """A training rollout begins; the event tells it to end."""
        if self._event.is_set() and not self._is_aborting():
            # slime has begun another step before `keep` looked.
            self._event = anyio.Event()
        self._waiting += 1
        self._wanted.set()
        return self._event

    def leave(self) -> None:
        """A training rollout has ended."""
        self._waiting -= 1

    async def keep(self) -> None:
        """Watch, until cancelled, for as long as there are training rollouts."""
        while True:
            if not self._waiting:
                self._wanted = anyio.Event()
                await self._wanted.wait()
            # What starts before slime takes its flag back gets an event that is set.
            if self._is_aborting() and not self._event.is_set():
                await self._abort()
            await anyio.sleep(INTERVAL)

    async def _abort(self) -> None:
        logger.info("slime aborts %d rollouts", self._waiting)
        event = self._event
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._close)
            await anyio.lowlevel.checkpoint()
            # Not after the keys are closed: agents that meet a closed key fail by themselves.
            event.set()

    async def _close(self) -> None:
        try:
            await self._close_keys()
        except Exception:
            # Each rollout closes its own key, too; later aborts are still to be seen.
            logger.exception("the training keys could not be closed at once")
