"""Tasks that run foreign code, which may ignore cancellation or raise anything."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import anyio

__all__ = [
    "cancel_and_wait",
    "drained",
    "is_cancelled",
    "is_interrupt",
    "start_task",
    "wait_for_first",
]

AGAIN = 2.0
"""Seconds after which a task that goes on is cancelled once more."""

_outlasting: set[asyncio.Task[Any]] = set()
"""What was given up, until it ends: the event loop itself holds tasks by weak references only."""


def start_task(coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """A task outside of all task groups, which could not be left before it has ended.

    coroutine: raises nothing but the user's interrupt, which has ended the event loop by then.
    """
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(_heard)
    return task


def _heard(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        # Asking is what keeps asyncio from reporting it.
        task.exception()


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]], *, limit: float) -> bool:
    """Cancel `tasks` and wait `limit` seconds at most; whether all have ended.

    They are cancelled once, and once more every AGAIN seconds. A cancel scope would do so at every
    turn of the event loop, which a task that ignores it would keep busy. A cancellation of the
    caller, too, is passed on to them, and else ignored.
    """
    running = {task for task in tasks if not task.done()}
    until = anyio.current_time() + limit
    with anyio.CancelScope(shield=True):
        while running and (left := until - anyio.current_time()) > 0:
            for task in running:
                task.cancel()
            try:
                await asyncio.wait(running, timeout=min(AGAIN, left))
            except asyncio.CancelledError:
                await drained()
            running = {task for task in running if not task.done()}
    for task in running:
        _outlasting.add(task)
        task.add_done_callback(_outlasting.discard)
    return not running


async def drained() -> None:
    """Take a cancellation of the current task that was asked for but not delivered yet.

    A task that returns with one ends as cancelled, and what it awaits next is broken off.
    """
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return


def is_cancelled() -> bool:
    """Whether somebody is cancelling the current task, rather than its code raising so by itself.

    Anything that awaits a cancelled future raises CancelledError all the same.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is the user's Ctrl-C, which ends the program, and not raised by other code.

    Python raises it in the main thread, wherever that is. Where asyncio's runner handles the
    signal, it is the innermost frame; where it does not, the two cannot be told apart.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return (
        innermost is not None and innermost.tb_frame.f_code.co_filename == asyncio.runners.__file__
    )


async def wait_for_first(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return once one of `waits` has, and cancel the others; none of them may raise."""
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            tasks.cancel_scope.cancel()

        for one in waits:
            tasks.start_soon(wait, one)
