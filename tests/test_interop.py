"""Agents and clients of agentcore-rl-toolkit 0.2.0, each with turnleaf's other side.

In the environment of `make test-interop` only, which has that package.
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from agentcore_rl_toolkit import AgentCoreHttpClient, InvocationError
from agentcore_rl_toolkit import AgentCoreRuntimeApp as ToolkitApp
from agentcore_rl_toolkit.rollout_session.agentcore_http_session import (
    AgentCoreHttpSession as ToolkitSession,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.envelope import AGENT, asking, get, process, start, state
from tests.waiting import until
from turnleaf.adapters.mock import (
    AGENTCORE_ARN,
    AgentCoreEmulator,
    AgentCoreSettings,
    serve_agentcore,
)
from turnleaf.agent import AgentCoreRuntimeApp
from turnleaf.core import AgentError
from turnleaf.sessions import AgentCoreHttpSession

pytestmark = [
    pytest.mark.anyio,
    # The app's own formatting of its log, on Python 3.12:
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

ONE, TWO = "session-one-" + "1" * 28, "session-two-" + "2" * 28


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")


def asked(do: str, **more: Any) -> dict[str, Any]:
    return {"do": do, "name": do, **more}


def runs(folder: Path) -> list[str]:
    """What was run, in order: session and name."""
    return (folder / "runs").read_text().splitlines()


# turnleaf's app, the toolkit's client

Serve = Callable[[Path], AbstractAsyncContextManager[tuple[AgentCoreHttpClient, AgentCoreEmulator]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`async with serve(folder) as (client, emulator)`: of turnleaf's agent, one for a session."""
    # As it is, it asks every ten seconds.
    monkeypatch.setattr("agentcore_rl_toolkit.runtime.client.POLL_INTERVAL", 0.05)

    @contextlib.asynccontextmanager
    async def serving(folder: Path) -> AsyncIterator[tuple[AgentCoreHttpClient, AgentCoreEmulator]]:
        command = (sys.executable, str(AGENT), str(folder))
        async with serve_agentcore(AgentCoreSettings(command=command)) as emulator:
            monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", emulator.endpoint_url)
            async with AgentCoreHttpClient(AGENTCORE_ARN) as client:
                yield client, emulator

    return serving


async def test_the_toolkits_client_with_turnleafs_app(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path) as (client, emulator):
        payload = asked("return", _config={"api_key": "k"})
        for background in (False, True):
            got = await client.invoke(
                payload, session_id=ONE, invocation_id="i1", background=background
            )
            result = await got.result() if background else got
            assert result == {"session_id": ONE, "payload": payload}

        handle = await client.invoke(
            asked("wait"), session_id=ONE, invocation_id="i2", background=True
        )
        assert await handle.status() == state("in_progress", "i2")
        (tmp_path / "go").touch()
        assert await handle.result(60) == {"waited": True}
        again = client.get_invocation(session_id=ONE, invocation_id="i2")
        assert await again.result() == {"waited": True}

        with pytest.raises(InvocationError, match=r"Invocation i3: ValueError: no luck\n"):
            await client.invoke(asked("raise"), session_id=ONE, invocation_id="i3")
        with pytest.raises(InvocationError, match="Invocation i4: not_found"):
            await client.get_invocation(session_id=ONE, invocation_id="i4").result()
        streamed = await client.invoke(
            asked("stream", events=3, size=1), session_id=ONE, background=True
        )
        assert await streamed.result(60) == {"number": 2, "padding": "x"}
        assert runs(tmp_path) == [f"{ONE} {do}" for do in ("return", "wait", "raise", "stream")]

        (tmp_path / "go").unlink()
        await client.invoke(asked("wait"), session_id=ONE, invocation_id="i5", background=True)
        await until(lambda: runs(tmp_path).count(f"{ONE} wait") == 2)
        await emulator.kill(ONE)
        for repeated in (
            client.get_invocation(session_id=ONE, invocation_id="i5"),
            await client.invoke(asked("wait"), session_id=ONE, invocation_id="i5", background=True),
        ):
            with pytest.raises(InvocationError, match="Invocation i5: interrupted"):
                await repeated.result()
        assert runs(tmp_path).count(f"{ONE} wait") == 2
        await client.stop_session(ONE)
        assert emulator.active_sessions == []


async def test_the_toolkits_session_with_turnleafs_app(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path) as (client, emulator):
        async with ToolkitSession.with_client(ONE, client) as session:
            dump = await session.run(asked("return", reward=1))
        assert dump.exception is None
        assert dump.task_output["payload"] == asked("return", reward=1)
        async with ToolkitSession.with_client(TWO, client) as session:
            dump = await session.run(asked("raise"))
        assert "ValueError: no luck" in dump.exception
        assert emulator.active_sessions == []


# The toolkit's app, turnleaf's client


@pytest.mark.parametrize("package", ["agentcore_rl_toolkit", "turnleaf.agent"])
async def test_turnleafs_session_with_both_apps(tmp_path: Path, package: str) -> None:
    command = (sys.executable, str(AGENT), str(tmp_path), package)
    async with serve_agentcore(AgentCoreSettings(command=command)) as emulator:

        async def run(payload: dict[str, Any]) -> Any:
            async with AgentCoreHttpSession(
                emulator.arn, endpoint_url=emulator.endpoint_url
            ) as session:
                return await session.run(payload)

        async def wait() -> None:
            assert await run(asked("wait")) == {"waited": True}

        result = await run(asked("return", reward=1))
        assert result["payload"] == asked("return", reward=1)
        with pytest.raises(AgentError, match="no luck"):
            await run(asked("raise"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            # It has been asked for at least once, in vain.
            await until(lambda: any(call.operation == "get" for call in emulator.log.invocations))
            (tmp_path / "go").touch()
        assert emulator.log.not_stopped() == []
        assert emulator.log.executed_twice() == {}
    assert [run.split()[1] for run in runs(tmp_path)] == ["return", "raise", "wait"]


async def test_turnleafs_requests_with_the_toolkits_app(tmp_path: Path) -> None:
    async with process(tmp_path, "agentcore_rl_toolkit") as ask:
        payload = asked("return", _config={"api_key": "k"})
        done = state("completed", result={"session_id": ONE, "payload": payload})
        assert await ask(start(payload=payload), ONE) == done
        # It does not know how to wait, and is not disturbed by being asked to.
        assert await ask(get(wait=30), ONE) == done
        assert await ask(start("i2", payload=asked("wait"), background=True), ONE) == state(
            "in_progress", "i2"
        )
        with anyio.fail_after(10):
            assert await ask(get("i2", wait=30), ONE) == state("in_progress", "i2")
        (tmp_path / "go").touch()
        with anyio.fail_after(30):
            reply = state("in_progress", "i2")
            while reply == state("in_progress", "i2"):  # in another process
                await anyio.sleep(0.02)
                reply = await ask(get("i2", wait=30), ONE)
        assert reply == state("completed", "i2", result={"waited": True})
        assert await ask(get("i3", wait=30), ONE) == state("not_found", "i3")
        assert runs(tmp_path) == [f"{ONE} return", f"{ONE} wait"]


# Both apps, the same requests


async def answers(
    kind: type[ToolkitApp | AgentCoreRuntimeApp], folder: Path, requests: list[tuple[str, Any]]
) -> list[Any]:
    """What an app answers, with "…" in place of the text of an error."""
    app = kind(state_dir=folder)
    runs: list[Any] = []

    def handler(payload: dict[str, Any]) -> Any:
        runs.append(payload)
        if payload.get("do") == "":
            raise ValueError("no luck")
        return payload

    app.entrypoint(handler)
    said = []
    async with asking(app) as ask:
        for session, payload in requests:
            response = await ask.response(payload, session)
            said.append((response.status_code, response.json()))
            if payload.get("_agentcore_runtime", {}).get("operation") == "start":
                # What runs in the background has ended before the next request.
                while await ask.ping() != "Healthy":  # noqa: ASYNC110  # nothing tells of it
                    await anyio.sleep(0.001)
    for _, reply in said:
        if "error" in reply:
            assert reply["error"]
            reply["error"] = "…"
    return [said, runs]


@given(
    st.lists(
        st.tuples(st.sampled_from([ONE, TWO]), strategies.runtime_requests()),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=100)
def test_both_apps_answer_alike(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[str, Any]]
) -> None:
    ours, theirs = (
        anyio.run(answers, kind, tmp_path_factory.mktemp("state"), requests)
        for kind in (AgentCoreRuntimeApp, ToolkitApp)
    )
    assert ours == theirs
