"""Waiting for what happens elsewhere: in a server's task, in another process."""

from collections.abc import Callable

import anyio


async def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; TimeoutError when it never does."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # nobody there could set an event
            await anyio.sleep(0.005)
