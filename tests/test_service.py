import asyncio
import errno
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from turnleaf.core import Service, ServiceError, SettingsError
from turnleaf.core import _background as background_module
from turnleaf.core import _service as service_module

# What waits for another thread fails here instead of hanging.
PATIENCE = 10.0


async def where() -> int:
    await anyio.lowlevel.checkpoint()
    return threading.get_ident()


def ended_well(program: str, *, warnings: str = "default") -> subprocess.CompletedProcess[str]:
    """A Python program that has ended well, with what it wrote."""
    run = subprocess.run(
        [sys.executable, "-W", warnings, "-c", program], timeout=60, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run


async def refuse() -> None:
    raise SettingsError("bare")


def test_callers_of_every_kind_share_one_thread() -> None:
    async def ask(service: Service) -> int:
        return await service.run(where)

    with Service() as service, ThreadPoolExecutor() as threads:
        loops = [threads.submit(anyio.run, ask, service) for _ in range(4)]
        plain = [threads.submit(service.call, where) for _ in range(4)]
        idents = {future.result(PATIENCE) for future in [*loops, *plain]}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_first_use_raced_by_many_threads_starts_one_thread() -> None:
    for _ in range(20):
        barrier = threading.Barrier(8)
        with Service() as service, ThreadPoolExecutor(8) as threads:

            def race(service: Service = service, barrier: threading.Barrier = barrier) -> int:
                barrier.wait(PATIENCE)
                return service.call(where)

            futures = [threads.submit(race) for _ in range(8)]
            assert len({future.result(PATIENCE) for future in futures}) == 1


def test_arguments_and_results_pass_through() -> None:
    async def add(one: int, other: int) -> int:
        return one + other

    with Service() as service:
        assert service.call(add, 1, 2) == 3
        assert asyncio.run(service.run(add, 3, 4)) == 7


def test_errors_arrive_bare() -> None:
    with Service() as service:
        with pytest.raises(SettingsError, match="bare"):
            service.call(refuse)
        with pytest.raises(SettingsError, match="bare"):
            asyncio.run(service.run(refuse))


def test_an_interrupt_that_does_not_wake_the_caller_is_noticed() -> None:
    """As one that comes while its thread is about to wait, but does not yet."""
    began = threading.Event()

    async def work() -> None:
        began.set()
        await anyio.sleep(PATIENCE)
        returned.append(True)

    def interrupt() -> None:
        began.wait(PATIENCE)
        # A handler that runs in another thread wakes nobody.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    returned: list[bool] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    try:
        with Service() as service:
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                service.call(work)
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    assert not returned


def test_the_service_may_use_itself_but_not_wait_for_itself() -> None:
    async def within(service: Service) -> int:
        with pytest.raises(RuntimeError, match="cannot wait for itself"):
            service.call(where)
        with pytest.raises(RuntimeError, match="cannot wait for itself"):
            service.close()
        return await service.run(where)

    with Service() as service:
        assert service.call(within, service) == service.call(where)


def test_cancelling_the_caller_cancels_the_work_and_nothing_else() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async def caller(service: Service) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.run, work)
            await anyio.to_thread.run_sync(started.wait, PATIENCE)
            tasks.cancel_scope.cancel()

    with Service() as service:
        anyio.run(caller, service)
        assert cancelled.wait(PATIENCE)
        assert service.call(where)


def test_work_that_cancels_itself_does_not_blame_the_service() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with Service() as service, pytest.raises(asyncio.CancelledError):
        asyncio.run(service.run(give_up))


def test_closing_cancels_what_runs_and_waits_for_the_clean_up() -> None:
    cleaned: list[str] = []
    started = threading.Barrier(3)

    async def clean_up() -> None:
        await anyio.wait_all_tasks_blocked()
        cleaned.append("done")

    async def work(service: Service) -> None:
        try:
            await anyio.to_thread.run_sync(started.wait, PATIENCE)
            await anyio.sleep_forever()
        finally:
            service.background.start(clean_up, name="row 1")

    async def caller(service: Service) -> None:
        await service.run(work, service)

    with ThreadPoolExecutor() as threads:
        service = Service()
        pending = [
            threads.submit(service.call, work, service),
            threads.submit(anyio.run, caller, service),
        ]
        started.wait(PATIENCE)
        service.close()
        for future in pending:
            with pytest.raises(RuntimeError, match="the service is closed"):
                future.result(PATIENCE)
    assert cleaned == ["done", "done"]


def test_what_is_kept_runs_until_the_service_is_closed() -> None:
    started, cleaned = threading.Event(), threading.Event()
    seen: list[object] = []

    async def keep(one: int, other: int) -> None:
        seen.extend([one, other, threading.get_ident()])
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            cleaned.set()

    with Service() as service:
        service.keep(keep, 1, 2)
        assert started.wait(PATIENCE)
        # Others use the service beside it.
        assert seen == [1, 2, service.call(where)]
        assert not cleaned.is_set()
    assert cleaned.is_set()


def test_what_fails_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def until_blocked() -> None:
        await anyio.wait_all_tasks_blocked()

    with Service() as service:
        service.keep(refuse)
        service.keep(anyio.sleep_forever)
        service.call(until_blocked)
        assert service.call(where)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], SettingsError)


def test_nothing_can_be_kept_from_within_or_by_a_closed_service() -> None:
    async def within(service: Service) -> None:
        service.keep(where)

    with Service() as service, pytest.raises(RuntimeError, match="cannot wait for itself"):
        service.call(within, service)
    with pytest.raises(RuntimeError, match="the service is closed"):
        service.keep(where)


def test_closing_is_final_and_may_be_raced() -> None:
    with ThreadPoolExecutor() as threads:
        service = Service()
        service.call(where)
        closing = [threads.submit(service.close) for _ in range(8)]
        for future in closing:
            future.result(PATIENCE)
    with pytest.raises(RuntimeError, match="the service is closed"):
        service.call(where)
    with pytest.raises(RuntimeError, match="the service is closed"):
        asyncio.run(service.run(where))


def test_every_use_that_races_a_close_ends() -> None:
    def use(service: Service) -> str:
        try:
            service.call(where)
        except RuntimeError as error:
            return str(error)
        return "done"

    for _ in range(20):
        with ThreadPoolExecutor(5) as threads:
            service = Service()
            uses = [threads.submit(use, service) for _ in range(4)]
            threads.submit(service.close).result(PATIENCE)
            ends = {future.result(PATIENCE) for future in uses}
        assert ends <= {"done", "the service is closed"}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_task_of_foreign_code_ends_that_task_only(error: BaseException) -> None:
    async def tool() -> None:
        raise error

    async def agent() -> str:
        (outcome,) = await asyncio.gather(tool(), return_exceptions=True)
        asyncio.get_running_loop().call_soon(fail)
        await anyio.wait_all_tasks_blocked()
        return type(outcome).__name__

    def fail() -> None:
        raise error

    async def wait_for(event: anyio.Event) -> str:
        await event.wait()
        return "undisturbed"

    with Service() as service, ThreadPoolExecutor() as threads:
        event = service.call(make_event)
        other = threads.submit(service.call, wait_for, event)
        ended = threads.submit(service.call, agent)
        assert ended.result(PATIENCE) == type(error).__name__
        service.call(set_event, event)
        assert other.result(PATIENCE) == "undisturbed"


async def make_event() -> anyio.Event:
    return anyio.Event()


async def set_event(event: anyio.Event) -> None:
    event.set()


def test_closing_does_not_wait_for_a_task_that_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_module, "STOP_LIMIT", 0.05)
    monkeypatch.setattr(service_module, "END_LIMIT", 0.05)
    release = threading.Event()

    async def go_on() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def work(service: Service) -> threading.Thread:
        service.background.start(go_on, name="row 1")
        return threading.current_thread()

    service = Service(clean_up_limit=0.05)
    thread = service.call(work, service)
    try:
        with ThreadPoolExecutor() as threads:
            threads.submit(service.close).result(PATIENCE)
        assert thread.is_alive()
        assert "the service's thread is abandoned" in caplog.text
    finally:
        release.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_unused_service_has_no_thread_and_no_background() -> None:
    before = threading.active_count()
    service = Service()
    with pytest.raises(RuntimeError, match="has not started"):
        _ = service.background
    service.close()
    assert threading.active_count() == before


NO_FILE_LEFT = """
import errno, os, resource
import anyio
from turnleaf.core import Service

async def answer():
    return 42

anyio.run(answer)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass

service = Service()
for _ in range(2):
    try:
        service.call(answer)
    except OSError as error:
        print(errno.errorcode[error.errno])
for file in held:
    os.close(file)
print(service.call(answer))
"""


def test_a_loop_that_cannot_start_is_told_and_tried_again() -> None:
    assert ended_well(NO_FILE_LEFT).stdout == "EMFILE\nEMFILE\n42\n"


class HeldBack:
    """A lock that a thread which could not start gets only once the next one is at work."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next_is_at_work = threading.Event()
        self.not_started: threading.Thread | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is self.not_started:
            assert self.next_is_at_work.wait(PATIENCE)
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_thread_that_could_not_start_does_not_end_what_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_back = HeldBack()
    service = Service()
    monkeypatch.setattr(service, "_lock", held_back)

    def no_file_left() -> None:
        held_back.not_started = threading.current_thread()
        raise OSError(errno.EMFILE, "no file left")

    async def outlive_the_other() -> int:
        held_back.next_is_at_work.set()
        assert held_back.not_started is not None
        await anyio.to_thread.run_sync(held_back.not_started.join)
        return 42

    with monkeypatch.context() as patched:
        patched.setattr(service_module, "_Loop", no_file_left)
        with pytest.raises(OSError, match="no file left"):
            service.call(where)
    assert service.call(outlive_the_other) == 42
    service.close()


LEFT_OPEN = """
import anyio
from turnleaf.core import Service

service = Service()

async def clean_up():
    await anyio.wait_all_tasks_blocked()
    print("cleaned up", flush=True)

async def work():
    service.background.start(clean_up, name="row 1")

service.call(work)
"""


def test_the_interpreter_ends_only_after_the_clean_up() -> None:
    run = ended_well(LEFT_OPEN, warnings="error")
    assert (run.stdout, run.stderr) == ("cleaned up\n", "")


def test_code_that_ends_the_loop_is_told_from_closing() -> None:
    async def cancel_all() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await anyio.sleep_forever()

    async def ask(service: Service) -> None:
        await service.run(cancel_all)

    service = Service()
    with pytest.raises(ServiceError, match="ended from within"):
        asyncio.run(ask(service))
    with pytest.raises(ServiceError, match="ended from within"):
        service.call(where)
    assert not service.closed
    service.close()
    assert service.closed
    with pytest.raises(ServiceError, match="is closed"):
        service.call(where)


NEVER_BEGAN = """
import asyncio, threading, anyio
from turnleaf.core import Service, ServiceError

began = threading.Event()

async def end_the_loop():
    before = asyncio.all_tasks()
    began.set()
    while asyncio.all_tasks() == before:
        await asyncio.sleep(0)
    for task in asyncio.all_tasks():
        task.cancel()
    await anyio.sleep_forever()

def ask(function):
    try:
        service.call(function)
    except ServiceError:
        print("told", flush=True)

service = Service()
callers = [threading.Thread(target=ask, args=[one]) for one in (end_the_loop, anyio.sleep_forever)]
for caller in callers:
    caller.start()
    began.wait()
"""


def test_who_waits_for_work_that_never_began_is_told_that_the_loop_was_ended() -> None:
    assert ended_well(NEVER_BEGAN).stdout == "told\ntold\n"


def test_a_forked_process_ends_and_may_use_the_service_itself() -> None:
    program = """
import os, sys, anyio, threading
from turnleaf.core import Service

async def where():
    return threading.get_ident()

service = Service()
service.call(where)
child = os.fork()
if child == 0:
    service.call(where)
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
service.call(where)
"""
    ended_well(program, warnings="ignore")
