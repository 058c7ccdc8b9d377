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
    """The waits between the tries of one call, for `limit` seconds from the first failure on."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._until: float | None = None
        self._delays = delays()

    async def wait(self) -> bool:
        """Wait before the next try; False, at once, when the time for them is over."""
        if self._until is None:
            # Not before: a call that was long in failing is tried again, too.
            self._until = anyio.current_time() + self._limit
        left = self._until - anyio.current_time()
        if left <= 0:
            return False
        await anyio.sleep(min(next(self._delays), left))
        return True
