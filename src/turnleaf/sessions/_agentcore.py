"""An agent on AgentCore Runtime."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, Self

import anyio

from turnleaf.sessions._agentcore_runtime import runtime_of
from turnleaf.sessions._agentcore_settings import RuntimeSettings
from turnleaf.sessions._exchange import new_session_id
from turnleaf.sessions._invocation import Invocation
from turnleaf.sessions._reporting import Redaction
from turnleaf.sessions._room import Place

__all__ = ["AgentCoreHttpSession"]


class AgentCoreHttpSession:
    """Runs an agent on AgentCore Runtime, in a session of its own; a RolloutSession.

    agentcore_runtime_arn: the runtime, and with it the region.
    qualifier: the runtime's endpoint; null is DEFAULT. endpoint_url: of AgentCore's data plane
        itself, such as an interface endpoint of a VPC; null is the region's.
    envelope: auto has agents that can do so work in the background, and asks for their result;
        any other agent answers as ever. never sends the payload alone.
    max_sessions: how many sessions this process has at a time. sessions_per_minute: how many new
        ones it makes, and polls_per_second how often it asks agents that work in the background,
        evenly spaced. All three hold for all sessions of equal arguments together.
    timeout: seconds for which an invocation may be silent; keep it above `max_rollout_time`.
    connect_timeout: seconds to connect.
    retry_time: seconds for which a start that did not run the agent, and polls that fail, are
        repeated.
    max_response_bytes: of the result, or of one event when the agent streams.

    A start whose outcome is not known is never repeated: no payload runs twice. Leaving the
    session stops it; so does the process's keeper, a child, when the process is killed. Its calls
    are made by daemon threads through one boto3 client of the process. Raises SettingsError for a
    bad argument.
    """

    def __init__(
        self,
        agentcore_runtime_arn: str,
        *,
        qualifier: str | None = None,
        endpoint_url: str | None = None,
        envelope: Literal["auto", "never"] = "auto",
        max_sessions: int = 500,
        sessions_per_minute: float = 400.0,
        polls_per_second: float = 100.0,
        timeout: float = 3600.0,
        connect_timeout: float = 10.0,
        retry_time: float = 60.0,
        max_response_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self._settings = RuntimeSettings(
            agentcore_runtime_arn=agentcore_runtime_arn,
            qualifier=qualifier,
            endpoint_url=endpoint_url,
            envelope=envelope,
            max_sessions=max_sessions,
            sessions_per_minute=sessions_per_minute,
            polls_per_second=polls_per_second,
            timeout=timeout,
            connect_timeout=connect_timeout,
            retry_time=retry_time,
            max_response_bytes=max_response_bytes,
        )
        self._runtime = runtime_of(self._settings)
        self._place: Place | None = None
        self._stack = AsyncExitStack()
        self._invocation: Invocation | None = None
        self.session_id = new_session_id()
        """Names the session at AgentCore; not secret."""

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Wait until this process may make another session, and hold its place."""
        self._place = await self._runtime.admit()
        try:
            yield
        finally:
            self._place.let_go()
            self._place = None

    async def __aenter__(self) -> Self:
        if self._place is None:
            await self._stack.enter_async_context(self.room())
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._stack:
            if self._invocation is not None:
                # Shielded: the session is stopped after cancellation, too.
                with anyio.CancelScope(shield=True):
                    await self._invocation.end()

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Invoke the agent with `payload` and return its result: any JSON value, as it came.

        Raises AgentError when the agent failed; SessionBusy when AgentCore had no room for as
        long as `retry_time`; SessionError when the agent could not be reached, was cut off, or
        nobody knows whether it ran; BadResultError when its result is not JSON or too large;
        PayloadError when the payload cannot be sent; ContractError without AWS credentials. No
        text holds the payload's API key.
        """
        if self._place is None:
            raise RuntimeError("an AgentCoreHttpSession runs agents inside `async with` only")
        if self._invocation is not None:
            raise RuntimeError("an AgentCoreHttpSession runs one agent, once")
        self._invocation = Invocation(
            self._runtime, self.session_id, self._place, Redaction.of(payload)
        )
        result: dict[str, Any] = await self._invocation.result(payload)
        return result
