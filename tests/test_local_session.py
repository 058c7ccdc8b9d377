import asyncio
import concurrent.futures
import gc
import re
import subprocess
import sys
import threading
import time
import traceback

import anyio
import pytest

from turnleaf.core import AgentError, ContractError
from turnleaf.sessions import LocalSession
from turnleaf.sessions import _local as local_module

pytestmark = pytest.mark.anyio

SECRET = "tl-secret-of-this-rollout"
SHADOWED = ("colorsys", "wave")
"""Modules of the standard library that nothing here needs."""


async def run(target, payload=None):
    async with LocalSession(target) as session:
        return await session.run({} if payload is None else payload)


@pytest.fixture
def write_agent(tmp_path, monkeypatch):
    """Writes files into a folder of their own and gives the path of the agent among them."""
    monkeypatch.setattr("sys.path", list(sys.path))

    def write(source, **neighbours):
        for name, text in neighbours.items():
            (tmp_path / f"{name}.py").write_text(text)
        path = tmp_path / "agent.py"
        path.write_text(source)
        return path

    return write


async def test_an_async_function_runs_in_the_callers_loop():
    async def agent(payload):
        return {"reward": payload["x"], "thread": threading.get_ident()}

    assert await run(agent, {"x": 2}) == {"reward": 2, "thread": threading.get_ident()}


async def test_a_plain_function_may_block_while_others_run():
    # More at once than the 40 threads that anyio's default limiter allows.
    meeting = threading.Barrier(50, timeout=30)

    def agent(payload):
        meeting.wait()
        return {"thread": threading.get_ident()}

    threads = []

    async def one():
        threads.append((await run(agent))["thread"])

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(one)
    assert len(set(threads)) == 50
    assert threading.get_ident() not in threads


async def test_a_plain_function_that_returns_an_awaitable_is_awaited():
    async def agent(payload):
        return {"reward": 1.0}

    assert await run(lambda payload: agent(payload)) == {"reward": 1.0}


async def test_a_result_comes_as_it_is():
    assert await run(lambda payload: [1, None]) == [1, None]
    assert await run(lambda payload: None) is None


async def test_the_callers_payload_is_out_of_the_agents_reach():
    payload = {"messages": [{"role": "user"}]}

    def agent(own):
        own["messages"].append("mine")
        own["extra"] = 1
        return {}

    await run(agent, payload)
    assert payload == {"messages": [{"role": "user"}]}


async def test_a_file_is_loaded_with_its_neighbours_and_only_once(write_agent):
    path = write_agent(
        "import dataclasses, pickle, neighbour_of_the_agent\n"
        "neighbour_of_the_agent.loaded.append(__name__)\n"
        "@dataclasses.dataclass\n"
        "class Seen:\n"
        "    count: int\n"
        "def run(payload):\n"
        "    seen = pickle.loads(pickle.dumps(Seen(len(neighbour_of_the_agent.loaded))))\n"
        "    return {'loaded': seen.count}\n",
        neighbour_of_the_agent="import time; loaded = []; time.sleep(0.05)",
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(LocalSession, [f"{path}:run"] * 8))
    assert len({session._function for session in sessions}) == 1
    assert await run(f"{path}:run") == {"loaded": 1}


async def test_neighbours_come_first_while_a_file_is_loaded_and_last_from_then_on(write_agent):
    path = write_agent(
        "import colorsys\n"
        "def run(payload):\n"
        "    import chunk_of_the_agent, wave\n"
        "    return [colorsys.__name__ == 'colorsys', colorsys.mine, hasattr(wave, 'mine'),\n"
        "            chunk_of_the_agent.mine]\n",
        colorsys="mine = 1",
        wave="mine = 1",
        chunk_of_the_agent="mine = 2",
    )
    before, loaded = list(sys.path), {name: sys.modules.pop(name, None) for name in SHADOWED}
    try:
        assert await run(f"{path}:run") == [True, 1, False, 2]
        assert sys.path == [*before, str(path.parent)]
        LocalSession(f"{path.rename(path.with_name('second.py'))}:run")
        assert sys.path == [*before, str(path.parent)]
    finally:
        for name, module in loaded.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.mark.parametrize(
    ("folders", "advice"),
    [
        (
            ["crew", "agents"],
            r"name it crew\.agents\.agent:run instead of its path, with {} on PYTH",
        ),
        ([], r"name it package\.module:run instead of its path, with the folder that holds"),
    ],
)
def test_a_file_of_a_package_is_to_be_named_by_its_module(write_agent, tmp_path, folders, advice):
    path = write_agent("from . import other\ndef run(payload): ...")
    folder = tmp_path
    for name in folders:
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").touch()
    path = path.rename(folder / "agent.py")
    with pytest.raises(ContractError, match=r"ImportError at .*agent\.py:1: ") as caught:
        LocalSession(f"{path}:run")
    assert re.search(advice.format(re.escape(str(tmp_path))), str(caught.value))


async def test_agents_of_the_same_file_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "agent.py").write_text(f"def run(payload): return {folder!r}")
    monkeypatch.chdir(tmp_path)
    assert await run("one/agent.py:run") == "one"
    assert await run("./two/agent.py:run") == "two"


async def test_a_module_is_found_by_its_dotted_name():
    assert await run("copy:deepcopy", {"reward": 1}) == {"reward": 1}


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_an_exception_becomes_an_agent_error_that_names_the_place(write_agent, kind):
    path = write_agent(f"import json\n{kind} run(payload):\n    return json.loads('not json')\n")
    with pytest.raises(AgentError) as caught:
        await run(f"{path}:run")
    assert f"JSONDecodeError at {path}:3: Expecting value" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_an_exception_without_text_is_named_by_its_type():
    def agent(payload):
        raise TimeoutError

    with pytest.raises(
        AgentError, match=r"the agent raised TimeoutError at .*local_session\.py:\d"
    ):
        await run(agent)


async def test_of_a_group_the_first_exception_is_reported():
    async def fail():
        raise LookupError("the reason")

    async def agent(payload):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    with pytest.raises(AgentError, match=r"LookupError at .*: the reason"):
        await run(agent)


class FatalError(BaseException):
    """No Exception."""


class MuteError(Exception):
    def __str__(self):
        raise LookupError


def deep_group():
    group = BaseExceptionGroup("g", [FatalError()])
    for _ in range(3000):
        group = BaseExceptionGroup("g", [group])
    return group


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        StopIteration(),
        AgentError("own"),
        FatalError("own"),
        GeneratorExit(),
        KeyboardInterrupt(),
        BaseExceptionGroup("g", [FatalError(), ValueError()]),
        BaseExceptionGroup("g", [asyncio.CancelledError(), ValueError()]),
        deep_group(),
        MuteError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_exception_of_the_agent_is_taken_for_ours(error):
    def agent(payload):
        raise error

    async def async_agent(payload):
        raise error

    # With a loop of its own: pytest's is not told of the user's interrupt, as asyncio's runner is.
    for target in (agent, async_agent):
        with pytest.raises(AgentError, match="the agent raised"):
            anyio.run(run, target, {"_config": {"api_key": SECRET}})


async def test_an_agent_that_cancels_itself_has_failed():
    async def agent(payload):
        raise asyncio.CancelledError

    async def other(payload):
        asyncio.current_task().cancel()
        await anyio.sleep_forever()

    for target in (agent, other):
        with pytest.raises(AgentError, match="cancelled itself"):
            await run(target)


async def test_an_agent_that_cancels_itself_and_returns_has_a_result():
    async def agent(payload):
        asyncio.current_task().cancel()
        return {"reward": 1}

    assert await run(agent) == {"reward": 1}


async def test_an_agent_that_ignores_its_cancellation_is_abandoned(monkeypatch, caplog):
    monkeypatch.setattr(local_module, "STOP_LIMIT", 0.3)
    release, ended, swallowed = asyncio.Event(), asyncio.Event(), 0

    async def agent(payload):
        nonlocal swallowed
        while not release.is_set():
            try:
                await release.wait()
            except BaseException:  # noqa: BLE001  # as agents do that no tool shall end
                swallowed += 1
        ended.set()
        raise ValueError("nobody listens")

    busy = time.process_time()
    with anyio.move_on_after(0.05) as scope:
        await run(agent)
    assert scope.cancelled_caught
    assert time.process_time() - busy < 0.2
    assert swallowed == 1
    assert "ignores its cancellation; abandoned, it runs on" in caplog.text
    caplog.clear()
    release.set()
    await ended.wait()
    await anyio.wait_all_tasks_blocked()
    gc.collect()
    assert caplog.text == ""


async def test_the_secret_stays_out_of_the_error_and_of_its_causes():
    def agent(payload):
        try:
            raise LookupError(f"Bearer {SECRET}")
        except LookupError as error:
            raise ValueError(f"refused: {SECRET} " + "x" * 5000) from error

    with pytest.raises(AgentError) as caught:
        await run(agent, {"_config": {"api_key": SECRET}})
    assert "refused: [api_key] xxx" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def test_cancelling_ends_an_async_agent():
    started, ended = anyio.Event(), anyio.Event()

    async def agent(payload):
        try:
            started.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, agent)
        await started.wait()
        tasks.cancel_scope.cancel()
    assert ended.is_set()


async def test_cancelling_abandons_a_blocked_thread():
    started, release, ended = (threading.Event() for _ in range(3))

    def agent(payload):
        started.set()
        release.wait(30)
        ended.set()
        raise ValueError("nobody listens")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, agent)
            await anyio.to_thread.run_sync(started.wait, 30)
            tasks.cancel_scope.cancel()
        assert not ended.is_set()
    finally:
        release.set()
    assert await anyio.to_thread.run_sync(ended.wait, 30)


LEFT_BEHIND = """
import asyncio, threading
import anyio
from turnleaf.sessions import LocalSession

release, threads = threading.Event(), []

async def cut_off():
    loop, started = asyncio.get_running_loop(), anyio.Event()

    def run(payload):
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(started.set)
        release.wait()

    async with LocalSession(run) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(session.run, {})
        await started.wait()
        tasks.cancel_scope.cancel()

anyio.run(cut_off)
release.set()
threads[0].join()
release.clear()
anyio.run(cut_off)
print("the end")
"""


def test_a_thread_left_behind_holds_up_no_exit_and_ends_in_silence():
    program = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_BEHIND],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (program.stdout, program.stderr) == ("the end\n", "")


async def test_a_plain_function_may_run_a_loop_of_its_own():
    async def answer():
        return {"reward": 1.0}

    assert await run(lambda payload: anyio.run(answer)) == {"reward": 1.0}


class Agent:
    def __call__(self, payload):
        return {"reward": 0.5}


async def test_a_callable_object_is_an_agent():
    assert await run(Agent()) == {"reward": 0.5}
    assert await run(max, {"reward": 1.0}) == "reward"  # it shows no signature


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("", "path/to/agent.py:run or package.module:run"),
        ("agent.py", "which function runs it"),
        ("agent.py:", "which function runs it"),
        (":run", "which function runs it"),
        ("no/such/agent.py:run", r"there is no file /.*/no/such/agent\.py; correct the path"),
        ("no_such_package.agent:run", "there is no module 'no_such_package'"),
        ("turnleaf.sesions:run", "no module 'turnleaf.sesions'; did you mean 'turnleaf.sessions'?"),
        ("turnleaf..sessions:run", "not the dotted name of a module"),
        ("copy:deepcpy", "copy has no 'deepcpy'; did you mean 'deepcopy'?"),
        ("string:digits", r"not callable \(it is a str\)"),
        (7, r"not callable \(it is an int\)"),
        (Agent, "is a class; name a function, or an instance of the class"),
        (f"{__name__}:Agent", "is a class; name a function, or an instance of the class"),
        (lambda *, payload: {}, "is called with one argument, the payload"),
        (lambda payload, context: {}, "missing a required argument: 'context'"),
        (f"{sys.executable}:run", "its name must end in .py"),
    ],
)
async def test_a_target_that_cannot_be_used_says_what_to_do(target, said):
    with pytest.raises(ContractError, match=said):
        LocalSession(target)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def run(payload)\n    return", r"SyntaxError: expected ':' \(agent\.py, line 1\)"),
        ("import os\nimport no_such_package", r"ModuleNotFoundError at .*agent\.py:2: No module"),
        ("1 / 0", r"ZeroDivisionError at .*agent\.py:1: division by zero"),
        ("import sys; sys.exit(2)", r"SystemExit at .*agent\.py:1: 2"),
        ("def rnu(payload): ...", r": agent\.py has no 'run'; did you mean 'rnu'\? It has rnu\."),
        ("x = 1", r": agent\.py has no 'run'\. It has nothing of that kind\."),
    ],
)
async def test_a_file_that_does_not_load_says_where(write_agent, source, said):
    path = write_agent(source)
    with pytest.raises(ContractError, match=said):
        LocalSession(f"{path}:run")


async def test_a_file_that_was_mended_loads(write_agent):
    path = write_agent("1 / 0")
    with pytest.raises(ContractError):
        LocalSession(f"{path}:run")
    path.write_text("def run(payload): return {'reward': 1.0}  # mended")
    assert await run(f"{path}:run") == {"reward": 1.0}
