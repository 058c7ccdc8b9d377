from collections.abc import Awaitable, Callable

import anyio
import pytest

from turnleaf.core import wait_for_first

pytestmark = pytest.mark.anyio


class Waits:
    """Waits that end when told so, and say how they ended."""

    def __init__(self, *names: str) -> None:
        self.events = {name: anyio.Event() for name in names}
        self.log: list[str] = []

    def all(self) -> list[Callable[[], Awaitable[str]]]:
        def one(name: str) -> Callable[[], Awaitable[str]]:
            async def wait() -> str:
                try:
                    await self.events[name].wait()
                except anyio.get_cancelled_exc_class():
                    self.log.append(f"{name} cancelled")
                    raise
                self.log.append(f"{name} done")
                return name

            return wait

        return [one(name) for name in self.events]


async def test_the_first_wait_to_end_ends_the_others() -> None:
    for first in ("a", "b", "c"):
        waits = Waits("a", "b", "c")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_first, *waits.all())
            await anyio.wait_all_tasks_blocked()
            assert waits.log == []
            waits.events[first].set()
        assert waits.log[0] == f"{first} done"
        assert sorted(waits.log[1:]) == sorted(f"{n} cancelled" for n in "abc" if n != first)


async def test_what_has_ended_before_is_first() -> None:
    waits = Waits("a", "b")
    waits.events["b"].set()
    with anyio.fail_after(10):
        await wait_for_first(*waits.all())
    assert "b done" in waits.log
    # The caller is not cancelled along.
    await anyio.lowlevel.checkpoint()


async def test_cancelling_who_waits_cancels_every_wait() -> None:
    waits, passed = Waits("a", "b"), []
    async with anyio.create_task_group() as tasks:

        async def caller() -> None:
            await wait_for_first(*waits.all())
            passed.append("on")

        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert sorted(waits.log) == ["a cancelled", "b cancelled"]
    assert passed == []
