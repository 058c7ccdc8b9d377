"""Requests in the envelope of background invocations, and a client that sends them to an app."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from bedrock_agentcore import BedrockAgentCoreApp

from tests.agent_process import agent_process

AGENT = Path(__file__).with_name("runtime_agent.py")
SESSION = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
ENVELOPE = "_agentcore_runtime"
WAIT = "_agentcore_runtime_wait"


def start(
    invocation_id: object = "i1", *, payload: Mapping[str, Any] | None = None, **fields: object
) -> dict[str, Any]:
    """A payload that starts an invocation; fields: more of the envelope."""
    envelope = {"version": 1, "operation": "start", "invocation_id": invocation_id, **fields}
    return {**(payload or {}), ENVELOPE: envelope}


def get(invocation_id: str = "i1", *, wait: object = None) -> dict[str, Any]:
    """A payload that asks for an invocation; wait: seconds."""
    request = {ENVELOPE: {"version": 1, "operation": "get", "invocation_id": invocation_id}}
    return request if wait is None else {**request, WAIT: wait}


def state(status: str, invocation_id: str = "i1", **outcome: object) -> dict[str, Any]:
    """The reply about an invocation."""
    return {"version": 1, "invocation_id": invocation_id, "status": status, **outcome}


class Asking:
    """A client of an app, in this process or behind an address."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def response(self, payload: object, session: str | None = "session-1") -> httpx.Response:
        headers = {} if session is None else {SESSION: session}
        # In ASCII, which has room for a surrogate.
        return await self.client.post("/invocations", content=json.dumps(payload), headers=headers)

    async def __call__(self, payload: object, session: str | None = "session-1") -> Any:
        response = await self.response(payload, session)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        return response.json()

    async def ping(self) -> Any:
        return (await self.client.get("/ping")).json()["status"]


@contextlib.asynccontextmanager
async def asking(app: BedrockAgentCoreApp) -> AsyncIterator[Asking]:
    """The client of an app in this event loop."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        yield Asking(client)
    if (loop := app._worker_loop) is not None:
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(app._worker_thread.join)
        loop.close()


@contextlib.asynccontextmanager
async def process(folder: Path, *arguments: str) -> AsyncIterator[Asking]:
    """The client of runtime_agent.py, which works in `folder`, in a process of its own."""
    with agent_process(AGENT, str(folder), *arguments) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            yield Asking(client)
