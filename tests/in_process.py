"""A gateway without sockets: clients that leave at an exact byte, an engine that answers on word.

Everything between is the real thing: the ASGI apps, keys, turns, SGLang's wire format, the scripted
engine with its ledger.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import attrs
import orjson
from starlette.types import ASGIApp

from turnleaf.adapters.mock import Call as EngineCall
from turnleaf.adapters.mock import Reply, ScriptedEngine, Tokenizer
from turnleaf.adapters.mock._calls import Failure
from turnleaf.core import EngineError, wait_for_first
from turnleaf.gateway._keys import Call, Record
from turnleaf.gateway._replies import Tell
from turnleaf.gateway._sampler import Prepared
from turnleaf.gateway._turns import Turns
from turnleaf.gateway.engines import (
    EngineLost,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    Stop,
    TokenListener,
    wants_top_p_ids,
)
from turnleaf.gateway.engines._sglang_wire import decode_reply, encode_request
from turnleaf.gateway.protocols import ChatRequest, Choice, Completion, RequestError

TOLD_AT_ONCE = 5
"""So many tokens a stream brings at once."""
HEAD = 100
"""So many bytes the head of a reply counts for."""


@attrs.define(eq=False, repr=False)
class Exchange:
    """One request and what became of it, seen from the client.

    upto: bytes of the body that have arrived; the rest comes with `feed`. takes: bytes of the reply
    after which the client goes away; None for all.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    upto: int | None = None
    takes: int | None = None
    status: int | None = None
    reply: bytearray = attrs.Factory(bytearray)
    left: bool = False
    left_at: float = math.inf
    complete: bool = False
    _loop: Any = None
    _task: "asyncio.Task[None] | None" = None
    _given: int = 0
    _asked: bool = False
    _taken: int = 0
    _changed: asyncio.Event = attrs.Factory(asyncio.Event)

    def __repr__(self) -> str:
        return f"<{self.method} {self.path} {self.status} {bytes(self.reply)[:500]!r}>"

    def start(self, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

        async def run() -> None:
            await app(scope, self._receive, self._send)

        self._loop = loop
        self._task = loop.create_task(run())

    @property
    def asked(self) -> bool:
        """Whether the gateway has had the whole request."""
        return self._asked

    @property
    def delivered(self) -> bool:
        """Whether the client has the whole reply."""
        return self.complete and not self.left

    @property
    def ended(self) -> bool:
        """Whether the gateway is done with it; raises what it failed with."""
        if self._task is None or not self._task.done():
            return False
        self._task.result()
        return True

    def feed(self) -> None:
        """The rest of the body arrives."""
        self.upto = None
        self._changed.set()

    def leave(self) -> None:
        """The client goes away."""
        if not self.complete and not self.left:
            self.left = True
            self.left_at = self._loop.time()
        self._changed.set()

    async def _receive(self) -> dict[str, Any]:
        while True:
            if self.left or self.complete:
                return {"type": "http.disconnect"}
            upto = len(self.body) if self.upto is None else self.upto
            whole = self.upto is None and not self._asked
            if whole or self._given < upto:
                piece, self._given = self.body[self._given : upto], upto
                self._asked = whole
                return {"type": "http.request", "body": piece, "more_body": not whole}
            self._changed.clear()
            await self._changed.wait()

    async def _send(self, message: Any) -> None:
        if self.left:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._take(b"", HEAD)
            return
        await self._take(message.get("body", b""), len(message.get("body", b"")))
        if not self.left and not message.get("more_body", False):
            self.complete = True
            self._changed.set()

    async def _take(self, data: bytes, size: int) -> None:
        self._taken += size
        # Whatever the gateway sent: a client may know it though it did not get the end.
        self.reply += data
        if self.takes is not None and self._taken > self.takes:
            # As under uvicorn: the loss wakes who waits for it first, then who sends.
            self.leave()
            await asyncio.sleep(0)


@attrs.frozen
class ToldChoice:
    """One of the replies that an agent was told. turn_id: what it is recorded as."""

    turn_id: str
    message: dict[str, Any]
    finish_reason: str
    logprobs: list[dict[str, Any]] | None


@attrs.frozen
class Told:
    """What an agent was told, streamed or not."""

    id: str
    choices: tuple[ToldChoice, ...]
    usage: dict[str, Any] | None


def read_reply(exchange: Exchange) -> Told:
    """A whole reply of status 200; fails where it breaks the protocol's form."""
    if not exchange.reply.startswith((b"data:", b":")):
        body = json.loads(exchange.reply)
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
        assert body["object"] == "chat.completion"
        choices = [_told_choice(body["id"], choice) for choice in body["choices"]]
        return Told(body["id"], tuple(choices), body["usage"])
    events = bytes(exchange.reply).split(b"\n\n")
    assert events.pop() == b""
    data = [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")]
    assert data.pop() == b"[DONE]"
    return _joined([json.loads(one) for one in data])


def _told_choice(reply_id: str, choice: dict[str, Any]) -> ToldChoice:
    at, logprobs = choice["index"], choice["logprobs"]
    return ToldChoice(
        f"{reply_id}-{at}" if at else reply_id,
        choice["message"],
        choice["finish_reason"],
        None if logprobs is None else logprobs["content"],
    )


def _joined(chunks: list[dict[str, Any]]) -> Told:
    """A streamed reply as the protocol's clients put it together."""
    usage, pieces = None, dict[int, list[dict[str, Any]]]()
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == chunks[0]["id"]
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    assert sorted(pieces) == list(range(len(pieces)))
    choices = [_told_choice(chunks[0]["id"], _joined_choice(pieces[at])) for at in sorted(pieces)]
    return Told(chunks[0]["id"], tuple(choices), usage)


def _joined_choice(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        delta = piece["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": "", "type": "", "function": {"name": "", "arguments": ""}})
            at = calls[call["index"]]
            at["id"] += call.get("id", "")
            at["type"] += call.get("type", "")
            for name, text in call["function"].items():
                at["function"][name] += text
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    *others, last = pieces
    assert not any(piece["finish_reason"] or piece["logprobs"] for piece in others)
    return {**last, "message": message}


@attrs.define(eq=False)
class Held:
    """An engine call that waits for its answer. parts: what its attempts do, the last one last."""

    request: EngineRequest
    attempts: list[Reply] = attrs.Factory(list)
    released: anyio.Event = attrs.Factory(anyio.Event)

    def release(self, *attempts: Reply) -> None:
        """Answer it; a reply that fails or is dropped is followed by the next attempt."""
        self.attempts = list(attempts)
        self.released.set()


@attrs.define(eq=False)
class HeldEngine:
    """A scripted engine behind SGLang's wire format, which answers when it is told to.

    stopped: what a call does that is stopped while it is held; no attempts when it goes on as if
    nobody had said anything. asked: every request, as it came. outcomes: the last reply to each
    turn, as the gateway read it.
    """

    tokenizer: Tokenizer
    stopped: Callable[[EngineRequest], list[Reply]]
    experts: tuple[int, int] | None = None
    held: list[Held] = attrs.field(init=False, factory=list)
    asked: list[EngineRequest] = attrs.field(init=False, factory=list)
    outcomes: dict[str, EngineReply] = attrs.field(init=False, factory=dict)
    scripted: ScriptedEngine = attrs.field(init=False)
    _next: Reply = attrs.field(init=False, factory=Reply)

    def __attrs_post_init__(self) -> None:
        self.scripted = ScriptedEngine(
            {"*": [lambda *_: self._next]},
            tokenizer=self.tokenizer,
            repeat=True,
            routed_experts_shape=self.experts,
        )

    async def generate(
        self,
        request: EngineRequest,
        *,
        stop: Stop,
        on_tokens: TokenListener | None = None,
    ) -> EngineReply:
        held = Held(request)
        self.held.append(held)
        self.asked.append(request)
        try:
            await wait_for_first(held.released.wait, stop.wait)
            attempts = held.attempts
            if not held.released.is_set():
                attempts = self.stopped(request)
            if not attempts:
                await held.released.wait()
                attempts = held.attempts
        finally:
            self.held.remove(held)
        for number, reply in enumerate(attempts):
            body = await self._attempt(request, reply, number)
            if body is not None:
                answer = decode_reply(
                    body,
                    prompt_length=len(request.input_ids),
                    experts=request.experts,
                    top_p=wants_top_p_ids(request.sampling),
                )
                self.outcomes[request.turn_id] = answer
                for at in range(0, len(answer.output) if on_tokens else 0, TOLD_AT_ONCE):
                    on_tokens(answer.output[at : at + TOLD_AT_ONCE])
                    await asyncio.sleep(0)
                return answer
        if stop.is_set():
            raise EngineLost(request.turn_id)
        raise EngineUnavailable("it failed again and again")

    async def _attempt(self, request: EngineRequest, reply: Reply, number: int) -> bytes | None:
        rid = f"{request.turn_id}.{request.part}.{number}"
        body = orjson.loads(encode_request(request, rid))
        call = EngineCall(
            rid,
            request.routing_key,
            request.input_ids,
            body["sampling_params"],
            experts_from=body.get("routed_experts_start_len"),
        )
        assert body["input_ids"] == request.input_ids.tolist()
        self._next = reply
        outcome = await self.scripted.generate(call)
        if isinstance(outcome, Failure):
            if outcome.status < 500:
                raise EngineError(outcome.message)
            return None
        return None if outcome is None else orjson.dumps(outcome.body)

    async def check(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


@attrs.define(eq=False)
class ObservedTurns:
    """The gateway's turns, and what it made of each request.

    on_choice: is told of each reply when it is in the history. running: requests that are being
    sampled, by their first turn. failures: of the observers.
    """

    turns: Turns
    on_prepared: Callable[[Record, ChatRequest, Prepared | RequestError], None]
    on_choice: Callable[[Record, Prepared, Choice], None]
    on_refused: Callable[[Record, RequestError], None]
    running: dict[str, Prepared] = attrs.Factory(dict)
    failures: list[Exception] = attrs.Factory(list)
    _sample_one: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sample_one = self.turns._sample_one
        self.turns._sample_one = self._observed_choice  # type: ignore[method-assign]  # to look on

    @property
    def body_limit(self) -> int:
        return self.turns.body_limit

    def deliver(self, record: Record, *turn_ids: str) -> None:
        self.turns.deliver(record, *turn_ids)

    async def prepare(
        self, record: Record, request: ChatRequest, call: Call, *, trained: bool
    ) -> Prepared:
        try:
            prepared = await self.turns.prepare(record, request, call, trained=trained)
        except RequestError as error:
            self._tell(self.on_refused, record, error)
            self._tell(self.on_prepared, record, request, error)
            raise
        self._tell(self.on_prepared, record, request, prepared)
        return prepared

    async def sample(
        self, record: Record, prepared: Prepared, call: Call, tell: Tell | None = None
    ) -> Completion:
        self.running[prepared.id] = prepared
        try:
            return await self.turns.sample(record, prepared, call, tell)
        except RequestError as error:
            self._tell(self.on_refused, record, error)
            raise
        finally:
            del self.running[prepared.id]

    async def _observed_choice(
        self, record: Record, prepared: Prepared, *more: Any
    ) -> tuple[Choice, int]:
        choice, cached_tokens = await self._sample_one(record, prepared, *more)
        self._tell(self.on_choice, record, prepared, choice)
        return choice, cached_tokens

    def _tell(self, observer: Callable[..., None], *observed: Any) -> None:
        try:
            observer(*observed)
        except Exception as failure:  # the gateway would make a reply of it
            self.failures.append(failure)
            raise
