"""AgentCoreHttpSession with the real boto3, against the emulator in front of real agents."""

import contextlib
import itertools
import logging
import os
import sys
import threading
from pathlib import Path
from random import Random

import anyio
import pytest

from tests.agent_process import agent_process, free_port
from tests.test_http_session import CONFIG, SECRET, assert_silent
from tests.test_rollout import MemoryGateway, play
from tests.waiting import until
from turnleaf.adapters.mock import AgentCoreFault, AgentCoreSettings, serve_agentcore
from turnleaf.core import (
    AgentError,
    Background,
    BadResultError,
    ContractError,
    PayloadError,
    SessionBusy,
    SessionError,
)
from turnleaf.sessions import AgentCoreHttpSession, _retrying
from turnleaf.sessions import _agentcore_runtime as runtime_module
from turnleaf.sessions import _invocation as invocation_module

pytestmark = pytest.mark.anyio

AGENT = Path(__file__).with_name("agent_app.py")
RETRY_TIME = 0.4


@pytest.fixture(scope="module", autouse=True)
def _credentials():
    """Also for the process's keeper, which gets its environment when it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        yield


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(_retrying, "FIRST", 0.05)
    monkeypatch.setattr(invocation_module, "LATE", 2.05)


@pytest.fixture(scope="module")
def plain():
    """The address of an agent that knows no envelope."""
    with agent_process(AGENT) as url:
        yield url


@pytest.fixture(scope="module")
def background(tmp_path_factory):
    """The address of an agent that speaks the envelope."""
    with agent_process(AGENT, str(tmp_path_factory.mktemp("state"))) as url:
        yield url


@contextlib.asynccontextmanager
async def emulated(agent, **settings):
    """An emulator whose log shows, in the end, every session stopped and no payload run twice."""
    where = {"agent_url": agent} if isinstance(agent, str) else {"command": agent}
    async with serve_agentcore(AgentCoreSettings(**where, **settings)) as emulator:
        yield emulator
        assert emulator.log.not_stopped() == []
        assert emulator.log.executed_twice() == {}
        assert emulator.active_sessions == []


def session_at(emulator, **arguments):
    return AgentCoreHttpSession(
        emulator.arn,
        **{"endpoint_url": emulator.endpoint_url, "retry_time": RETRY_TIME, **arguments},
    )


numbers = itertools.count()


def payload_of(**fields):
    """A payload that no other test has."""
    return {"number": next(numbers), "do": "return", "_config": CONFIG, **fields}


async def run(emulator, payload=None, **arguments):
    async with session_at(emulator, **arguments) as session:
        return await session.run(payload_of() if payload is None else payload)


def starts(emulator):
    return [one for one in emulator.log.invocations if one.operation != "get"]


def polls(emulator):
    return [one for one in emulator.log.invocations if one.operation == "get"]


# Results


async def test_a_plain_agent_gets_the_payload_and_its_reply_is_the_result(plain):
    async with emulated(plain) as emulator:
        payload = payload_of(text="ü\u2028")
        async with session_at(emulator) as session:
            result = await session.run(payload)
        assert result["session_id"] == session.session_id
        envelope = result["payload"].pop("_agentcore_runtime")
        assert result["payload"] == payload
        assert (envelope["operation"], envelope["background"]) == ("start", True)
        assert len(starts(emulator)) == 1
        assert [stop.outcome for stop in emulator.log.stops] == ["stopped"]


async def test_an_envelope_that_is_not_wanted_is_not_sent(background):
    async with emulated(background) as emulator:
        payload = payload_of(_agentcore_runtime_="mine")
        result = await run(emulator, payload, envelope="never")
        assert result["payload"] == payload
        assert polls(emulator) == []


async def test_an_agent_in_the_background_is_asked_for_its_result(background):
    async with emulated(background) as emulator:
        payload = payload_of()
        result = await run(emulator, payload)
        assert result["payload"] == payload
        assert len(starts(emulator)) == 1


async def test_polls_are_held_while_the_agent_works(background, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    async with emulated(background) as emulator, anyio.create_task_group() as tasks:

        async def release():
            await until(started.exists)
            await anyio.sleep(1)
            go.touch()

        tasks.start_soon(release)
        began = anyio.current_time()
        assert await run(emulator, waiting(started, go)) == {"reward": 1.0}
        assert anyio.current_time() - began < 3
        assert len(polls(emulator)) <= 3


def waiting(started, go):
    return payload_of(do="wait", started=str(started), go=str(go))


async def test_a_streams_last_event_is_the_result(plain):
    async with emulated(plain) as emulator:
        result = await run(emulator, payload_of(do="stream"))
        assert result == {"reward": 1.0, "text": "two\nlines"}


@pytest.mark.parametrize("envelope", ["auto", "never"])
async def test_any_reply_that_is_not_json_is_a_bad_result(plain, envelope):
    async with emulated(plain) as emulator:
        with pytest.raises(BadResultError, match="not JSON: done, I think"):
            await run(emulator, payload_of(do="text"), envelope=envelope)


@pytest.mark.parametrize("do", ["return", "stream"])
async def test_a_result_has_a_limit(plain, do):
    async with emulated(plain) as emulator:
        with pytest.raises(BadResultError, match=r"exceeds 20 bytes.*max_response_bytes"):
            await run(emulator, payload_of(do=do), max_response_bytes=20)


async def test_a_payload_that_cannot_be_sent_starts_nothing(plain, monkeypatch):
    async with emulated(plain) as emulator:
        with pytest.raises(PayloadError, match="already has `_agentcore_runtime`"):
            await run(emulator, payload_of(_agentcore_runtime={}))
        monkeypatch.setattr(invocation_module, "MOST_BYTES", 100)
        with pytest.raises(PayloadError, match="AgentCore takes 100 at most"):
            await run(emulator, payload_of(text="x" * 100))
        assert (emulator.log.invocations, emulator.log.stops) == ([], [])


# What goes wrong


async def test_an_agents_error_is_its_own(plain):
    async with emulated(plain) as emulator:
        with pytest.raises(AgentError, match=r"RuntimeClientError \(424\).*\(500\).*CloudWatch"):
            await run(emulator, payload_of(do="raise"))
        with pytest.raises(AgentError, match=r"the agent raised .*\[api_key\]") as raised:
            await run(emulator, payload_of(do="stream and raise"))
        assert_silent(raised.value)
        assert len(starts(emulator)) == 2


async def test_an_agents_error_in_the_background_is_told_whole(background):
    async with emulated(background) as emulator:
        with pytest.raises(AgentError, match=r"ValueError.*no luck with \[api_key\]") as raised:
            await run(emulator, payload_of(do="raise"))
        assert_silent(raised.value)
        with pytest.raises(AgentError, match=r"ValueError: no luck .*in deep_inside raise ValueE"):
            await run(emulator, payload_of(do="raise deep inside"))


@pytest.mark.parametrize(
    ("code", "kind", "said", "is_repeated"),
    [
        ("ThrottlingException", SessionBusy, r"\(429\).*lower tps_limit", True),
        ("ServiceQuotaExceededException", SessionBusy, r"\(402\).*lower .* max_sessions", True),
        ("RetryableConflictException", SessionError, r"\(409\).*raise .* retry_time", True),
        ("InternalServerException", SessionError, r"\(500\).*so it is not run again", False),
        ("ValidationException", SessionError, r"\(400\).*correct", False),
        ("AccessDeniedException", SessionError, r"\(403\).*InvokeAgentRuntime", False),
        ("ResourceNotFoundException", SessionError, r"\(404\).*is the runtime deployed", False),
        ("RuntimeClientError", AgentError, r"\(424\).*CloudWatch", False),
    ],
)
async def test_each_error_of_a_start_says_what_to_do(plain, caplog, code, kind, said, is_repeated):
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="invoke", error=code, times=None))
        with pytest.raises(kind, match=said) as raised:
            await run(emulator)
        assert type(raised.value) is kind
        assert_silent(raised.value)
        assert (len(starts(emulator)) > 1) is is_repeated
        assert "could not be stopped" not in caplog.text
        assert not any(one.executed for one in emulator.log.invocations)


@pytest.mark.parametrize(
    "code", ["ThrottlingException", "ServiceQuotaExceededException", "RetryableConflictException"]
)
async def test_a_start_that_did_not_run_is_repeated(plain, code):
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="invoke", error=code, times=2))
        assert (await run(emulator, retry_time=30))["session_id"]
        assert len(starts(emulator)) == 3


async def test_a_storm_of_throttling_is_waited_out(background):
    async with emulated(background) as emulator, anyio.create_task_group() as tasks:
        emulator.inject(
            AgentCoreFault(operation="invoke", error="ThrottlingException", times=None, seconds=0.7)
        )
        results = []

        async def one():
            results.append(await run(emulator, retry_time=30, sessions_per_minute=60_000))

        for _ in range(40):
            tasks.start_soon(one)
    assert len({result["session_id"] for result in results}) == 40


async def test_nothing_answers_at_the_endpoint(anyio_backend):
    session = AgentCoreHttpSession(
        AgentCoreSettings(agent_url="").arn,
        endpoint_url=f"http://127.0.0.1:{free_port()}",
        retry_time=RETRY_TIME,
    )
    began = anyio.current_time()
    with pytest.raises(SessionError, match=r"refused.*is AgentCore reachable from here"):
        async with session:
            await session.run(payload_of())
    # There is no session, and so none to be stopped.
    assert RETRY_TIME <= anyio.current_time() - began < 5


async def test_a_runtime_that_is_not_there_is_said_so(plain):
    async with emulated(plain) as emulator:
        with pytest.raises(SessionError, match=r"No endpoint other.*correct .* the qualifier"):
            await run(emulator, qualifier="other")


LOSSES = {
    "the connection breaks": {"lose_answer": True},
    "the answer is late": {"answer_delay": 3.0},
    "an error after the agent ran": {"answer_error": "InternalServerException"},
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_lost_reply_of_a_plain_agent_is_no_reason_to_run_it_again(plain, loss):
    async with emulated(plain) as emulator:
        await run(emulator, timeout=1)
        emulator.inject(AgentCoreFault(operation="invoke", **LOSSES[loss]))
        with pytest.raises(SessionError, match="nobody knows whether the agent ran"):
            await run(emulator, timeout=1)
        assert len(starts(emulator)) == 2


@pytest.mark.parametrize("loss", LOSSES)
async def test_an_agent_that_keeps_its_results_is_asked_for_a_lost_one(background, loss):
    async with emulated(background) as emulator:
        await run(emulator, timeout=1)
        emulator.inject(AgentCoreFault(operation="invoke", polls=False, **LOSSES[loss]))
        payload = payload_of()
        assert (await run(emulator, payload, timeout=1))["payload"] == payload
        assert len(starts(emulator)) == 2


async def test_before_an_agent_has_shown_that_it_keeps_results_it_is_not_asked(background):
    async with emulated(background) as emulator:
        emulator.inject(AgentCoreFault(operation="invoke", lose_answer=True))
        with pytest.raises(SessionError, match="nobody knows whether the agent ran"):
            await run(emulator)
        assert polls(emulator) == []


async def test_a_start_that_never_arrived_is_not_repeated(background):
    async with emulated(background) as emulator:
        await run(emulator)
        emulator.inject(
            AgentCoreFault(operation="invoke", polls=False, error="InternalServerException")
        )
        with pytest.raises(SessionError, match=r"not_found: .* is not run again"):
            await run(emulator)
        assert len(starts(emulator)) == 2


@pytest.mark.parametrize(
    "fault",
    [
        {"error": "InternalServerException"},
        {"error": "ThrottlingException"},
        {"error": "RuntimeClientError"},
        {"lose_answer": True},
    ],
)
async def test_failed_polls_are_tolerated_for_a_while(background, tmp_path, fault):
    go = tmp_path / "go"
    async with emulated(background) as emulator, anyio.create_task_group() as tasks:
        emulator.inject(AgentCoreFault(operation="invoke", polls=True, times=2, **fault))

        async def release():
            await until(lambda: polls(emulator) != [])
            go.touch()

        tasks.start_soon(release)
        result = await run(emulator, waiting(tmp_path / "started", go), retry_time=20)
        assert result == {"reward": 1.0}
        assert len(polls(emulator)) == 3


async def test_a_poll_that_is_long_in_failing_is_tolerated_too(background, tmp_path):
    go = tmp_path / "go"
    async with emulated(background) as emulator, anyio.create_task_group() as tasks:
        emulator.inject(
            AgentCoreFault(
                operation="invoke",
                polls=True,
                delay=2 * RETRY_TIME,
                error="InternalServerException",
            )
        )

        async def release():
            await until(lambda: polls(emulator) != [])
            go.touch()

        tasks.start_soon(release)
        assert await run(emulator, waiting(tmp_path / "started", go)) == {"reward": 1.0}
        assert polls(emulator)[0].outcome == "InternalServerException"


async def test_polls_that_fail_for_good_end_the_rollout(background, tmp_path):
    async with emulated(background) as emulator:
        emulator.inject(
            AgentCoreFault(
                operation="invoke", polls=True, times=None, error="InternalServerException"
            )
        )
        with pytest.raises(SessionError, match=r"InternalServerException \(500\)"):
            await run(emulator, waiting(tmp_path / "started", tmp_path / "go"))
        assert len(polls(emulator)) > 1
        (tmp_path / "go").touch()


async def test_another_agent_that_answers_a_poll_is_not_taken_for_the_one_that_was_started(plain):
    async with emulated(plain) as emulator:
        with pytest.raises(SessionError, match="another agent answers than the one that was start"):
            await run(emulator, payload_of(do="pretend"))
        assert len(polls(emulator)) == 1


# Replaced machines and restarts


@pytest.mark.parametrize("status", ["interrupted", "not_found"])
async def test_an_agent_whose_machine_is_replaced_is_not_run_again(tmp_path, status):
    started = tmp_path / "started"
    # A state folder that survives is a process that was started anew on the same machine.
    state = "state" if status == "interrupted" else "$$"
    command = ["/bin/sh", "-c", f'exec {sys.executable} {AGENT} {tmp_path}/{state} "$0"']
    async with emulated(command) as emulator, anyio.create_task_group() as tasks:

        async def kill():
            await until(lambda: [one.outcome for one in starts(emulator)] == ["answered"])
            await until(started.exists)
            await emulator.kill(emulator.active_sessions[0])

        tasks.start_soon(kill)
        with pytest.raises(SessionError, match=f"{status}: .* is not run again"):
            await run(emulator, waiting(started, tmp_path / "go"), retry_time=30)
        assert len(starts(emulator)) == 1


async def test_a_plain_agent_that_is_killed_is_not_run_again(tmp_path):
    async with emulated([sys.executable, str(AGENT)]) as emulator:
        emulator.inject(AgentCoreFault(operation="invoke", kill_after=0.2))
        with pytest.raises(AgentError, match=r"RuntimeClientError \(424\)"):
            await run(emulator, waiting(tmp_path / "started", tmp_path / "go"))
        assert len(starts(emulator)) == 1


async def test_a_restart_of_the_endpoint_is_outlasted_in_the_background(background, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    async with emulated(background) as emulator, anyio.create_task_group() as tasks:

        async def restart():
            await until(lambda: [one.outcome for one in starts(emulator)] == ["answered"])
            await emulator.restart(keep_sessions=True, down=0.5)
            go.touch()

        tasks.start_soon(restart)
        assert await run(emulator, waiting(started, go), retry_time=30) == {"reward": 1.0}


async def test_a_restart_of_the_endpoint_loses_a_plain_agent(plain, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    async with emulated(plain) as emulator, anyio.create_task_group() as tasks:

        async def restart():
            await until(started.exists)
            await emulator.restart(keep_sessions=True, down=0.5)

        tasks.start_soon(restart)
        with pytest.raises(SessionError, match="nobody knows whether the agent ran"):
            await run(emulator, waiting(started, go))
        go.touch()


# Leaving


async def test_leaving_in_mid_run_stops_the_session_and_cuts_the_call(plain, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    async with emulated(plain) as emulator:
        async with session_at(emulator, max_sessions=1) as session:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.run, waiting(started, go))
                await until(started.exists)
                tasks.cancel_scope.cancel()
            began = anyio.current_time()
        assert anyio.current_time() - began < 2
        assert starts(emulator)[0].outcome == "cut"
        assert session._runtime.room.taken == 0
        go.touch()


async def stopped_before_it_was_made(plain):
    """Leave a session while its start is on its way; its first stop finds none."""
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="invoke", after_stop=True))
        async with session_at(emulator) as session, anyio.create_task_group() as tasks:
            tasks.start_soon(session.run, payload_of())
            await until(lambda: len(starts(emulator)) == 1)
            tasks.cancel_scope.cancel()
        assert emulator.log.stops[0].outcome == "ResourceNotFoundException"
        assert len(emulator.log.sessions) == 1


async def test_a_session_that_is_made_only_after_it_was_stopped_is_stopped_again(plain):
    await stopped_before_it_was_made(plain)


async def test_a_session_that_is_made_before_its_stop_is_answered_is_stopped_again(
    plain, monkeypatch
):
    invoke, stop, threads = runtime_module.calls.invoke, runtime_module.calls.stop, []

    def noted(*arguments, **said):
        threads.append(threading.current_thread())
        return invoke(*arguments, **said)

    def answered_late(*arguments):
        stop(*arguments)
        threads[0].join(20)

    monkeypatch.setattr(runtime_module.calls, "invoke", noted)
    monkeypatch.setattr(runtime_module.calls, "stop", answered_late)
    await stopped_before_it_was_made(plain)


async def test_a_session_that_a_lost_start_makes_late_is_stopped(plain, monkeypatch):
    monkeypatch.setattr(invocation_module, "LATE", 2.0)
    async with emulated(plain) as emulator, anyio.create_task_group() as tasks:
        emulator.inject(AgentCoreFault(operation="invoke", after_stop=True))

        async def lose():
            await until(lambda: emulator.log.invocations != [])
            await emulator.restart(keep_sessions=True)

        tasks.start_soon(lose)
        with pytest.raises(SessionError, match="nobody knows whether the agent ran"):
            await run(emulator)
        outcomes = [stop.outcome for stop in emulator.log.stops]
        assert (outcomes[0], outcomes[-1]) == ("ResourceNotFoundException", "stopped")


async def test_a_session_that_is_left_while_it_is_made_is_stopped(plain):
    async with emulated(plain, provision_time=2.0) as emulator:
        async with session_at(emulator) as session, anyio.create_task_group() as tasks:
            tasks.start_soon(session.run, payload_of())
            await until(lambda: len(emulator.log.sessions) == 1)
            tasks.cancel_scope.cancel()
        assert emulator.log.stops[0].outcome == "RetryableConflictException"


async def test_a_place_is_taken_until_the_call_has_ended(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(invocation_module, "STOP_LIMIT", 0.2)
    started, go = tmp_path / "started", tmp_path / "go"
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="stop", delay=0.6, times=2))
        async with (
            session_at(emulator, max_sessions=1) as session,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(session.run, waiting(started, go))
            await until(started.exists)
            tasks.cancel_scope.cancel()
        room = session._runtime.room
        assert room.taken == 1
        await until(lambda: room.taken == 0)
        go.touch()


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        ({"error": "ThrottlingException"}, "stopped"),
        ({"error": "InternalServerException"}, "stopped"),
        ({"error": "RetryableConflictException"}, "stopped"),
        ({"lose_answer": True}, "ResourceNotFoundException"),
        ({"answer_error": "InternalServerException"}, "ResourceNotFoundException"),
    ],
)
async def test_a_stop_that_fails_is_repeated(plain, fault, last):
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="stop", **fault))
        await run(emulator)
        assert len(emulator.log.stops) == 2
        assert emulator.log.stops[-1].outcome == last


async def test_stops_that_are_slow_do_not_hold_up_others(plain):
    async with emulated(plain) as emulator, anyio.create_task_group() as tasks:

        async def one(session):
            async with session:
                await session.run(payload_of())

        for _ in range(32):
            slow = session_at(emulator, sessions_per_minute=6e4)
            emulator.inject(AgentCoreFault(operation="stop", session=slow.session_id, delay=4))
            tasks.start_soon(one, slow)
        async with session_at(emulator, sessions_per_minute=6e4) as session:
            await session.run(payload_of())
            await until(lambda: [one.outcome for one in starts(emulator)] == ["answered"] * 33)
        assert emulator.log.stops[0].session_id == session.session_id


async def test_a_stop_that_is_not_answered_is_repeated(plain, monkeypatch):
    monkeypatch.setattr(runtime_module, "STOP_READ_TIMEOUT", 0.3)
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="stop", delay=1.0))
        began = anyio.current_time()
        await run(emulator)
        assert anyio.current_time() - began < 1
        assert [stop.outcome for stop in emulator.log.stops] == ["stopped"]
        await until(lambda: len(emulator.log.stops) == 2)


async def test_a_session_that_is_gone_is_stopped(plain):
    async with emulated(plain) as emulator:
        async with session_at(emulator) as session:
            await session.run(payload_of())
            await emulator.kill(session.session_id)
        assert [stop.outcome for stop in emulator.log.stops] == ["ResourceNotFoundException"]


async def test_a_session_that_is_not_stopped_in_time_is_reported_with_the_cause(
    plain, caplog, monkeypatch
):
    monkeypatch.setattr(invocation_module, "STOP_LIMIT", 1.0)
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="stop", error="ThrottlingException", times=None))
        async with session_at(emulator) as session:
            await session.run(payload_of())
        assert f"session {session.session_id} could not be stopped" in caplog.text
        assert "ThrottlingException" in caplog.text
        emulator.clear_faults()
        await session._runtime.stop(session.session_id)


async def test_a_stop_that_is_forbidden_is_reported(plain, caplog):
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="stop", error="AccessDeniedException"))
        async with session_at(emulator) as session:
            await session.run(payload_of())
        assert f"session {session.session_id} could not be stopped" in caplog.text
        assert "bedrock-agentcore:StopRuntimeSession" in caplog.text
        # The process's keeper would do this at the end.
        await session._runtime.stop(session.session_id)
        await session._runtime.forget(session.session_id)


async def test_a_session_that_is_not_run_or_not_entered_is_nowhere(plain):
    async with emulated(plain) as emulator:
        async with session_at(emulator) as session:
            assert session._runtime.room.taken == 1
        assert session._runtime.room.taken == 0
        async with session.room():
            assert session._runtime.room.taken == 1
        assert session._runtime.room.taken == 0
        with pytest.raises(RuntimeError, match="inside `async with` only"):
            await session.run(payload_of())
        assert emulator.log.stops == []
        async with session_at(emulator) as session:
            await session.run(payload_of())
            with pytest.raises(RuntimeError, match="once"):
                await session.run(payload_of())


# Room, pace and what is shared


async def test_sessions_beyond_max_sessions_wait(plain):
    async with emulated(plain, active_sessions=2) as emulator:
        most = 0

        async def one():
            nonlocal most
            async with session_at(emulator, max_sessions=2, sessions_per_minute=6e4) as session:
                most = max(most, session._runtime.room.taken)
                await session.run(payload_of())

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)
        assert most == 2
        assert {one.outcome for one in emulator.log.invocations} == {"answered"}


async def test_waiting_for_room_is_no_part_of_a_rollouts_time(plain, tmp_path):
    gateway, rollouts = MemoryGateway(), []
    async with emulated(plain) as emulator, Background() as background:

        async def one(payload, limit):
            rollout = await play(
                gateway,
                lambda: session_at(emulator, max_sessions=1),
                background,
                payload=payload,
                max_rollout_time=limit,
            )
            rollouts.append(rollout)

        files = {"started": str(tmp_path / "started"), "go": str(tmp_path / "go")}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, {"number": next(numbers), "do": "wait", **files}, 0.8)
            await until((tmp_path / "started").exists)
            tasks.start_soon(one, {"number": next(numbers), "do": "return"}, 0.7)
    (tmp_path / "go").touch()
    first, second = rollouts
    assert (first.status, second.status) == ("timed_out", "completed")
    assert second.timings.waited > 0.1
    assert second.session_id in {one.session_id for one in starts(emulator)}


async def test_an_abort_returns_at_once_and_stops_behind(plain, tmp_path):
    gateway, abort, rollouts = MemoryGateway(), anyio.Event(), []
    files = {"started": str(tmp_path / "started"), "go": str(tmp_path / "go")}
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="stop", delay=2.0))
        async with Background() as background, anyio.create_task_group() as tasks:

            async def one():
                payload = {"number": next(numbers), "do": "wait", **files}
                make = lambda: session_at(emulator)  # noqa: E731
                rollouts.append(await play(gateway, make, background, payload=payload, abort=abort))

            tasks.start_soon(one)
            await until((tmp_path / "started").exists)
            abort.set()
            await until(lambda: rollouts != [], seconds=1.5)
            assert emulator.log.stops == []
            assert gateway.no_key_is_open()
    (tmp_path / "go").touch()
    assert rollouts[0].status == "aborted"


async def test_new_sessions_are_evenly_spaced(plain):
    async with emulated(plain) as emulator:
        began = []

        async def one():
            async with session_at(emulator, sessions_per_minute=300):
                began.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(one)
    assert began[-1] - began[0] > 0.59


async def test_all_sessions_share_clients_and_a_keeper(background, monkeypatch):
    made = []
    connect = runtime_module.calls.connect
    monkeypatch.setattr(
        runtime_module.calls, "connect", lambda **said: made.append(said) or connect(**said)
    )
    async with emulated(background) as emulator, anyio.create_task_group() as tasks:
        for qualifier in (None, "DEFAULT"):
            for _ in range(5):
                tasks.start_soon(lambda: run(emulator, qualifier=qualifier))  # noqa: B023
    # For starts, polls and stops.
    assert sorted(said["read_timeout"] for said in made) == [10, 90, 3600]
    assert [said["keep_alive"] for said in made] == [False, True, True]


async def test_sessions_are_made_while_a_client_is_being_connected(plain, monkeypatch):
    connecting, go = threading.Event(), threading.Event()
    connect = runtime_module.calls.connect

    def slow(**said):
        connecting.set()
        assert go.wait(10)
        return connect(**said)

    monkeypatch.setattr(runtime_module.calls, "connect", slow)
    async with emulated(plain) as emulator, anyio.create_task_group() as tasks:
        tasks.start_soon(run, emulator)
        await until(connecting.is_set)
        began = anyio.current_time()
        session_at(emulator)
        assert anyio.current_time() - began < 5
        go.set()


async def test_a_key_is_in_no_log(plain, caplog):
    caplog.set_level(logging.DEBUG)
    async with emulated(plain) as emulator:
        emulator.inject(AgentCoreFault(operation="invoke", error="ThrottlingException"))
        await run(emulator, retry_time=20)
        with pytest.raises(AgentError):
            await run(emulator, payload_of(do="raise"))
    assert "botocore" in caplog.text
    assert SECRET not in caplog.text


async def test_without_credentials_the_run_ends(plain, monkeypatch, caplog):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    async with emulated(plain) as emulator:
        with pytest.raises(ContractError, match="give this process credentials of AWS"):
            await run(emulator)
        assert emulator.log.invocations == []
    assert "could not be stopped" not in caplog.text
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)


async def test_when_there_are_no_more_threads_no_place_is_lost(plain, monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    async with emulated(plain) as emulator:
        async with session_at(emulator) as session:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", none_left)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await session.run(payload_of())
        assert session._runtime.room.taken == 0


# All at once


def some_fault(random):
    """Something that goes wrong with a few calls, some time soon."""
    operation = random.choice(["invoke", "invoke", "stop"])
    passing = ["ThrottlingException", "RetryableConflictException", "InternalServerException"]
    codes = passing if operation == "stop" else [*passing, "ServiceQuotaExceededException"]
    what = random.choice(
        [
            {"error": random.choice(codes)},
            {"answer_error": "InternalServerException"},
            {"lose_answer": True},
            {"delay": random.uniform(0, 0.3)},
            {"answer_delay": random.uniform(0, 1.5)},
        ]
    )
    return AgentCoreFault(
        operation=operation, skip=random.randrange(60), times=random.randrange(1, 5), **what
    )


@pytest.mark.parametrize("seed", range(2 * max(1, int(os.environ.get("TURNLEAF_LONG", "0")) * 10)))
async def test_whatever_goes_wrong_nothing_runs_twice_and_everything_is_stopped(
    plain, background, seed
):
    random = Random(seed)
    outcomes = []
    agent = random.choice([plain, background])
    async with emulated(agent, provision_time=0.05, teardown_time=0.1) as emulator:
        for _ in range(20):
            emulator.inject(some_fault(random))

        async def one(payload, until_cancelled):
            session = session_at(
                emulator, timeout=1, max_sessions=12, sessions_per_minute=6e4, retry_time=2
            )
            try:
                with anyio.move_on_after(until_cancelled):
                    async with session:
                        result = await session.run(payload)
                        assert result["payload"]["number"] == payload["number"]
                        assert result["session_id"] == session.session_id
                        outcomes.append("completed")
            except SessionError as error:
                assert_silent(error)
                outcomes.append("failed")
            assert session._runtime.room.taken <= 12

        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                limit = random.choice([60, 60, random.uniform(0, 1)])
                tasks.start_soon(one, payload_of(), limit)
    assert outcomes.count("completed") > 10
