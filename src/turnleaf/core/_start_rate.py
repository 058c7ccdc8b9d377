"""How often rollouts start."""

import anyio

__all__ = ["StartRate"]


class StartRate:
    """Paces starts evenly: the n-th of a crowd starts n / per_second after the first.

    Starts are handed out in the order of asking and never catch up in a burst. Who is cancelled
    while waiting takes no start away from the others.
    """

    def __init__(self, per_second: float) -> None:
        if not per_second > 0:
            raise ValueError(f"per_second is {per_second}, but must be above 0")
        self._interval = 1 / per_second
        self._next = float("-inf")
        self._turnstile = anyio.Lock()

    async def wait(self) -> None:
        """Return when the next start is due."""
        async with self._turnstile:
            await anyio.sleep_until(self._next)
            self._next = anyio.current_time() + self._interval
