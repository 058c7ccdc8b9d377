"""Times that are compared with each other, on machines that are now quick and now slow."""

import time
from collections.abc import Callable


def quickest(runs: int, *calls: Callable[[], object]) -> list[float]:
    """Seconds that the quickest of some runs of each call took; the calls take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for call, taken in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [*map(min, seconds)]
