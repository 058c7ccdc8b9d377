"""The emulator of AgentCore Runtime, by what the unmodified boto3 makes of it."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import attrs
import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.agent_process import agent_process, free_port
from tests.waiting import is_running, until
from turnleaf.adapters.mock import (
    AGENTCORE_ARN,
    AgentCoreEmulator,
    AgentCoreFault,
    AgentCoreLog,
    AgentCoreSettings,
    serve_agentcore,
)
from turnleaf.adapters.mock._agentcore_errors import STATUS
from turnleaf.adapters.mock._agentcore_payload import Payload, speaks_envelope
from turnleaf.gateway._child import child_process

pytestmark = pytest.mark.anyio

AGENT = Path(__file__).with_name("agent_app.py")
COMMAND = (sys.executable, str(AGENT))
ONE, OTHER = "session-one-" + "1" * 28, "session-other-" + "2" * 28


@attrs.frozen
class Caller:
    """boto3, in threads, without retries."""

    client: Any
    arn: str

    async def invoke(self, session: str, do: str, **payload: Any) -> Any:
        """The agent's reply, parsed where it is no stream of events."""

        def call() -> Any:
            reply = self.client.invoke_agent_runtime(
                agentRuntimeArn=self.arn,
                runtimeSessionId=session,
                payload=json.dumps({"do": do, **payload}).encode(),
            )
            assert reply["runtimeSessionId"] == session
            assert reply["statusCode"] == 200
            body = reply["response"].read()
            return json.loads(body) if reply["contentType"] == "application/json" else body

        return await anyio.to_thread.run_sync(call)

    async def stop(self, session: str) -> None:
        call = partial(
            self.client.stop_runtime_session, agentRuntimeArn=self.arn, runtimeSessionId=session
        )
        reply = await anyio.to_thread.run_sync(call)
        assert reply["runtimeSessionId"] == session
        assert reply["statusCode"] == 200


@pytest.fixture(scope="module")
def aws() -> boto3.Session:
    return boto3.Session("key", "secret", region_name="us-west-2")


@pytest.fixture
def calls_to(aws: boto3.Session) -> Iterator[Callable[..., Caller]]:
    """`calls_to(url)`: a client, closed when the test is over."""
    clients = []

    def caller(url: str, arn: str = AGENTCORE_ARN, **options: Any) -> Caller:
        config = Config(retries={"total_max_attempts": 1}, **options)
        clients.append(aws.client("bedrock-agentcore", endpoint_url=url, config=config))
        return Caller(clients[-1], arn)

    yield caller
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def agent_url() -> Iterator[str]:
    with agent_process(AGENT) as url:
        yield url


@pytest.fixture
def emulated(agent_url: str, calls_to: Callable[..., Caller]) -> Callable[..., Any]:
    """`async with emulated(**settings) as (emulator, aws)`: all sessions share an agent, unless
    the settings have a command."""

    @asynccontextmanager
    async def emulate(**settings: Any) -> AsyncIterator[tuple[AgentCoreEmulator, Caller]]:
        if "command" not in settings:
            settings = {"agent_url": agent_url, **settings}
        async with serve_agentcore(AgentCoreSettings(**settings)) as emulator:
            yield emulator, calls_to(emulator.endpoint_url, emulator.arn)

    return emulate


@attrs.frozen
class Wait:
    """The payload of an agent that waits in mid-run, and the test's side of it."""

    folder: Path

    @property
    def payload(self) -> dict[str, str]:
        return {name: str(self.folder / name) for name in ("started", "go")}

    async def until_it_runs(self) -> None:
        await until((self.folder / "started").exists)

    def let_it_go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def wait(tmp_path: Path) -> Wait:
    return Wait(tmp_path)


@asynccontextmanager
async def raised_in_background(call: Callable[[], Any]) -> AsyncIterator[list[BaseException]]:
    """Calls while the body runs; the list gets what the call raised."""
    caught: list[BaseException] = []

    async def calling() -> None:
        try:
            await call()
        except (BotoCoreError, ClientError) as error:
            caught.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(calling)
        yield caught


def outcomes(emulator: AgentCoreEmulator) -> list[str | None]:
    return [invocation.outcome for invocation in emulator.log.invocations]


def ends(emulator: AgentCoreEmulator) -> list[str | None]:
    return [session.how for session in emulator.log.sessions]


def code_of(error: BaseException) -> str:
    assert isinstance(error, ClientError)
    assert type(error).__name__ == error.response["Error"]["Code"]
    assert STATUS[type(error).__name__] == error.response["ResponseMetadata"]["HTTPStatusCode"]
    return type(error).__name__


async def code_raised_by(awaitable: Any) -> str:
    with pytest.raises(ClientError) as caught:
        await awaitable
    return code_of(caught.value)


# Sessions


async def test_each_session_has_a_process_of_its_own_until_it_is_stopped(
    emulated: Callable[..., Any],
) -> None:
    async with emulated(command=COMMAND) as (emulator, aws):
        cold, warm = [await aws.invoke(ONE, "where", n=n) for n in range(2)]
        other = await aws.invoke(OTHER, "where", n=2)
        assert cold == warm
        assert (cold["session_id"], other["session_id"]) == (ONE, OTHER)
        assert cold["pid"] != other["pid"]
        assert emulator.active_sessions == [ONE, OTHER]
        await aws.stop(ONE)
        assert not is_running(cold["pid"])
        assert emulator.active_sessions == [OTHER]
        assert [one.id for one in emulator.log.not_stopped()] == [OTHER]
        assert await code_raised_by(aws.stop(ONE)) == "ResourceNotFoundException"
        again = await aws.invoke(ONE, "where", n=3)
        assert again["pid"] != cold["pid"]
        for session in (ONE, OTHER):
            await aws.stop(session)
    assert not any(is_running(one["pid"]) for one in (other, again))
    assert [one.session for one in emulator.log.invocations] == [0, 0, 1, 2]
    first = emulator.log.sessions[0]
    assert first.started < first.ready < first.ended
    assert ends(emulator) == ["stopped"] * 3
    assert emulator.log.not_stopped() == []
    assert emulator.log.executed_twice() == {}


async def test_an_agents_failure_is_a_424_without_its_words(emulated: Callable[..., Any]) -> None:
    async with emulated() as (emulator, aws):
        with pytest.raises(aws.client.exceptions.RuntimeClientError) as caught:
            await aws.invoke(ONE, "raise", _config={"api_key": "no secret"})
        assert code_of(caught.value) == "RuntimeClientError"
        assert "luck" not in str(caught.value.response)
        assert await aws.invoke(ONE, "where")
        assert outcomes(emulator) == ["RuntimeClientError", "answered"]
        assert emulator.active_sessions == [ONE]


async def test_a_stream_is_passed_on(emulated: Callable[..., Any]) -> None:
    async with emulated() as (_, aws):
        events = (await aws.invoke(ONE, "stream")).split(b"\n\n")
    assert events[0] == b'data: {"progress": 0.5}'


async def test_a_stop_cuts_what_runs(emulated: Callable[..., Any], wait: Wait) -> None:
    async with emulated() as (emulator, aws):
        async with raised_in_background(lambda: aws.invoke(ONE, "wait", **wait.payload)) as caught:
            await wait.until_it_runs()
            await aws.stop(ONE)
        assert [type(one) for one in caught] == [ConnectionClosedError]
        assert outcomes(emulator) == ["cut"]
        wait.let_it_go()


async def test_a_stop_cuts_a_stream(emulated: Callable[..., Any]) -> None:
    async with emulated() as (emulator, aws):
        begun = anyio.Event()

        def read() -> None:
            reply = aws.client.invoke_agent_runtime(
                agentRuntimeArn=aws.arn, runtimeSessionId=ONE, payload=b'{"do": "tick"}'
            )
            next(reply["response"].iter_chunks(8))
            anyio.from_thread.run_sync(begun.set)
            reply["response"].read()

        async with raised_in_background(partial(anyio.to_thread.run_sync, read)) as caught:
            await begun.wait()
            await aws.stop(ONE)
        assert [type(one) for one in caught] == [ResponseStreamingError]
        assert outcomes(emulator) == ["cut"]


async def test_in_between_there_is_a_conflict(emulated: Callable[..., Any]) -> None:
    async with emulated(provision_time=0.5, teardown_time=0.5) as (emulator, aws):

        async def refuses() -> None:
            async with anyio.create_task_group() as tasks:
                for call in (aws.invoke(ONE, "where"), aws.stop(ONE)):
                    tasks.start_soon(conflicts, call)

        async def conflicts(call: Any) -> None:
            assert await code_raised_by(call) == "RetryableConflictException"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(aws.invoke, ONE, "where"))
            await until(lambda: emulator.active_sessions == [ONE])
            await refuses()
        await aws.stop(ONE)
        await refuses()
        await until(lambda: emulator._sessions.get(ONE) is None)
        assert await code_raised_by(aws.stop(ONE)) == "ResourceNotFoundException"
        await aws.invoke(ONE, "where")
        assert ends(emulator) == ["stopped", None]
    assert ends(emulator) == ["stopped", "lost"]
    assert [one.number for one in emulator.log.not_stopped()] == [1]


async def test_idle_sessions_are_reaped_unless_they_work(
    emulated: Callable[..., Any], wait: Wait
) -> None:
    async with emulated(idle_timeout=0.2) as (emulator, aws):
        task = (await aws.invoke(ONE, "work"))["task"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(aws.invoke, OTHER, "wait", **wait.payload))
            await wait.until_it_runs()
            await anyio.sleep(0.6)
            assert emulator.active_sessions == [ONE, OTHER]
            await aws.invoke(ONE, "rest", task=task)
            await until(lambda: emulator.active_sessions == [OTHER])
            wait.let_it_go()
        await until(lambda: not emulator.active_sessions)
        assert ends(emulator) == ["reaped", "reaped"]
        assert len(emulator.log.not_stopped()) == 2
        for session in (ONE, OTHER):
            assert await code_raised_by(aws.stop(session)) == "ResourceNotFoundException"
        assert emulator.log.not_stopped() == []


async def test_a_session_ends_at_its_maximal_lifetime(emulated: Callable[..., Any]) -> None:
    async with emulated(max_lifetime=0.3) as (emulator, aws):
        async with raised_in_background(lambda: aws.invoke(ONE, "tick")) as caught:
            pass
        assert len(caught) == 1
        assert outcomes(emulator) == ["cut"]
        assert ends(emulator) == ["expired"]


async def test_a_container_that_dies_is_a_424_and_ends_the_session(
    emulated: Callable[..., Any], wait: Wait
) -> None:
    async with emulated(command=COMMAND) as (emulator, aws):
        pid = (await aws.invoke(ONE, "where"))["pid"]
        async with raised_in_background(lambda: aws.invoke(ONE, "wait", **wait.payload)) as caught:
            await wait.until_it_runs()
            os.kill(pid, signal.SIGKILL)
        assert [code_of(one) for one in caught] == ["RuntimeClientError"]
        await until(lambda: not emulator.active_sessions)
        assert ends(emulator) == ["died"]


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "error occurred when starting"), ("sleep 600", "initialization time exceeded")],
)
async def test_an_agent_that_does_not_come_up_is_a_424(
    emulated: Callable[..., Any], script: str, said: str
) -> None:
    settings = {"command": ["/bin/sh", "-c", script], "initialization_timeout": 0.5}
    async with emulated(**settings) as (emulator, aws):
        with pytest.raises(aws.client.exceptions.RuntimeClientError, match=said):
            await aws.invoke(ONE, "where")
        assert ends(emulator) == ["failed"]
        assert not emulator.log.invocations[0].executed


async def test_an_agent_that_is_not_there_is_a_424(emulated: Callable[..., Any]) -> None:
    async with emulated(agent_url=f"http://127.0.0.1:{free_port()}") as (emulator, aws):
        assert await code_raised_by(aws.invoke(ONE, "where")) == "RuntimeClientError"
        assert not emulator.log.invocations[0].executed


# Requests


async def test_what_a_request_must_name(emulated: Callable[..., Any]) -> None:
    async with emulated(qualifiers=["DEFAULT", "canary"]) as (emulator, aws):
        call = partial(aws.client.invoke_agent_runtime, payload=b'{"do": "where"}')

        async def code(**fields: Any) -> str:
            fields = {"agentRuntimeArn": aws.arn, "runtimeSessionId": ONE, **fields}
            return await code_raised_by(anyio.to_thread.run_sync(partial(call, **fields)))

        assert await code(agentRuntimeArn=aws.arn + "x") == "ResourceNotFoundException"
        assert await code(qualifier="other") == "ResourceNotFoundException"
        for session in ("x" * 257, "-" + ONE, ONE + "."):
            assert await code(runtimeSessionId=session) == "ValidationException"
        # botocore itself refuses shorter ones.
        url = f"{emulator.endpoint_url}/runtimes/{emulator.arn.replace('/', '%2F')}/invocations"
        header = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": "x" * 32}
        async with httpx.AsyncClient(trust_env=False) as http:
            reply = await http.post(url, headers=header, json={"do": "where"})
        assert (reply.status_code, reply.json()["reason"]) == (400, "FieldValidationFailed")
        assert emulator.log.sessions == []
        named = partial(call, agentRuntimeArn=aws.arn, qualifier="canary")
        session = (await anyio.to_thread.run_sync(named))["runtimeSessionId"]
        assert emulator.active_sessions == [session]


async def test_a_payload_has_a_limit(
    emulated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnleaf.adapters.mock._agentcore.MAX_PAYLOAD", 3_000)
    async with emulated() as (_, aws):
        assert await aws.invoke(ONE, "where", text="x" * 2_900)
        refused = aws.invoke(ONE, "where", text="x" * 3_000)
        assert await code_raised_by(refused) == "ValidationException"


@pytest.mark.parametrize(
    ("quota", "code"),
    [
        ({"invocations_per_second": 0.1}, "ThrottlingException"),
        ({"new_sessions_per_minute": 1}, "ThrottlingException"),
        ({"active_sessions": 1}, "ServiceQuotaExceededException"),
    ],
)
async def test_quotas(emulated: Callable[..., Any], quota: dict[str, float], code: str) -> None:
    async with emulated(**quota) as (emulator, aws):
        await aws.invoke(ONE, "where")
        with pytest.raises(ClientError) as caught:
            await aws.invoke(OTHER, "where")
        assert code_of(caught.value) == code
        if "active_sessions" in quota:
            assert "maxVms limit exceeded" in str(caught.value)
            await aws.stop(ONE)
            await aws.invoke(OTHER, "where")
        assert [one.executed for one in emulator.log.invocations[:2]] == [True, False]


async def test_a_quota_fills_again(emulated: Callable[..., Any]) -> None:
    async with emulated(stops_per_second=1) as (_, aws):
        await aws.invoke(ONE, "where")
        await aws.stop(ONE)
        assert await code_raised_by(aws.stop(ONE)) == "ThrottlingException"
        with anyio.fail_after(10):
            while (code := await code_raised_by(aws.stop(ONE))) == "ThrottlingException":
                pass
        assert code == "ResourceNotFoundException"


# Faults


@pytest.mark.parametrize("code", sorted(STATUS))
async def test_each_error_is_botocores_own(emulated: Callable[..., Any], code: str) -> None:
    async with emulated() as (emulator, aws):
        await aws.invoke(ONE, "where", n=0)
        for operation in ("invoke", "stop"):
            emulator.inject(AgentCoreFault(operation=operation, error=code))
        with pytest.raises(getattr(aws.client.exceptions, code)) as caught:
            await aws.invoke(ONE, "where", n=1)
        assert code_of(caught.value) == code
        assert await code_raised_by(aws.stop(ONE)) == code
        assert not emulator.log.invocations[1].executed
        assert len(emulator.log.not_stopped()) == (code != "ResourceNotFoundException")
        await aws.stop(ONE)
        assert emulator.log.not_stopped() == []


async def test_faults_choose_their_calls(emulated: Callable[..., Any]) -> None:
    async with emulated() as (emulator, aws):
        fault = partial(AgentCoreFault, operation="invoke", error="ThrottlingException")

        async def fails(session: str = ONE, **payload: Any) -> bool:
            try:
                await aws.invoke(session, "where", **payload)
            except aws.client.exceptions.ThrottlingException:
                return True
            return False

        emulator.inject(fault(skip=1, times=2))
        assert [await fails() for _ in range(5)] == [False, True, True, False, False]
        emulator.inject(fault(session=OTHER))
        assert [await fails(), await fails(OTHER)] == [False, True]
        emulator.inject(fault(payload="row-7"))
        assert [await fails(row="row-6"), await fails(row="row-7")] == [False, True]
        envelope = {"version": 1, "operation": "get", "invocation_id": "i"}
        emulator.inject(fault(polls=True))
        assert [await fails(), await fails(_agentcore_runtime=envelope)] == [False, True]
        emulator.inject(fault(polls=False))
        assert [await fails(_agentcore_runtime=envelope), await fails()] == [False, True]
        emulator.inject(fault(times=None, seconds=0.3))
        assert await fails()
        with anyio.fail_after(10):
            while await fails():
                pass
        emulator.inject(fault(times=None))
        assert await fails()
        emulator.clear_faults()
        assert not await fails()


@pytest.mark.parametrize(
    ("fault", "error", "outcome"),
    [
        ({"lose_answer": True}, ConnectionClosedError, "lost"),
        ({"answer_error": "InternalServerException"}, ClientError, "InternalServerException"),
        ({"answer_delay": 0.5}, ReadTimeoutError, "unread"),
    ],
)
@pytest.mark.parametrize("do", ["where", "stream"])
async def test_what_has_run_is_not_answered(
    emulated: Callable[..., Any],
    calls_to: Callable[..., Caller],
    do: str,
    fault: dict[str, Any],
    error: type[Exception],
    outcome: str,
) -> None:
    async with emulated() as (emulator, _):
        patience = 0.2 if "answer_delay" in fault else 60
        aws = calls_to(emulator.endpoint_url, read_timeout=patience)
        emulator.inject(AgentCoreFault(operation="invoke", **fault))
        with pytest.raises(error):
            await aws.invoke(ONE, do)
        await until(lambda: outcomes(emulator) == [outcome])
        assert emulator.log.invocations[0].executed
        emulator.inject(AgentCoreFault(operation="stop", **fault))
        with pytest.raises(error):
            await aws.stop(ONE)
        await until(lambda: emulator.log.not_stopped() == [])


@pytest.mark.parametrize("do", ["where", "stream"])
async def test_a_call_whose_caller_has_left_runs_all_the_same(
    emulated: Callable[..., Any], calls_to: Callable[..., Caller], do: str
) -> None:
    async with emulated() as (emulator, aws):
        hasty = calls_to(emulator.endpoint_url, read_timeout=0.2)
        await aws.invoke(ONE, "where")
        emulator.inject(AgentCoreFault(operation="invoke", delay=2.0))
        with pytest.raises(ReadTimeoutError):
            await hasty.invoke(OTHER, do, late=True)
        assert not emulator.log.invocations[1].executed
        await until(lambda: outcomes(emulator) == ["answered", "unread"])
        assert emulator.log.invocations[1].executed


@pytest.mark.parametrize("by_fault", [True, False])
async def test_a_container_is_killed_in_mid_run(
    emulated: Callable[..., Any], wait: Wait, by_fault: bool
) -> None:
    async with emulated() as (emulator, aws):
        if by_fault:
            emulator.inject(AgentCoreFault(operation="invoke", kill_after=0.1))
        async with raised_in_background(lambda: aws.invoke(ONE, "wait", **wait.payload)) as caught:
            if not by_fault:
                await wait.until_it_runs()
                await emulator.kill(ONE)
        assert [code_of(one) for one in caught] == ["RuntimeClientError"]
        assert emulator.log.invocations[0].executed
        assert ends(emulator) == ["killed"]
        with pytest.raises(KeyError):
            await emulator.kill(ONE)
        wait.let_it_go()


@pytest.mark.parametrize("keep_sessions", [True, False])
async def test_a_restart_cuts_all_and_may_lose_all(
    emulated: Callable[..., Any], wait: Wait, keep_sessions: bool
) -> None:
    async with emulated(command=COMMAND) as (emulator, aws):
        pid = (await aws.invoke(ONE, "where", n=1))["pid"]
        async with raised_in_background(lambda: aws.invoke(ONE, "wait", **wait.payload)) as caught:
            await wait.until_it_runs()
            await emulator.restart(keep_sessions=keep_sessions)
        assert [type(one) for one in caught] == [ConnectionClosedError]
        assert is_running(pid) == keep_sessions
        wait.let_it_go()
        await until(lambda: outcomes(emulator)[1] == ("unread" if keep_sessions else "cut"))
        assert ((await aws.invoke(ONE, "where", n=2))["pid"] == pid) == keep_sessions
        await aws.stop(ONE)
        assert ends(emulator) == (["stopped"] if keep_sessions else ["lost", "stopped"])
        assert emulator.log.not_stopped() == []


async def test_a_runtime_that_is_down_refuses_connections(emulated: Callable[..., Any]) -> None:
    async with emulated() as (emulator, aws):
        await aws.invoke(ONE, "where")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(emulator.restart, keep_sessions=True, down=0.5))
            await until(lambda: emulator._site is None)
            with pytest.raises(EndpointConnectionError):
                await aws.invoke(ONE, "where")
        await aws.invoke(ONE, "where")
        assert len(emulator.log.sessions) == 1


async def test_leaving_ends_what_is_running_and_what_was_to_begin(
    emulated: Callable[..., Any],
) -> None:
    up = anyio.Event()

    async def invoke(session: str) -> None:
        await up.wait()
        await aws.invoke(session, "where")

    async with (
        raised_in_background(lambda: invoke(ONE)) as one,
        raised_in_background(lambda: invoke(OTHER)) as other,
        emulated(command=["/bin/sh", "-c", "sleep 600"]) as (emulator, aws),
    ):
        emulator.inject(AgentCoreFault(operation="invoke", session=OTHER, delay=0.5))
        up.set()
        await until(lambda: len(emulator.log.invocations) == 2)
        await until(lambda: emulator.active_sessions == [ONE])
        pids = [session.container.pid for session in emulator._sessions.active()]
    assert [type(error) for error in (*one, *other)] == [ConnectionClosedError] * 2
    assert outcomes(emulator) == ["cut", "cut"]
    assert set(ends(emulator)) == {"lost"}
    assert not any(is_running(pid) for pid in pids)


# The log


@pytest.mark.parametrize("speaks", [True, False])
def test_a_repeated_start_is_one_execution_where_the_agent_says_so(speaks: bool) -> None:
    log = AgentCoreLog()
    session = log.session_started(ONE)
    for operation, secret in (("start", "a"), ("get", "a"), ("start", "b")):
        payload = Payload.read(
            json.dumps(
                {
                    "prompt": "7 * 6?",
                    "_config": {"api_key": secret},
                    "_agentcore_runtime": {"operation": operation, "invocation_id": "i"},
                }
            ).encode()
        )
        record = log.invoked(ONE, payload)
        record.session, record.executed = session.number, True
    reply = {"version": 1, "invocation_id": "i" if speaks else "j", "status": "in_progress"}
    session.speaks = speaks_envelope(payload, json.dumps(reply).encode())
    assert session.speaks == speaks
    assert [len(runs) for runs in log.executed_twice().values()] == ([] if speaks else [2])


def test_the_same_start_in_two_sessions_is_executed_twice() -> None:
    log = AgentCoreLog()
    payload = Payload.read(b'{"_agentcore_runtime": {"operation": "start", "invocation_id": "i"}}')
    for session in (log.session_started(ONE), log.session_started(OTHER)):
        session.speaks = True
        record = log.invoked(session.id, payload)
        record.session, record.executed = session.number, True
    ((first, second),) = log.executed_twice().values()
    assert (first.session_id, second.session_id) == (ONE, OTHER)


@pytest.mark.parametrize("body", [b"no JSON", b"[1]", b'{"_agentcore_runtime": 1}', b"\xff"])
def test_any_payload_has_a_digest(body: bytes) -> None:
    payload = Payload.read(body)
    assert payload.digest == Payload.read(body).digest != Payload.read(body + b" 1").digest
    assert payload.operation is None
    assert not speaks_envelope(payload, b"{}")


# The program


@pytest.mark.parametrize("kill", [True, False])
async def test_no_process_outlives_the_program(calls_to: Callable[..., Caller], kill: bool) -> None:
    config = {"command": COMMAND, "idle_timeout": 60}
    async with child_process("turnleaf.adapters.mock.agentcore", config) as child:
        aws = calls_to(child.ready["url"])
        pids = [(await aws.invoke(ONE, do))["pid"] for do in ("where", "start a child")]
        assert all(is_running(pid) for pid in pids)
        if kill:
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: not any(is_running(pid) for pid in pids))
    assert not any(is_running(pid) for pid in pids)


async def test_the_program_is_controlled_over_http(
    agent_url: str, calls_to: Callable[..., Caller]
) -> None:
    config = {"agent_url": agent_url, "arn": AGENTCORE_ARN + "x"}
    async with (
        child_process("turnleaf.adapters.mock.agentcore", config) as child,
        httpx.AsyncClient(base_url=child.ready["url"], trust_env=False) as http,
    ):

        async def log() -> AgentCoreLog:
            return AgentCoreLog.from_mapping((await http.get("/_emulator/log")).json())

        aws = calls_to(child.ready["url"], config["arn"])
        fault = {"operation": "invoke", "error": "ThrottlingException", "times": None}
        assert (await http.post("/_emulator/faults", json=fault)).status_code == 204
        assert await code_raised_by(aws.invoke(ONE, "where")) == "ThrottlingException"
        assert (await http.delete("/_emulator/faults")).status_code == 204
        await aws.invoke(ONE, "where")
        found = await log()
        assert [one.outcome for one in found.invocations] == ["ThrottlingException", "answered"]
        assert [one.id for one in found.not_stopped()] == [ONE]
        bad = await http.post("/_emulator/faults", json={"operation": "sing"})
        assert (bad.status_code, "operation" in bad.text) == (400, True)
        assert (await http.post(f"/_emulator/sessions/{ONE}/kill")).status_code == 204
        assert (await http.post(f"/_emulator/sessions/{ONE}/kill")).status_code == 404
        assert await code_raised_by(aws.stop(ONE)) == "ResourceNotFoundException"
        assert (await log()).not_stopped() == []
        await aws.invoke(OTHER, "where")
        assert (await http.post("/_emulator/restart", json={})).status_code == 202
        how = None
        with anyio.fail_after(10):
            while how is None:
                with contextlib.suppress(httpx.TransportError):
                    how = (await log()).sessions[-1].how
        assert how == "lost"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "command or agent_url"),
        ({"command": ["agent"], "agent_url": "http://agent"}, "command or agent_url"),
        ({"command": "agent.py"}, "one string"),
        ({"command": ["agent"], "active_sessions": 0}, "active_sessions"),
        ({"command": ["agent"], "color": "red"}, "color"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        AgentCoreSettings(**settings)
