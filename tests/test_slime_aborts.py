"""What keeps watch in the service's thread: over slime's abort flag, and over the gateway worker.

Sleeping is waiting until the test says so.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import attrs
import pytest

from turnleaf.adapters.slime import _workers
from turnleaf.adapters.slime._aborts import INTERVAL, AbortWatch
from turnleaf.adapters.slime._workers import FIRST_PAUSE, LONGEST_PAUSE, STEADY, KeptWorker
from turnleaf.core import ContractError, GatewayError, SettingsError
from turnleaf.gateway import WorkerConfig

pytestmark = pytest.mark.anyio


@attrs.define
class Clock:
    now: float = 0.0
    slept: list[float] = attrs.Factory(list)
    _woken: anyio.Event = attrs.Factory(anyio.Event)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._woken.wait()

    async def wake(self, passed: float = 0.0) -> None:
        """Let whoever sleeps go on, until all wait again."""
        self.now += passed
        self._woken.set()
        self._woken = anyio.Event()
        await anyio.wait_all_tasks_blocked()


@pytest.fixture
async def clock(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(anyio, "sleep", clock.sleep)
    monkeypatch.setattr(anyio, "current_time", lambda: clock.now)
    return clock


def gateway_of(worker: KeptWorker) -> Any:
    serving = worker.serving()
    assert serving is not None
    return serving.gateway


@asynccontextmanager
async def kept(function: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:

        async def keep() -> None:
            await function()

        tasks.start_soon(keep)
        await anyio.wait_all_tasks_blocked()
        yield
        tasks.cancel_scope.cancel()


@attrs.define
class Slime:
    """slime's flag, how often it was read, and the keys' end."""

    aborting: bool = False
    looks: int = 0
    log: list[str] = attrs.Factory(list)
    closing: Exception | None = None
    may_close: anyio.Event | None = None

    def is_aborting(self) -> bool:
        self.looks += 1
        return self.aborting

    async def close_keys(self) -> None:
        self.log.append("closing")
        if self.closing is not None:
            raise self.closing
        if self.may_close is not None:
            await self.may_close.wait()
        self.log.append("closed")

    def watch(self) -> AbortWatch:
        return AbortWatch(self.is_aborting, self.close_keys)


async def test_an_abort_reaches_every_training_rollout(clock: Clock) -> None:
    slime = Slime()
    watch = slime.watch()
    async with kept(watch.keep):
        events = [watch.enter() for _ in range(3)]
        await clock.wake()
        await clock.wake()
        assert not any(event.is_set() for event in events)
        assert slime.log == []
        slime.aborting = True
        await clock.wake()
        assert all(event.is_set() for event in events)
        assert slime.log == ["closing", "closed"]
    assert set(clock.slept) == {INTERVAL}


async def test_without_rollouts_nobody_looks(clock: Clock) -> None:
    slime = Slime(aborting=True)
    watch = slime.watch()
    async with kept(watch.keep):
        assert slime.looks == 0
        assert clock.slept == []
        watch.enter()
        await anyio.wait_all_tasks_blocked()
        assert slime.log == ["closing", "closed"]
        watch.leave()
        slime.aborting = False
        await clock.wake()
        looks = slime.looks
        await clock.wake()
        assert slime.looks == looks


async def test_an_abort_that_came_before_the_first_rollout_is_seen(clock: Clock) -> None:
    slime = Slime(aborting=True)
    watch = slime.watch()
    event = watch.enter()
    assert not event.is_set()
    async with kept(watch.keep):
        assert event.is_set()


async def test_what_starts_during_an_abort_ends_with_it_and_the_keys_are_closed_once(
    clock: Clock,
) -> None:
    slime = Slime()
    watch = slime.watch()
    async with kept(watch.keep):
        watch.enter()
        slime.aborting = True
        await clock.wake()
        for _ in range(3):
            assert watch.enter().is_set()
            await clock.wake()
        assert slime.log == ["closing", "closed"]


@pytest.mark.parametrize("looked_between", [True, False])
async def test_the_next_step_is_not_aborted_by_the_last_ones_flag(
    clock: Clock, looked_between: bool
) -> None:
    slime = Slime()
    watch = slime.watch()
    async with kept(watch.keep):
        for step in range(3):
            events = [watch.enter() for _ in range(2)]
            await clock.wake()
            assert not any(event.is_set() for event in events), step
            slime.aborting = True
            await clock.wake()
            assert all(event.is_set() for event in events), step
            for _ in events:
                watch.leave()
            slime.aborting = False
            if looked_between:
                await clock.wake()
        assert slime.log == ["closing", "closed"] * 3


async def test_the_keys_begin_to_close_before_the_rollouts_end(clock: Clock) -> None:
    slime = Slime(may_close=anyio.Event())
    watch = slime.watch()
    order = slime.log
    async with kept(watch.keep), anyio.create_task_group() as tasks:

        async def rollout() -> None:
            await watch.enter().wait()
            order.append("rollout ends")

        tasks.start_soon(rollout)
        await anyio.wait_all_tasks_blocked()
        slime.aborting = True
        await clock.wake()
        # A gateway that takes its time holds no rollout back.
        assert order == ["closing", "rollout ends"]
        assert slime.may_close is not None
        slime.may_close.set()
        await anyio.wait_all_tasks_blocked()
        assert order == ["closing", "rollout ends", "closed"]


@pytest.mark.parametrize("error", [GatewayError("away"), RuntimeError("closed"), OSError("x")])
async def test_keys_that_cannot_be_closed_do_not_end_the_watch(
    clock: Clock, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    slime = Slime(closing=error)
    watch = slime.watch()
    async with kept(watch.keep):
        for _ in range(2):
            event = watch.enter()
            await clock.wake()
            slime.aborting = True
            await clock.wake()
            assert event.is_set()
            slime.aborting = False
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


@attrs.define
class Start:
    """One start of a worker: it is ready when told so, and ends when told so."""

    ready: anyio.Event = attrs.Factory(anyio.Event)
    over: anyio.Event = attrs.Factory(anyio.Event)
    failure: Exception | None = None
    gateway: Any = attrs.Factory(lambda: SimpleNamespace(base_url="http://worker"))
    left: bool = False

    async def becomes_ready(self) -> None:
        self.ready.set()
        await anyio.wait_all_tasks_blocked()

    async def fails(self, failure: Exception) -> None:
        self.failure = failure
        await self.becomes_ready()

    async def ends(self) -> None:
        self.over.set()
        await anyio.wait_all_tasks_blocked()

    async def ended(self) -> int:
        await self.over.wait()
        return -9


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    starts: list[Start] = []

    @asynccontextmanager
    async def running_worker(config: WorkerConfig) -> AsyncIterator[Any]:
        start = Start()
        starts.append(start)
        try:
            await start.ready.wait()
            if start.failure is not None:
                raise start.failure
            yield SimpleNamespace(gateway=start.gateway, pid=4711, ended=start.ended)
        finally:
            start.left = True

    monkeypatch.setattr(_workers, "running_worker", running_worker)
    return starts


def kept_worker(tmp_path: Path) -> KeptWorker:
    return KeptWorker(WorkerConfig("http://engine", str(tmp_path), "token-of-control"))


@attrs.define
class Waiting:
    """Somebody who waits until the worker is settled."""

    done: bool = False

    async def wait(self, worker: KeptWorker) -> None:
        await worker.settled()
        self.done = True


async def test_rollouts_wait_for_the_first_worker(
    clock: Clock, starts: list[Start], tmp_path: Path
) -> None:
    worker, rollout = kept_worker(tmp_path), Waiting()
    async with kept(worker.keep), anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.wait, worker)
        await anyio.wait_all_tasks_blocked()
        assert not rollout.done
        assert worker.running is None
        await starts[0].becomes_ready()
        assert rollout.done
        assert gateway_of(worker) is worker.running is starts[0].gateway
    assert starts[0].left
    assert len(starts) == 1


async def test_a_worker_that_ended_has_a_successor_for_which_rollouts_wait(
    clock: Clock, starts: list[Start], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, rollout = kept_worker(tmp_path), Waiting()
    async with kept(worker.keep), anyio.create_task_group() as tasks:
        await starts[0].becomes_ready()
        await starts[0].ends()
        assert "4711) ended with exit code -9" in caplog.text
        assert worker.running is None
        assert starts[0].left
        tasks.start_soon(rollout.wait, worker)
        await clock.wake()
        assert len(starts) == 2
        assert not rollout.done
        await starts[1].becomes_ready()
        assert rollout.done
        assert gateway_of(worker) is starts[1].gateway


async def test_a_mistake_at_the_first_start_stays(
    clock: Clock, starts: list[Start], tmp_path: Path
) -> None:
    worker, rollout = kept_worker(tmp_path), Waiting()
    async with kept(worker.keep), anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.wait, worker)
        await starts[0].fails(SettingsError("no such tool_call_parser"))
        assert rollout.done
        errors = []
        for _ in range(2):
            await worker.settled()
            with pytest.raises(SettingsError, match=r"^no such tool_call_parser$") as raised:
                worker.serving()
            errors.append(raised.value)
        # Raised in several threads at once, an exception would gather all of their tracebacks.
        assert errors[0] is not errors[1]
        assert (len(starts), clock.slept) == (1, [])


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (GatewayError("not ready within 120 s"), "not ready within 120 s"),
        (OSError(24, "Too many open files"), "OSError: .*Too many open files"),
        (ValueError("not JSON"), "ValueError: not JSON"),
    ],
)
async def test_a_start_that_failed_fails_rollouts_until_the_next_one(
    clock: Clock, starts: list[Start], tmp_path: Path, failure: Exception, said: str
) -> None:
    worker, early, late = kept_worker(tmp_path), Waiting(), Waiting()
    async with kept(worker.keep), anyio.create_task_group() as tasks:
        tasks.start_soon(early.wait, worker)
        await starts[0].fails(failure)
        assert not early.done
        await clock.wake(_workers.PATIENCE + 1)
        await starts[1].fails(failure)
        assert early.done
        for _ in range(2):
            with pytest.raises(GatewayError, match=f"the gateway worker did not start: {said}"):
                worker.serving()
        await clock.wake()
        tasks.start_soon(late.wait, worker)
        await anyio.wait_all_tasks_blocked()
        assert not late.done
        await starts[2].becomes_ready()
        assert late.done
        assert gateway_of(worker) is starts[2].gateway


async def test_what_has_worked_is_tried_again_even_after_a_mistake(
    clock: Clock, starts: list[Start], tmp_path: Path
) -> None:
    worker, early, late = kept_worker(tmp_path), Waiting(), Waiting()
    async with kept(worker.keep), anyio.create_task_group() as tasks:
        await starts[0].becomes_ready()
        await starts[0].ends()
        await clock.wake()
        tasks.start_soon(early.wait, worker)
        # Such as an engine that does not answer the worker's check.
        await starts[1].fails(ContractError("the engine is away"))
        assert not early.done
        await clock.wake(_workers.PATIENCE + 1)
        await starts[2].fails(ContractError("the engine is away"))
        assert early.done
        with pytest.raises(GatewayError, match="the engine is away"):
            worker.serving()
        await clock.wake()
        tasks.start_soon(late.wait, worker)
        await starts[3].becomes_ready()
        assert late.done
        assert worker.running is starts[3].gateway


async def test_pauses_grow_until_a_worker_has_run_for_a_while(
    clock: Clock, starts: list[Start], tmp_path: Path
) -> None:
    worker = kept_worker(tmp_path)
    async with kept(worker.keep):
        for _ in range(8):
            await starts[-1].fails(GatewayError("away"))
            await clock.wake()
        assert clock.slept == [min(FIRST_PAUSE * 2**n, LONGEST_PAUSE) for n in range(8)]
        assert clock.slept[-1] == LONGEST_PAUSE
        await starts[-1].becomes_ready()
        clock.now += STEADY + 1
        await starts[-1].ends()
        await clock.wake()
        await starts[-1].becomes_ready()
        await starts[-1].ends()
        assert clock.slept[8:] == [FIRST_PAUSE, 2 * FIRST_PAUSE]


async def test_between_two_workers_there_is_none_to_have(tmp_path: Path) -> None:
    assert kept_worker(tmp_path).serving() is None
