"""An event loop whose clock stands still until a test moves it: waiting costs nothing, and what
happens in a second is the same on every machine."""

import asyncio
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SETTLED = 2  # rounds in which nothing else ran; the first may still start timers that are due
MOST_ROUNDS = 100_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what can go on, and no timer before `advance` reaches it."""

    def __init__(self) -> None:
        self.now = 1_000.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run until nothing goes on by itself."""
        self.run_until_complete(self._idle())

    def advance(self, seconds: float) -> None:
        """Let the time pass, timer by timer."""
        end = self.now + seconds
        self.settle()
        while (due := self._next_timer()) <= end:
            self.now = max(self.now, due)
            self.settle()
        self.now = end
        self.settle()

    def rule_clocks_of(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Have the `time.monotonic` of these modules tell this loop's time."""
        for module in modules:
            clock = SimpleNamespace(monotonic=self.time, time=module.time.time)
            patch.setattr(module, "time", clock)

    def _next_timer(self) -> float:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]  # asyncio's own
        return min((each.when() for each in timers if not each.cancelled()), default=math.inf)

    async def _idle(self) -> None:
        quiet = 0
        for _ in range(MOST_ROUNDS):
            await asyncio.sleep(0)
            quiet = 0 if self._ready else quiet + 1  # type: ignore[attr-defined]  # asyncio's own
            if quiet == SETTLED:
                return
        raise AssertionError("something goes round without end")
