import asyncio
import time

import anyio
import pytest

from turnleaf.core import Background
from turnleaf.core import _background as background_module
from turnleaf.core import _tasks as tasks_module

pytestmark = pytest.mark.anyio


async def test_the_end_waits_for_tasks_and_for_those_they_start() -> None:
    done: list[str] = []

    async with Background() as background:

        async def second() -> None:
            await anyio.lowlevel.checkpoint()
            done.append("second")

        async def first() -> None:
            await anyio.lowlevel.checkpoint()
            background.start(second, name="second")
            done.append("first")

        background.start(first, name="first")
    assert done == ["first", "second"]


async def test_a_failing_task_is_logged_and_disturbs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = anyio.Event()

    async def fail() -> None:
        raise ValueError("no luck")

    async def work() -> None:
        await anyio.wait_all_tasks_blocked()
        done.set()

    async with Background() as background:
        background.start(fail, name="row 1")
        background.start(work, name="row 2")
    assert done.is_set()
    assert "row 1: background task failed" in caplog.text
    assert "no luck" in caplog.text


async def test_a_task_that_cancels_itself_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    async with Background() as background:
        background.start(give_up, name="row 1")
        await anyio.wait_all_tasks_blocked()
        await anyio.lowlevel.checkpoint()
    assert "row 1: background task cancelled itself" in caplog.text


class FatalError(BaseException):
    """No Exception."""


# With a loop of its own: pytest's is not told of the user's interrupt, as asyncio's runner is.
@pytest.mark.parametrize(
    "error",
    [
        FatalError("no luck"),
        KeyboardInterrupt("no luck"),
        SystemExit("no luck"),
        GeneratorExit("no luck"),
        BaseExceptionGroup("no luck", [FatalError()]),
    ],
)
def test_whatever_a_task_raises_is_logged_and_disturbs_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    async def main() -> bool:
        release, done = anyio.Event(), anyio.Event()

        async def work() -> None:
            await release.wait()
            done.set()

        async with Background() as background:
            background.start(work, name="row 2")
            background.start(fail, name="row 1")
            await anyio.wait_all_tasks_blocked()
            release.set()
        return done.is_set()

    assert anyio.run(main)
    assert "row 1: background task failed" in caplog.text
    assert "no luck" in caplog.text


async def test_a_task_that_ignores_its_cancellation_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_module, "STOP_LIMIT", 0.3)
    monkeypatch.setattr(tasks_module, "AGAIN", 0.1)
    release, cancelled = asyncio.Event(), 0

    async def go_on() -> None:
        nonlocal cancelled
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                cancelled += 1

    before, busy = anyio.current_time(), time.process_time()
    async with Background(limit=0.01) as background:
        background.start(go_on, name="row 1")
        background.start(anyio.sleep_forever, name="row 2")
    assert anyio.current_time() - before < 2
    assert time.process_time() - busy < 0.2
    assert 2 <= cancelled <= 4
    assert [record.getMessage() for record in caplog.records] == [
        "row 1: clean-up still running; cancelled (limit: 0.01 s)",
        "row 2: clean-up still running; cancelled (limit: 0.01 s)",
        "row 1: clean-up ignores its cancellation; given up",
    ]
    (given_up,) = tasks_module._outlasting
    release.set()
    await asyncio.wait([given_up])
    assert not tasks_module._outlasting


async def test_what_outlasts_the_limit_is_logged_and_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Background(limit=0.01) as background:
        background.start(anyio.sleep_forever, name="row 1")
        background.start(anyio.lowlevel.checkpoint, name="row 2")
    assert [record.getMessage() for record in caplog.records] == [
        "row 1: clean-up still running; cancelled (limit: 0.01 s)"
    ]


async def test_cancellation_of_the_host_does_not_reach_the_tasks() -> None:
    release, done = anyio.Event(), anyio.Event()

    async def work() -> None:
        await release.wait()
        await anyio.lowlevel.checkpoint()
        done.set()

    async def host() -> None:
        async with Background() as background:
            background.start(work, name="row 1")
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        release.set()
    assert done.is_set()


async def test_an_error_of_the_body_is_raised_as_it_is() -> None:
    done = anyio.Event()

    async def work() -> None:
        done.set()

    async def host() -> None:
        async with Background() as background:
            background.start(work, name="row 1")
            raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        await host()
    assert done.is_set()


async def test_nothing_starts_outside_of_the_context() -> None:
    background = Background()
    with pytest.raises(RuntimeError):
        background.start(anyio.sleep_forever, name="row 1")
    async with background:
        ...
    with pytest.raises(RuntimeError):
        background.start(anyio.sleep_forever, name="row 1")
