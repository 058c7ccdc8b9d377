"""How the demo's rollouts reach its agent: over HTTP, or through an emulated AgentCore Runtime."""

import enum
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs

from turnleaf.adapters.mock._agentcore_log import AgentCoreLog
from turnleaf.adapters.mock._agentcore_settings import AGENTCORE_ARN
from turnleaf.gateway._child import child_process

__all__ = ["DemoSession", "DemoSessions", "demo_sessions", "session_problems"]

_UNLIMITED: Mapping[str, None] = dict.fromkeys(
    (
        "invocations_per_second",
        "stops_per_second",
        "new_sessions_per_minute",
        "active_sessions",
    )
)
_SESSIONS_PER_MINUTE = 1e6  # the demo has its own pace
_FOREIGN = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN")
_MADE_UP = {
    "AWS_ACCESS_KEY_ID": "emulated",
    "AWS_SECRET_ACCESS_KEY": "emulated",
    # The emulator is on this machine, whatever proxies the environment names.
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


class DemoSession(enum.Enum):
    """The kinds of sessions that a demo can have."""

    HTTP = "http"
    AGENTCORE = "agentcore"


@attrs.frozen
class DemoSessions:
    """backend: what `session_factory` makes them of. emulator: its address, where there is one."""

    backend: Mapping[str, Any]
    emulator: str | None = None

    async def problems(self, rollouts: int) -> list[str]:
        """What is wrong with them after so many rollouts, all of which are over."""
        if self.emulator is None:
            return []
        # Late: whoever names a kind of session needs no HTTP client for it.
        import httpx

        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
            told = (await http.get(f"{self.emulator}/_emulator/log")).json()
        return session_problems(AgentCoreLog.from_mapping(told), rollouts)


@asynccontextmanager
async def demo_sessions(kind: DemoSession, agent_url: str) -> AsyncIterator[DemoSessions]:
    """Sessions with the agent at that address, until the context is left.

    Raises ContractError or GatewayError when the emulator does not start.
    """
    if kind is DemoSession.HTTP:
        yield DemoSessions({"backend": "turnleaf.sessions.HttpSession", "url": agent_url})
        return
    config = {"agent_url": agent_url, **_UNLIMITED}
    async with child_process("turnleaf.adapters.mock.agentcore", config) as emulator:
        url = emulator.ready["url"]
        backend = {
            "backend": "turnleaf.sessions.AgentCoreHttpSession",
            "agentcore_runtime_arn": AGENTCORE_ARN,
            "endpoint_url": url,
            "sessions_per_minute": _SESSIONS_PER_MINUTE,
        }
        with _made_up_credentials():
            yield DemoSessions(backend, url)


def session_problems(log: AgentCoreLog, rollouts: int) -> list[str]:
    """Sessions that were left alone, and rollouts that ran never or twice, a sentence each."""
    problems = [f"the session {one.id} was not stopped" for one in log.not_stopped()]
    runs = [one.session for one in log.invocations if one.executed and one.operation != "get"]
    if not len(runs) == len({*runs}) == rollouts:
        problems.append(
            f"{rollouts} rollouts ran the agent {len(runs)} times in {len({*runs})} sessions"
        )
    return problems


@contextmanager
def _made_up_credentials() -> Iterator[None]:
    """boto3 signs with something that is no secret, and asks nobody for credentials."""
    names = (*_FOREIGN, *_MADE_UP)
    before = {name: os.environ[name] for name in names if name in os.environ}
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(_MADE_UP)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
