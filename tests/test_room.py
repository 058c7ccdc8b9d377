import asyncio
import threading

import anyio
import pytest

from turnleaf.sessions._room import Pace, Room

pytestmark = pytest.mark.anyio


async def test_a_place_is_free_again_once_all_have_let_go():
    room = Room(1)
    place = await room.take()
    place.hold()
    place.let_go()
    assert room.taken == 1
    with anyio.move_on_after(0.02) as waiting:
        await room.take()
    assert waiting.cancelled_caught
    thread = threading.Thread(target=place.let_go)
    thread.start()
    thread.join()
    assert room.taken == 0
    await room.take()


async def test_who_waits_longest_is_next():
    room, order = Room(1), []
    place = await room.take()

    async def enter(number):
        taken = await room.take()
        order.append(number)
        taken.let_go()

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(enter, number)
        await anyio.wait_all_tasks_blocked()
        place.let_go()
    assert order == [0, 1, 2, 3]
    assert room.taken == 0


async def test_who_is_cancelled_takes_no_place_even_when_called():
    room = Room(1)
    place = await room.take()
    first, second = (asyncio.create_task(room.take()) for _ in range(2))
    await anyio.wait_all_tasks_blocked()
    # The first is called and cancelled before it goes on.
    place.let_go()
    first.cancel()
    async with asyncio.timeout(5):
        (await second).let_go()
    assert first.cancelled()
    assert room.taken == 0


async def test_who_is_cancelled_while_waiting_is_passed_over():
    room = Room(1)
    place = await room.take()
    first, second = (asyncio.create_task(room.take()) for _ in range(2))
    await anyio.wait_all_tasks_blocked()
    first.cancel()
    await anyio.wait_all_tasks_blocked()
    place.let_go()
    async with asyncio.timeout(5):
        await second


def test_a_loop_that_is_gone_keeps_no_place():
    room = Room(1)
    loop = asyncio.new_event_loop()
    place = loop.run_until_complete(room.take())
    waiting = loop.create_task(room.take())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    place.let_go()
    assert room.taken == 0
    assert not waiting.done()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own
    waiting.get_coro().close()


def test_event_loops_share_a_pace():
    pace, times = Pace(200), []

    async def some():
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(one)

    async def one():
        await pace.wait()
        times.append(anyio.current_time())

    threads = [threading.Thread(target=asyncio.run, args=(some(),), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(times) == 60
    assert max(times) - min(times) >= 59 / 200
