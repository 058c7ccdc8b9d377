"""Work that goes on after the one who started it has returned."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

import anyio

from turnleaf.core._tasks import cancel_and_wait, is_interrupt, start_task

__all__ = ["Background"]

logger = logging.getLogger(__name__)

STOP_LIMIT = 5.0
"""Seconds that cancelled tasks may take to end."""


class Background:
    """An async context manager that owns background tasks and waits for them at its end.

    A cancellation of the host does not reach the tasks. At the end they get `limit` seconds, under
    cancellation too; what is left then is logged and cancelled, and given up if it still runs
    STOP_LIMIT seconds later. A task that raises, whatever it is, is logged.
    """

    def __init__(self, *, limit: float = 60.0) -> None:
        self._limit = limit
        self._is_open = False
        self._running: dict[asyncio.Task[None], str] = {}

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            with anyio.move_on_after(self._limit, shield=True):
                while self._running:
                    await asyncio.wait(set(self._running))
        finally:
            self._is_open = False
            for name in self._running.values():
                logger.error(
                    "%s: clean-up still running; cancelled (limit: %g s)", name, self._limit
                )
            if not await cancel_and_wait(self._running, limit=STOP_LIMIT):
                for name in self._running.values():
                    logger.error("%s: clean-up ignores its cancellation; given up", name)

    def start(self, function: Callable[[], Awaitable[object]], *, name: str) -> None:
        """Run `function` in a task of its own; `name` says in logs what it is for.

        Raises RuntimeError outside of the context.
        """
        if not self._is_open:
            raise RuntimeError(f"{name}: the background is not open")
        task = start_task(self._run(function, name), name=name)
        self._running[task] = name
        task.add_done_callback(self._running.pop)

    async def _run(self, function: Callable[[], Awaitable[object]], name: str) -> None:
        try:
            await function()
        except asyncio.CancelledError:
            if self._is_open:
                logger.exception("%s: background task cancelled itself", name)
        except BaseException as error:
            # Out of a task, asyncio lets some of them end the event loop.
            if is_interrupt(error):
                raise
            logger.exception("%s: background task failed", name)
