"""A whole gateway inside the test's event loop: both listeners, real HTTP, a scripted engine."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from socket import create_server
from typing import Any

import attrs
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.loaded import loaded
from turnleaf.adapters.mock import (
    FileTokenizer,
    LedgerReport,
    Script,
    ScriptedEngine,
    cached_checkpoint,
    compare,
    serve_engine,
)
from turnleaf.adapters.mock._calls import Streaming
from turnleaf.core import Key, Trajectory
from turnleaf.gateway import GatewayClient
from turnleaf.gateway._agents_app import agents_app
from turnleaf.gateway._control_app import control_app
from turnleaf.gateway._history import ThinkingRetention
from turnleaf.gateway._keys import Keys
from turnleaf.gateway._limits import Limits
from turnleaf.gateway._readiness import Readiness
from turnleaf.gateway._serving import served
from turnleaf.gateway._turns import Turns
from turnleaf.gateway._watched import Watched
from turnleaf.gateway.engines import SGLangEngine
from turnleaf.gateway.protocols import ConstraintPolicy
from turnleaf.gateway.rendering import Renderer

TOKEN = "token-of-the-trainer"


@cache
def checkpoint(template: str) -> Path:
    """The checkpoint with one of trl's templates, or with our own for "chatml"."""
    if template == "chatml":
        return cached_checkpoint("qwen3")
    trl = find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    source = (Path(trl.origin).parent / "chat_templates" / f"{template}.jinja").read_text()
    return cached_checkpoint("qwen2.5" if template == "qwen2_5" else "qwen3", chat_template=source)


@cache
def renderer(template: str) -> Renderer:
    return loaded(checkpoint(template))


@cache
def tokenizer() -> FileTokenizer:
    return FileTokenizer(checkpoint("qwen3") / "tokenizer.json")


@attrs.define(eq=False)
class Stack:
    engine: ScriptedEngine
    keys: Keys
    gateway: GatewayClient
    collected: list[Trajectory] = attrs.Factory(list)

    async def open(self, name: str = "rollout", **sampling: Any) -> Key:
        return await self.gateway.open_key(
            name=name, sampling=sampling, purpose="train", expires_in=60
        )

    async def close(self, key: Key, *, aborted: bool = False) -> Trajectory:
        trajectory = await self.gateway.close_key(key.id, aborted=aborted)
        self.collected.append(trajectory)
        return trajectory

    def report(self) -> LedgerReport:
        return compare(self.engine.ledger, self.collected)


@attrs.frozen(eq=False)
class Asked:
    """A request as an agent sent it; header names in lower case."""

    headers: Mapping[str, str]
    body: Any


@attrs.frozen(eq=False)
class Recorder:
    """What the agents ask, in order; it goes around the agents' app."""

    asked: list[Asked] = attrs.Factory(list)

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            received = bytearray()

            async def record() -> Message:
                message = await receive()
                if message["type"] == "http.request":
                    received.extend(message.get("body", b""))
                    if not message.get("more_body", False):
                        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
                        self.asked.append(Asked(headers, json.loads(received or b"null")))
                return message

            await app(scope, record, send)

        return recorded


@asynccontextmanager
async def running_gateway(
    script: Script | Iterable[Any],
    *,
    template: str = "qwen3",
    max_context_tokens: int = 32_768,
    keep_alive: float = 15.0,
    retry_budget: float = 5.0,
    retry_grace: float = 0.0,
    engine_url: str | None = None,
    routed_experts_shape: tuple[int, int] | None = None,
    thinking_retention: ThinkingRetention = "template",
    constraints: ConstraintPolicy = "hint",
    streaming: Streaming = "incremental",
    limits: Limits | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> AsyncIterator[Stack]:
    """Serve until the context is left, then check the ledger against every collected trajectory.

    script: of the engine; a list is played to every rollout. retry_grace: none, so that a lost
    connection's call ends at once. streaming: how the engine streams. engine_url: another address
    than the scripted engine's. routed_experts_shape: of the experts that every turn records.
    around: is given the agents' app, and what it returns is served.
    """
    played = script if isinstance(script, dict) else {"*": list(script)}
    stop_token_id = tokenizer().encode("<|im_end|>")[0]
    scripted = ScriptedEngine(
        played,
        tokenizer=tokenizer(),
        stop_token_id=stop_token_id,
        routed_experts_shape=routed_experts_shape,
        streaming=streaming,
    )
    async with AsyncExitStack() as resources:
        scripted_url = await resources.enter_async_context(serve_engine(scripted))
        engine = SGLangEngine(engine_url or scripted_url, retry_budget=retry_budget)
        resources.push_async_callback(engine.aclose)
        keys = Keys(
            "restore",
            thinking_retention=thinking_retention,
            retry_grace=retry_grace,
            limits=limits,
        )
        turns = Turns(
            renderer(template),
            engine,
            max_context_tokens=max_context_tokens,
            routed_experts_shape=routed_experts_shape,
            constraints=constraints,
        )
        agents = create_server(("127.0.0.1", 0))
        control = create_server(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{agents.getsockname()[1]}/v1"
        chat = agents_app(keys, turns, model_id="model", keep_alive=keep_alive)
        watched = Watched(around(chat), keys.metrics)
        readiness = Readiness(engine)
        for app, listening in (
            (watched, agents),
            (control_app(keys, readiness, watched, base_url=base_url, token=TOKEN), control),
        ):
            await resources.enter_async_context(served(app, listening))
        control_url = f"http://127.0.0.1:{control.getsockname()[1]}"
        gateway = GatewayClient(control_url, TOKEN, base_url=base_url)
        resources.push_async_callback(gateway.aclose)
        stack = Stack(scripted, keys, gateway)
        yield stack
        stack.report().raise_for_problems()


@asynccontextmanager
async def openai_client(key: Key, *, max_retries: int = 0) -> AsyncIterator[AsyncOpenAI]:
    client = AsyncOpenAI(
        base_url=key.base_url,
        api_key=key.secret,
        max_retries=max_retries,
        # Nothing here is encrypted, and reading a machine's certificates takes a while.
        http_client=DefaultAsyncHttpxClient(verify=False),
    )
    async with client:
        yield client
