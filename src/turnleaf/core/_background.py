"""Work that goes on after the one who started it has returned."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

import anyio

__all__ = ["Background", "is_cancelled"]

logger = logging.getLogger(__name__)


class Background:
    """An async context manager that owns background tasks and waits for them at its end.

    A cancellation of the host does not reach the tasks. At the end they get `limit` seconds, under
    cancellation too; what is left then is logged and cancelled. A task that raises is logged.
    """

    def __init__(self, *, limit: float = 60.0) -> None:
        self._limit = limit
        self._group = anyio.create_task_group()
        self._running: dict[anyio.CancelScope, str] = {}
        self._finished = anyio.Event()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(self._limit, shield=True):
            while self._running:
                self._finished = anyio.Event()
                await self._finished.wait()
        for scope, name in self._running.items():
            logger.error("%s: clean-up still running after %g s; cancelled", name, self._limit)
            scope.cancel()
        # The group does not see the error of the body, which it would wrap in a group.
        await self._group.__aexit__(None, None, None)

    def start(self, function: Callable[[], Awaitable[object]], *, name: str) -> None:
        """Run `function` in a task of its own; `name` says in logs what it is for.

        Raises RuntimeError outside of the context.
        """
        scope = anyio.CancelScope(shield=True)
        self._group.start_soon(self._run, function, scope, name=name)
        self._running[scope] = name

    async def _run(
        self, function: Callable[[], Awaitable[object]], scope: anyio.CancelScope
    ) -> None:
        with scope:
            try:
                await function()
            except Exception:
                logger.exception("%s: background task failed", self._running[scope])
            except asyncio.CancelledError:
                # Out of a task that nobody cancelled it would cancel the group and its host.
                if is_cancelled():
                    raise
                logger.exception("%s: background task cancelled itself", self._running[scope])
            finally:
                del self._running[scope]
                self._finished.set()


def is_cancelled() -> bool:
    """Whether somebody is cancelling the current task, rather than its code raising so by itself.

    Anything that awaits a cancelled future raises CancelledError all the same.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
