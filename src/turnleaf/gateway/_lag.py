"""How long an event loop keeps work waiting that could run."""

from collections.abc import Callable

import anyio

__all__ = ["watch_lag"]

INTERVAL = 0.05
"""Seconds between two looks, each of which costs some 20 µs."""


async def watch_lag(observe: Callable[[float], None], *, interval: float = INTERVAL) -> None:
    """At evenly spaced moments, observe how many seconds work that was ready then had to wait.

    Moments that pass while the loop is busy count as well, each with what was left to wait: a
    look at whatever comes next would see one long wait where all that came meanwhile had it.
    Never returns.
    """
    due = anyio.current_time()
    while True:
        due += interval
        await anyio.sleep_until(due)
        now = anyio.current_time()
        observe(now - due)
        while due + interval <= now:
            due += interval
            observe(now - due)
