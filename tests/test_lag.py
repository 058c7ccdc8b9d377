"""How long the event loop kept work waiting."""

import time
from itertools import pairwise

import anyio
import pytest

from tests.waiting import until
from turnleaf.gateway._lag import watch_lag

pytestmark = pytest.mark.anyio


async def test_every_moment_that_a_busy_loop_misses_counts() -> None:
    observed: list[float] = []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: watch_lag(observed.append, interval=0.01))
        await until(lambda: len(observed) > 1)
        before = len(observed)
        block(0.2)
        await until(lambda: len(observed) > before)
        tasks.cancel_scope.cancel()

    missed = observed[before:]
    # The first moment waited longest; those behind it what was left, an interval less each.
    assert missed[0] >= 0.18
    assert len(missed) >= 19
    steps = [earlier - later for earlier, later in pairwise(missed)]
    assert steps[:17] == pytest.approx([0.01] * 17)
    assert min(observed) >= 0


def block(seconds: float) -> None:
    """As work does that never awaits."""
    time.sleep(seconds)
