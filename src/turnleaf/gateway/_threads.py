"""Work in a thread, whose errors hold on to nothing."""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

__all__ = ["in_thread"]

Result = TypeVar("Result")


async def in_thread(
    work: Callable[[], Result], *, limiter: anyio.CapacityLimiter | None = None
) -> Result:
    """What `work` returns, or raises, in a thread of anyio's.

    An error that anyio itself passes on has a traceback with the frame in it that holds the error:
    until the garbage collector comes, all that the work was about stays in memory.
    """
    result, error = await anyio.to_thread.run_sync(_tried, work, limiter=limiter)
    if error is None:
        return result  # type: ignore[return-value]
    try:
        raise error
    finally:
        error = None  # as above, in this frame


def _tried(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  # raised again by whoever asked
        return None, error
