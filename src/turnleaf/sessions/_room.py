"""Room for a limited number at a time, and an even pace; first come, first served."""

import asyncio
import threading
from collections import deque

import anyio
import anyio.lowlevel
import attrs

from turnleaf.core import StartRate

__all__ = ["Pace", "Place", "Room"]


@attrs.define(eq=False)
class Place:
    """A place in a room, which is free again once everyone that holds it has let go.

    It is taken with one hold. Any thread may hold it and let go.
    """

    _room: "Room"
    _holds: int = attrs.field(init=False, default=1)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)

    def hold(self) -> None:
        with self._lock:
            self._holds += 1

    def let_go(self) -> None:
        with self._lock:
            self._holds -= 1
            is_free = self._holds == 0
        if is_free:
            self._room.give_back()


@attrs.define(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop = attrs.field(factory=asyncio.get_running_loop)
    called: anyio.Event = attrs.field(factory=anyio.Event)


class Room:
    """`size` places, for tasks of any event loop."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._size = size
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._size - self._free

    async def take(self) -> Place:
        """A place, once there is one. Who is cancelled while waiting takes none."""
        await anyio.lowlevel.checkpoint()
        with self._lock:
            if self._free:
                self._free -= 1
                return Place(self)
            waiter = _Waiter()
            self._waiting.append(waiter)
        try:
            await waiter.called.wait()
        except BaseException:
            with self._lock:
                was_called = waiter not in self._waiting
                if not was_called:
                    self._waiting.remove(waiter)
            if was_called:
                self.give_back()
            raise
        return Place(self)

    def give_back(self) -> None:
        """Free a place, or hand it on to who has waited longest."""
        with self._lock:
            while self._waiting:
                waiter = self._waiting.popleft()
                try:
                    waiter.loop.call_soon_threadsafe(waiter.called.set)
                except RuntimeError:
                    continue  # its loop is closed, and nobody waits there any more
                return
            self._free += 1


class Pace:
    """`per_second` at most, evenly spaced, for tasks of any event loop."""

    def __init__(self, per_second: float) -> None:
        self._rate = StartRate(per_second)
        # The turnstile of a StartRate is for one event loop; in here it has nobody to hold up.
        self._turnstile = Room(1)

    async def wait(self) -> None:
        """Return when it is the caller's turn. Who is cancelled while waiting takes none."""
        place = await self._turnstile.take()
        try:
            await self._rate.wait()
        finally:
            place.let_go()
