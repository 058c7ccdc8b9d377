import anyio
import pytest

from turnleaf.core import StartRate

pytestmark = pytest.mark.anyio


# A loop may wake up ahead of the time by the resolution of its clock.
RESOLUTION = 1e-4


async def test_starts_are_evenly_spaced_in_the_order_of_asking() -> None:
    start_rate, starts = StartRate(100), []

    async def start(number: int) -> None:
        await start_rate.wait()
        starts.append((number, anyio.current_time()))

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(start, number)
    assert [number for number, _ in starts] == list(range(5))
    for number, time in starts:
        assert time - began > number / 100 - RESOLUTION


async def test_the_first_start_waits_for_nothing() -> None:
    start_rate = StartRate(0.001)
    with anyio.fail_after(5):
        await start_rate.wait()


async def test_time_without_starts_is_not_saved_up() -> None:
    start_rate = StartRate(50)
    await start_rate.wait()
    await anyio.sleep(0.05)
    began = anyio.current_time()
    await start_rate.wait()
    await start_rate.wait()
    assert anyio.current_time() - began > 0.02 - RESOLUTION


async def test_who_is_cancelled_takes_no_start_away() -> None:
    start_rate = StartRate(20)
    await start_rate.wait()
    began = anyio.current_time()
    async with anyio.create_task_group() as crowd:
        for _ in range(200):
            crowd.start_soon(start_rate.wait)
        await anyio.wait_all_tasks_blocked()
        crowd.cancel_scope.cancel()
    await start_rate.wait()
    assert anyio.current_time() - began < 5


@pytest.mark.parametrize("per_second", [0, -1, float("nan")])
def test_a_rate_is_above_zero(per_second: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        StartRate(per_second)
