"""What becomes of sessions when their process does not end as it should."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import boto3
import pytest

from tests.agent_process import agent_process
from tests.waiting import until
from turnleaf.adapters.mock import AgentCoreFault, AgentCoreSettings, serve_agentcore
from turnleaf.sessions import _keeping as keeping_module
from turnleaf.sessions._keeping import Keeper

pytestmark = pytest.mark.anyio

HOOK = Path(__file__).with_name("agentcore_hook.py")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.fixture(scope="module", autouse=True)
def _credentials():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def agent():
    with agent_process(Path(__file__).with_name("agent_app.py")) as url:
        yield url


@pytest.fixture
async def emulator(agent):
    async with serve_agentcore(AgentCoreSettings(agent_url=agent)) as emulator:
        yield emulator


@contextlib.contextmanager
def hook(emulator, tmp_path, *, count=3, way="run"):
    """A process whose sessions are about to run; it goes on with a line on its stdin."""
    arguments = [emulator.endpoint_url, emulator.arn, str(count), way, str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, str(HOOK), *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for number in range(count):
                (tmp_path / f"{number}.go").touch()


async def in_mid_run(emulator, count=3):
    await until(lambda: sum(one.executed for one in emulator.log.invocations) == count)


async def all_stopped(emulator, count=3):
    await until(lambda: emulator.log.not_stopped() == [], seconds=60)
    assert [one.how for one in emulator.log.sessions] == ["stopped"] * count
    assert emulator.log.executed_twice() == {}


@pytest.mark.parametrize("first", [[], [signal.SIGINT, signal.SIGTERM], "all"])
async def test_sessions_of_a_process_that_is_killed_are_stopped(emulator, tmp_path, first):
    with hook(emulator, tmp_path) as process:
        await in_mid_run(emulator)
        if first == "all":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            # Its keeper is no member of the group, which gets what a terminal sends.
            for number in first:
                os.killpg(process.pid, number)
            process.kill()
        await all_stopped(emulator)
        said = await anyio.to_thread.run_sync(process.stderr.read)
    if not first:
        assert f"process {process.pid} ended with sessions open: 3 stopped, 0 not" in said.decode()


async def test_a_process_that_was_forked_keeps_no_session_running(emulator, tmp_path):
    with hook(emulator, tmp_path, way="forked") as process:
        await in_mid_run(emulator)
        process.stdin.write(b"\n")
        process.stdin.flush()
        await until((tmp_path / "forked").exists)
        process.kill()
        await all_stopped(emulator)


async def test_what_was_opened_last_is_stopped_while_it_is_made(agent, tmp_path):
    settings = AgentCoreSettings(agent_url=agent, provision_time=3.0)
    async with serve_agentcore(settings) as emulator:
        with hook(emulator, tmp_path) as process:
            await until(lambda: len(emulator.log.sessions) == 3)
            process.kill()
            await all_stopped(emulator)
        assert "RetryableConflictException" in {stop.outcome for stop in emulator.log.stops}


async def test_what_was_still_on_its_way_is_stopped_when_it_has_arrived(emulator, tmp_path):
    emulator.inject(AgentCoreFault(operation="invoke", delay=2.5, times=3))
    with hook(emulator, tmp_path) as process:
        await until(lambda: len(emulator.log.invocations) == 3)
        process.kill()
        await until(lambda: len(emulator.log.sessions) == 3)
        await all_stopped(emulator)
    assert "ResourceNotFoundException" in {stop.outcome for stop in emulator.log.stops}


async def test_a_process_that_leaves_in_mid_run_is_gone_within_two_seconds(emulator, tmp_path):
    with hook(emulator, tmp_path, way="leave") as process:
        await in_mid_run(emulator)
        process.stdin.write(b"\n")
        process.stdin.flush()
        began = time.monotonic()
        assert await anyio.to_thread.run_sync(process.wait) == 0
        assert time.monotonic() - began < 2
        await all_stopped(emulator)
        assert await anyio.to_thread.run_sync(process.stderr.read) == b""


@pytest.fixture
async def keeper(anyio_backend):
    """One of which nothing goes on behind the test, neither its child nor what it has to report."""
    keeper = Keeper()
    yield keeper
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping_module, "SETTLED", math.inf)
        end(keeper)
        await until(lambda: keeper.pid is None)
        with keeper._lock:  # held until the end is reported
            pass


async def open_session(emulator, keeper, number):
    """A session that runs, of which the keeper knows."""
    session_id = f"session-of-the-keeper-test-{number:0>10}"
    where = {"region_name": "us-west-2", "endpoint_url": emulator.endpoint_url}
    target = {"agentRuntimeArn": emulator.arn}

    def invoke():
        keeper.opened(session_id, client=where, target=target)
        client = boto3.client("bedrock-agentcore", **where)
        reply = client.invoke_agent_runtime(
            **target, runtimeSessionId=session_id, payload=b'{"do": "return", "n": %d}' % number
        )
        reply["response"].read()
        reply["response"].close()

    await anyio.to_thread.run_sync(invoke)
    return session_id


def end(keeper):
    """What the end of its process is to a keeper."""
    with keeper._lock:
        if keeper._process is not None:
            keeper._process.stdin.close()


async def test_a_keeper_stops_what_is_open_and_nothing_else(emulator, keeper):
    assert keeper.pid is None
    first, second = [await open_session(emulator, keeper, number) for number in range(2)]
    keeper.closed(first)
    keeper.closed(first)
    keeper.closed("unknown")
    emulator.inject(AgentCoreFault(operation="stop", error="ThrottlingException", times=2))
    end(keeper)
    await until(lambda: emulator.active_sessions == [first], seconds=60)
    assert {stop.session_id for stop in emulator.log.stops} == {second}


async def test_a_session_that_is_gone_is_a_success_to_a_keeper(emulator, keeper, capfd):
    session_id = await open_session(emulator, keeper, 0)
    await emulator.kill(session_id)
    pid = keeper.pid
    end(keeper)
    await until(lambda: not Path(f"/proc/{pid}").exists(), seconds=60)
    assert (
        f"process {os.getpid()} ended with sessions open: 1 stopped, 0 not" in capfd.readouterr()[1]
    )


@pytest.mark.parametrize("settled", [0.0, 60.0])
async def test_a_keeper_that_dies_is_replaced_and_told_again(
    emulator, keeper, monkeypatch, caplog, settled
):
    """At once when it had lived for a while, else with the next session."""
    monkeypatch.setattr(keeping_module, "SETTLED", settled)
    await open_session(emulator, keeper, 0)
    dead = keeper.pid
    os.kill(dead, signal.SIGKILL)
    # It is no zombie.
    await until(lambda: not Path(f"/proc/{dead}").exists())
    if settled:
        await until(lambda: keeper.pid is None)
        await open_session(emulator, keeper, 1)
    await until(lambda: keeper.pid not in (dead, None))
    assert [record.message for record in caplog.records if "turnleaf" in record.name] == [
        "the program that stops the sessions of this process if it is killed ended (exit code -9); "
        "it is started again with the next session"
    ]
    end(keeper)
    await until(lambda: emulator.log.not_stopped() == [], seconds=60)


def test_a_keeper_that_cannot_be_started_is_reported_once(keeper, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    for session_id in ("a", "b"):
        keeper.opened(session_id, client={}, target={})
        keeper.closed(session_id)
    assert keeper.pid is None
    (record,) = caplog.records
    assert "cannot be started: FileNotFoundError" in record.message


async def test_a_keeper_that_reads_nothing_is_replaced(emulator, keeper, monkeypatch):
    monkeypatch.setattr(keeping_module, "WRITE_LIMIT", 0.05)
    await open_session(emulator, keeper, 0)
    stuck = keeper.pid
    os.kill(stuck, signal.SIGSTOP)

    def fill():
        while keeper.pid == stuck:
            keeper.opened("x", client={"padding": "x" * 3000}, target={})
            keeper.closed("x")

    await anyio.to_thread.run_sync(fill)
    await open_session(emulator, keeper, 1)
    end(keeper)
    await until(lambda: emulator.log.not_stopped() == [], seconds=60)


def test_a_keeper_that_is_not_needed_imports_little():
    command = [sys.executable, "-P", "-X", "importtime", keeping_module._keeper.__file__]
    said = b'{"open": "a", "client": {}, "target": {}}\n{"closed": "a"}\n'
    ended = subprocess.run(command, input=said, capture_output=True, check=True)
    imported = {line.split(b"|")[-1].strip() for line in ended.stderr.splitlines()}
    assert b"json" in imported
    assert not imported & {b"boto3", b"numpy", b"turnleaf"}


def test_a_keepers_arguments_are_no_secret(keeper):
    keeper.opened("a", client={}, target={})
    assert keeper._process.args[1:] == ["-P", keeping_module._keeper.__file__]
    keeper.closed("a")
