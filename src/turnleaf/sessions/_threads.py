"""Threads for functions that may block for ever."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

__all__ = ["call_in_daemon_thread"]

Argument = TypeVar("Argument")
Returned = TypeVar("Returned")


async def call_in_daemon_thread(
    function: Callable[[Argument], Returned], argument: Argument
) -> Returned:
    """`function(argument)` in a thread of its own; raises what it raises.

    Cancelling abandons the thread: it runs on, unheard, but the interpreter does not wait for it
    to exit, as it would for a worker thread of anyio's or of asyncio's.
    """
    loop, ended = asyncio.get_running_loop(), anyio.Event()
    results: list[Returned] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function(argument))
        except BaseException as error:  # noqa: BLE001  # it belongs to the one who waits
            failures.append(error)
        # The loop of an abandoned thread may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name="turnleaf-agent", daemon=True).start()
    await ended.wait()
    if failures:
        raise failures[0]
    return results[0]
