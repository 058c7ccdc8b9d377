import subprocess
import sys
import threading

import anyio
import pytest

from turnleaf.sessions._threads import DaemonThreads

pytestmark = pytest.mark.anyio


@pytest.fixture
def threads():
    threads = DaemonThreads(2, name="turnleaf-test")
    threads.start()
    threads.start()
    return threads


async def test_a_call_brings_what_the_function_does(threads):
    assert await threads.call(lambda: threading.current_thread().name) == "turnleaf-test"
    with pytest.raises(ZeroDivisionError):
        await threads.call(lambda: 1 // 0)
    # One that has raised goes on.
    assert [await threads.call(lambda: number) for number in range(4)] == [0, 1, 2, 3]  # noqa: B023


async def test_no_more_than_there_are_threads_run_at_once(threads):
    release, running = threading.Event(), []

    def block():
        running.append(1)
        release.wait(20)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(threads.call, block)
        with anyio.fail_after(20):
            while len(running) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        await anyio.wait_all_tasks_blocked()
        assert len(running) == 2
        tasks.cancel_scope.cancel()
    release.set()
    # What was cancelled before it began never does.
    await threads.call(int)
    await threads.call(int)
    assert len(running) == 2


def test_they_work_at_the_interpreters_exit_which_does_not_wait_for_them():
    program = (
        "import anyio, atexit, time\n"
        "from turnleaf.sessions._threads import DaemonThreads\n"
        "threads = DaemonThreads(2, name='turnleaf-test')\n"
        "threads.start()\n"
        "async def block():\n"
        "    with anyio.move_on_after(0.1):\n"
        "        await threads.call(lambda: time.sleep(600))\n"
        "anyio.run(block)\n"
        "atexit.register(lambda: print(anyio.run(threads.call, lambda: 'done')))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")


@pytest.mark.parametrize(
    ("is_busy", "said"),
    [(False, ""), (True, "turnleaf try: the agent still runs in this process, which now ends\n")],
)
def test_a_command_is_not_left_for_threads_that_only_wait(is_busy, said):
    program = (
        "import anyio, sys, threading\n"
        "from turnleaf.cli._leaving import leave\n"
        "from turnleaf.core import Service\n"
        "from turnleaf.sessions._threads import DaemonThreads\n"
        "earlier, threads = threading.enumerate(), DaemonThreads(2, name='turnleaf-test')\n"
        "threads.start()\n"
        "begun = threading.Event()\n"
        "def block():\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "async def work():\n"
        "    await threads.call(int)\n"
        "    async with anyio.create_task_group() as tasks:\n"
        f"        if {is_busy}:\n"
        "            tasks.start_soon(threads.call, block)\n"
        "            while not begun.is_set():\n"
        "                await anyio.sleep(0.005)\n"
        "        tasks.cancel_scope.cancel()\n"
        "anyio.run(work)\n"
        "leave(Service(), 3, earlier=earlier, command='try')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, said)
