"""Threads for functions that may block for ever."""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import anyio

__all__ = ["DaemonThreads", "call_in_daemon_thread", "resting", "rests"]

Argument = TypeVar("Argument")
Returned = TypeVar("Returned")


_resting: set[threading.Thread] = set()


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """While this thread only waits for something to do, which no exit need wait for."""
    thread = threading.current_thread()
    _resting.add(thread)
    try:
        yield
    finally:
        _resting.discard(thread)


def rests(thread: threading.Thread) -> bool:
    """Whether the thread only waits for something to do."""
    return thread in _resting


async def call_in_daemon_thread(
    function: Callable[[Argument], Returned], argument: Argument, *, name: str = "turnleaf-agent"
) -> Returned:
    """`function(argument)` in a thread of its own, of that name; raises what it raises.

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

    threading.Thread(target=work, name=name, daemon=True).start()
    await ended.wait()
    if failures:
        raise failures[0]
    return results[0]


class DaemonThreads:
    """`size` threads, of that name, for what must be done even while the interpreter exits.

    Python 3.12 starts no thread then, and the system none when there are too many: these are
    started before, by the first `start`. The interpreter does not wait for them.
    """

    def __init__(self, size: int, *, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._started = 0
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def start(self) -> None:
        """Start those that are missing. Raises RuntimeError when the system has no more threads."""
        with self._lock:
            while self._started < self._size:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._started += 1

    async def call(self, function: Callable[[], Returned]) -> Returned:
        """`function()` in one of them, as soon as one is free; raises what it raises.

        Cancelling lets one that has begun run on, unheard.
        """
        future: concurrent.futures.Future[Returned] = concurrent.futures.Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001  # it belongs to the one who waits
                    future.set_exception(error)

        self._queue.put(work)
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            with resting():
                work = self._queue.get()
            work()
