"""The one thread in which a trainer process does its asynchronous work."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import attrs
from anyio.from_thread import BlockingPortal

from turnleaf.core._background import Background
from turnleaf.core._described import described
from turnleaf.core._errors import ServiceError

__all__ = ["Service"]

logger = logging.getLogger(__name__)

SIGNAL_CHECK = 0.25
"""Seconds after which a thread that waits for the service sees whether a signal has come."""
END_LIMIT = 5.0
"""Seconds that the thread may take to end, once its clean-up has."""

Returned = TypeVar("Returned")
Args = TypeVarTuple("Args")


class _Loop(asyncio.SelectorEventLoop):
    """Goes on after a task or a callback of foreign code has raised SystemExit and its like.

    asyncio lets those end the loop, and with it every rollout. Who awaits such a task gets it all
    the same. The user's Ctrl-C never comes here: Python raises it in the main thread.
    """

    def run_forever(self) -> None:
        while True:
            try:
                return super().run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                logger.warning("a task in the service raised %s", described(error))


@attrs.frozen
class _Started:
    pid: int
    thread: threading.Thread
    served: threading.Event
    portal: BlockingPortal
    background: Background
    waited_for: set[concurrent.futures.Future[Any]]


class Service:
    """Runs async functions, for callers in any thread and event loop, in one thread with one loop.

    The thread starts with the first use. `close`, which also runs at the interpreter's exit,
    cancels what is still running and waits for the clean-up that it left in `background`. It does
    not wait for tasks that ignore their cancellation: the thread then stays until the exit.
    """

    def __init__(self, *, clean_up_limit: float = 60.0) -> None:
        self._clean_up_limit = clean_up_limit
        self._lock = threading.Lock()
        self._started: _Started | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def background(self) -> Background:
        """Clean-up that outlives its starter; for functions that the service runs."""
        if self._started is None:
            raise RuntimeError("the service has not started")
        return self._started.background

    async def run(self, function: Callable[[*Args], Awaitable[Returned]], *args: *Args) -> Returned:
        """Await `function(*args)` in the service; cancelling the caller cancels it there.

        Raises what it raises; ServiceError once the service is closed, or when code that ran in it
        has ended its event loop; and what kept its thread from starting, such as an OSError, after
        which the next use tries again.
        """
        if self._is_here():
            return await function(*args)
        future = self._submit(function, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            # Nobody cancelled the caller: what ran has cancelled itself, or all that runs here.
            if caller is not None and not caller.cancelling() and not await self._lives():
                raise self._gone() from None
            raise

    def call(self, function: Callable[[*Args], Awaitable[Returned]], *args: *Args) -> Returned:
        """Wait for `function(*args)` in the service; not from within an event loop.

        Raises as `run` does.
        """
        future = self._submit(function, *args)
        try:
            # A signal breaks off the wait for a lock, but not when it comes just before it: without
            # a look now and then, Ctrl-C would do nothing until the work is done.
            while not future.done():
                with contextlib.suppress(TimeoutError):  # of this wait: the work's is returned
                    future.exception(timeout=SIGNAL_CHECK)
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._gone() from None
        finally:
            # Of use when the waiting itself was broken off, by KeyboardInterrupt.
            future.cancel()

    def keep(self, function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
        """Have `function(*args)` run in the service until it is closed, and return at once.

        What it raises is logged. Raises as `run` does; not from within the service.
        """

        async def kept() -> None:
            try:
                await function(*args)
            except Exception:
                logger.exception("what the service was to keep running has failed")

        self._submit(kept)

    def close(self) -> None:
        """Cancel what runs, wait for the clean-ups and end the thread; once closed it stays so."""
        self._refuse_here()
        if self._started is not None and self._started.pid != os.getpid():
            return  # of the process that this one was forked from, with all that ran in it
        with self._lock:
            started, closed_before = self._started, self._closed
            self._closed = True
            if started is not None and not closed_before:
                with contextlib.suppress(RuntimeError):  # it was ended from within
                    started.portal.call(started.portal.stop, True)
        if started is not None:
            started.served.wait()
            # The loop itself waits for all of its tasks, however long they go on.
            started.thread.join(END_LIMIT)
            if started.thread.is_alive():
                logger.error("a task ignores its cancellation; the service's thread is abandoned")
            atexit.unregister(self.close)

    def _submit(
        self, function: Callable[[*Args], Awaitable[Returned]], *args: *Args
    ) -> concurrent.futures.Future[Returned]:
        self._refuse_here()
        # The lock keeps `close` from ending the loop before it has taken the function.
        with self._lock:
            if self._closed:
                raise self._gone()
            if self._started is None or self._started.pid != os.getpid():
                self._started = self._start()
            try:
                future = self._started.portal.start_task_soon(function, *args)
            except RuntimeError:
                raise self._gone() from None
            waited_for = self._started.waited_for
            waited_for.add(future)
        future.add_done_callback(waited_for.discard)
        return future

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def _lives(self) -> bool:
        try:
            await asyncio.wrap_future(self._submit(anyio.lowlevel.checkpoint))
        except (ServiceError, asyncio.CancelledError):
            return False
        return True

    def _gone(self) -> ServiceError:
        if self._closed:
            return ServiceError("the service is closed")
        return ServiceError(
            "the service's event loop was ended from within: by an agent in this process, perhaps, "
            "that cancels all of its tasks or stops it"
        )

    def _is_here(self) -> bool:
        return self._started is not None and self._started.thread is threading.current_thread()

    def _refuse_here(self) -> None:
        if self._is_here():
            raise RuntimeError("the service's own thread cannot wait for itself")

    def _start(self) -> _Started:
        ready: concurrent.futures.Future[tuple[BlockingPortal, Background]]
        ready = concurrent.futures.Future()
        served = threading.Event()
        # Of this thread alone: one that could not start may end while the next one is at work.
        waited_for: set[concurrent.futures.Future[Any]] = set()

        def serve() -> None:
            try:
                anyio.run(self._serve, ready, served, backend_options={"loop_factory": _Loop})
            except BaseException as error:  # noqa: BLE001  # nobody else is told
                if ready.done():
                    logger.error("the service's event loop ended: %s", described(error))
                else:
                    # Nothing else would tell the caller, who waits with the lock held.
                    ready.set_exception(error)
            finally:
                served.set()
                # A loop that is ended from within leaves tasks that never began.
                with self._lock:
                    left = tuple(waited_for)
                for future in left:
                    future.cancel()

        # A daemon: for any other thread the interpreter would wait before it runs `close`.
        thread = threading.Thread(target=serve, name="turnleaf", daemon=True)
        thread.start()
        portal, background = ready.result()
        atexit.register(self.close)
        return _Started(os.getpid(), thread, served, portal, background, waited_for)

    async def _serve(
        self,
        ready: concurrent.futures.Future[tuple[BlockingPortal, Background]],
        served: threading.Event,
    ) -> None:
        # The portal ends first: what it cancels may leave clean-up to the background.
        async with (
            Background(limit=self._clean_up_limit) as background,
            BlockingPortal() as portal,
        ):
            ready.set_result((portal, background))
            await portal.sleep_until_stopped()
        served.set()
