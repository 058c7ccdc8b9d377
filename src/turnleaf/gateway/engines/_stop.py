"""How calls that are under way are asked to end."""

import asyncio
from collections.abc import Callable

import attrs

__all__ = ["Stop"]


@attrs.define(eq=False)
class Stop:
    """Is set once, for all calls that share it. Belongs to the event loop in which they run.

    Listeners need no task that waits, which would cost each call more than its HTTP does: nearly
    all end unasked.
    """

    _event: asyncio.Event = attrs.field(init=False, factory=asyncio.Event)
    _listeners: list[Callable[[], None]] = attrs.field(init=False, factory=list)

    def is_set(self) -> bool:
        """Whether the calls are to end."""
        return self._event.is_set()

    def set(self) -> None:
        """Ask the calls to end; a second time changes nothing."""
        self._event.set()
        while self._listeners:
            self._listeners.pop(0)()

    async def wait(self) -> None:
        """Return once it is set."""
        await self._event.wait()

    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, when this is set: now if it is. It must not raise."""
        if self.is_set():
            listener()
        else:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Do not call `listener` any more, if that is still to come."""
        if listener in self._listeners:
            self._listeners.remove(listener)
