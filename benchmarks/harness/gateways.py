"""The gateways that are measured, each a process of its own before the same engine."""

import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
from harness.environments import checkpoint, toolkit_python
from harness.programs import running

from turnleaf.gateway import WorkerConfig, running_worker


@attrs.frozen
class Session:
    """Of an agent. name: what the gateway's calls to the engine are routed by."""

    base_url: str
    api_key: str
    name: str


@attrs.frozen(eq=False)
class Gateway:
    """A running gateway. open_sessions: so many more; they stay open until the gateway ends."""

    name: str
    pid: int
    open_sessions: Callable[[int], Awaitable[list[Session]]]
    metrics_url: str | None = None


Start = Callable[[str], AbstractAsyncContextManager[Gateway]]
"""Starts a gateway before the engine of that URL."""


def turnleaf(**settings: Any) -> Start:
    """turnleaf's worker, as a trainer starts it; settings: of its configuration."""

    @asynccontextmanager
    async def start(engine_url: str) -> AsyncIterator[Gateway]:
        metrics_port = _free_port()
        config = WorkerConfig(
            engine_url=engine_url,
            model=str(checkpoint()),
            control_token=secrets.token_urlsafe(32),
            port=0,
            metrics_port=metrics_port,
            **settings,
        )
        async with running_worker(config) as worker:

            async def open_sessions(count: int) -> list[Session]:
                sessions = []
                for _ in range(count):
                    name = secrets.token_hex(8)
                    key = await worker.gateway.open_key(
                        name=name, sampling={}, purpose="train", expires_in=3600
                    )
                    sessions.append(Session(key.base_url, key.secret, name))
                return sessions

            metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
            yield Gateway("turnleaf", worker.pid, open_sessions, metrics_url)

    return start


def toolkit(history_mode: str) -> Start:
    """The public toolkit's gateway, "tree" or "linear"."""

    @asynccontextmanager
    async def start(engine_url: str) -> AsyncIterator[Gateway]:
        config = {
            "engine_url": engine_url,
            "model": str(checkpoint()),
            "history_mode": history_mode,
        }
        async with running("toolkit_gateway", config, python=toolkit_python()) as program:
            base_url = (await program.hear())["base_url"]

            async def open_sessions(count: int) -> list[Session]:
                names = [secrets.token_hex(16) for _ in range(count)]
                await program.tell(names)
                await program.hear()
                return [Session(base_url, name, name) for name in names]

            yield Gateway(f"toolkit, {history_mode}", program.pid, open_sessions)

    return start


@asynccontextmanager
async def engine(
    outputs: list[list[int]],
    *,
    latency: float = 0.0,
    event_interval: float = 0.0,
    experts: tuple[int, int] | None = None,
) -> AsyncIterator[str]:
    """The engine that all of them call; yields its URL. See engine.py."""
    config: Mapping[str, Any] = {
        "outputs": outputs,
        "latency": latency,
        "event_interval": event_interval,
        "experts": experts,
    }
    async with running("engine", config, python=sys.executable) as program:
        yield (await program.hear())["url"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
