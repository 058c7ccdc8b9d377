from typing import Any

import anyio
import pytest

from turnleaf.gateway.engines import Stop

pytestmark = pytest.mark.anyio


def listener(told: list[str], name: str) -> Any:
    return lambda: told.append(name)


def test_each_listener_is_told_once() -> None:
    stop, told = Stop(), list[str]()
    stop.notify(listener(told, "a"))
    stop.notify(listener(told, "b"))
    assert (stop.is_set(), told) == (False, [])
    stop.set()
    stop.set()
    assert (stop.is_set(), told) == (True, ["a", "b"])


def test_a_listener_that_comes_late_is_told_at_once() -> None:
    stop, told = Stop(), list[str]()
    stop.set()
    stop.notify(listener(told, "a"))
    assert told == ["a"]
    stop.set()
    assert told == ["a"]


def test_a_listener_that_is_forgotten_is_not_told() -> None:
    stop, told = Stop(), list[str]()
    kept, forgotten = listener(told, "kept"), listener(told, "forgotten")
    stop.notify(lambda: stop.forget(forgotten))
    stop.notify(forgotten)
    stop.notify(kept)
    stop.set()
    assert told == ["kept"]
    stop.forget(kept)


async def test_whoever_waits_goes_on_when_it_is_set() -> None:
    stop = Stop()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop.wait)
            tasks.start_soon(stop.wait)
            await anyio.wait_all_tasks_blocked()
            stop.set()
        await stop.wait()
