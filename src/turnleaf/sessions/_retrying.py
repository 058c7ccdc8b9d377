"""How long to wait before what has failed is tried again."""

import random
from collections.abc import Iterator

import anyio

__all__ = ["Backoff", "delays"]

FIRST = 0.25  # seconds
LONGEST = 8.0


def delays() -> Iterator[float]:
    """Seconds to wait before each repetition: twice as long each time up to LONGEST, of which a
    random half is left out, so that those who failed together do not return together."""
    longest = FIRST
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(2 * longest, LONGEST)


class Backoff:
    """The waits between the tries of one call, `limit` seconds in all."""

    def __init__(self, limit: float) -> None:
        self._until = anyio.current_time() + limit
        self._delays = delays()

    async def wait(self) -> bool:
        """Wait before the next try; False, at once, when the time for them is over."""
        left = self._until - anyio.current_time()
        if left <= 0:
            return False
        await anyio.sleep(min(next(self._delays), left))
        return True
