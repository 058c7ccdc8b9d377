"""`slime.utils.async_utils`: one event loop in the background runs every rollout."""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

__all__ = ["get_async_loop", "run"]

Result = TypeVar("Result")


@cache
def get_async_loop() -> asyncio.AbstractEventLoop:
    """The process's loop; its thread never ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime-rollouts", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Block this thread until the coroutine has run in the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, get_async_loop()).result()
