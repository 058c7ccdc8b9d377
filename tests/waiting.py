"""Waiting for what happens elsewhere: in a server's task, in another process."""

import os
from collections.abc import Callable
from pathlib import Path

import anyio


async def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; TimeoutError when it never does."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # nobody there could set an event
            await anyio.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # a zombie has ended, whoever fails to collect it
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
