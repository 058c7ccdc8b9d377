"""A mock engine on SGLang's wire: `/generate` and what a trainer and a gateway call besides."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anyio
import attrs
import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from turnleaf.adapters.mock._calls import Answer, Call, Failure, MockEngine, Outcome
from turnleaf.core import ContractError
from turnleaf.gateway._serving import BACKLOG, served

__all__ = ["engine_app", "serve_engine"]

_MAX_BODY = 64 * 2**20  # bytes; ten times the ids of the longest contexts
_MAX_ID = np.iinfo(np.int32).max


class _BrokenOff:
    """An ASGI response that the client sees break: headers, then the end of the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


@attrs.define
class _EventStream:
    """A response of SGLang's events, which breaks off unless `end` is called."""

    _send: Send
    begun: bool = attrs.field(init=False, default=False)

    async def send(self, body: dict[str, Any]) -> None:
        await self._chunk(b"data: " + orjson.dumps(body) + b"\n\n", more=True)

    async def end(self, body: dict[str, Any]) -> None:
        await self.send(body)
        await self._chunk(b"data: [DONE]\n\n", more=False)

    async def _chunk(self, chunk: bytes, *, more: bool) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})


def engine_app(engine: MockEngine) -> Starlette:
    """The ASGI app: `/generate`, `/abort_request`, `/pause_generation` (with SGLang's
    modes "abort" and "retract"), `/continue_generation`, `/update_weights_from_disk`, `/health`,
    `/get_model_info`, `/server_info` and `/v1/loads`. It is no router: `/workers` is a 404.
    """
    handlers = _Handlers(engine)
    return Starlette(
        routes=[
            Route("/generate", handlers.generate, methods=["POST"]),
            Route("/abort_request", handlers.abort_request, methods=["POST"]),
            Route("/pause_generation", handlers.pause_generation, methods=["POST"]),
            Route("/continue_generation", handlers.continue_generation, methods=["POST"]),
            Route("/update_weights_from_disk", handlers.update_weights_from_disk, methods=["POST"]),
            Route("/health", handlers.health),
            Route("/get_model_info", handlers.get_model_info),
            Route("/server_info", handlers.server_info),
            Route("/v1/loads", handlers.loads),
        ],
        exception_handlers={_BadRequestError: _refused},
    )


class _BadRequestError(Exception):
    """A request that is refused with a 400."""


async def _refused(_: Request, error: Exception) -> Response:
    return _error(400, str(error))


@attrs.frozen
class _Handlers:
    engine: MockEngine
    running: list[Call] = attrs.field(init=False, factory=list)

    async def generate(self, request: Request) -> Any:
        body = await _json(request)
        call = _call(body, request.headers.get("x-smg-routing-key", ""))
        if not body.get("stream"):
            return _respond(await self._outcome(request, call))
        if self.engine.streaming is None:
            raise _BadRequestError("stream: this engine answers unstreamed calls only")

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            events = _EventStream(send)
            call.tell = events.send
            outcome = await self._outcome(request, call)
            if isinstance(outcome, Failure) and outcome.status == 400:
                outcome = Answer({"error": {"message": outcome.message, "code": 400}})
            if isinstance(outcome, Answer):
                await events.end(outcome.body)
            elif not events.begun:
                await _respond(outcome)(scope, receive, send)

        return stream

    async def _outcome(self, request: Request, call: Call) -> Outcome:
        outcome = None
        self.running.append(call)
        try:
            async with anyio.create_task_group() as tasks:

                async def notice_departure() -> None:
                    while (await request.receive())["type"] != "http.disconnect":
                        pass
                    call.lose_client()

                tasks.start_soon(notice_departure)
                outcome = await self.engine.generate(call)
                tasks.cancel_scope.cancel()
        finally:
            self.running.remove(call)
        return outcome

    async def abort_request(self, request: Request) -> Response:
        body = await _json(request)
        if body.get("abort_all") is True:
            self.engine.abort_all()
        else:
            self.engine.abort(str(body.get("rid", "")))
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        mode = (await _json(request)).get("mode", "abort")
        if mode not in ("abort", "retract"):
            raise _BadRequestError(f"mode: {mode!r} is neither 'abort' nor 'retract'")
        self.engine.pause(abort=mode == "abort")
        return Response()

    async def continue_generation(self, _: Request) -> Response:
        self.engine.resume()
        return Response()

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await _json(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not isinstance(version, str | None):
            raise _BadRequestError("model_path or weight_version: not a path or not a name")
        try:
            await self.engine.update_weights(Path(path), version)
        except ContractError as error:
            return _answer({"success": False, "message": str(error)}, 400)
        return _answer({"success": True, "message": "the weights are updated"})

    async def health(self, _: Request) -> Response:
        return Response()

    async def get_model_info(self, _: Request) -> Response:
        engine = self.engine
        return _answer({"model_path": engine.model_path, "weight_version": engine.weight_version})

    async def server_info(self, _: Request) -> Response:
        incremental = self.engine.streaming == "incremental"
        return _answer({"incremental_streaming_output": incremental})

    async def loads(self, _: Request) -> Response:
        running = sum(not (call.aborted or call.gone) for call in self.running)
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 0}
        return _answer({"loads": [load]})


@asynccontextmanager
async def serve_engine(
    engine: MockEngine, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve the engine in this event loop until the context is left; yields its URL.

    Leaving aborts every call. Raises OSError when the port is taken.
    """
    listening = socket.create_server((host, port), backlog=BACKLOG)
    async with served(engine_app(engine), listening):
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            engine.abort_all()


async def _json(request: Request) -> dict[str, Any]:
    """The request's body; _BadRequestError when it is too long or no object."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                raise _BadRequestError(f"the body has more than {_MAX_BODY} bytes")
    except ClientDisconnect:
        raise _BadRequestError("the client left before the end of its request") from None
    try:
        value = orjson.loads(bytes(body) or b"{}")
    except orjson.JSONDecodeError as error:
        raise _BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _BadRequestError("the body is no object")
    return value


def _call(body: dict[str, Any], routing_key: str) -> Call:
    """The call that a body of `/generate` asks for; _BadRequestError when it is not one."""
    if body.get("return_logprob") is not True:
        raise _BadRequestError("return_logprob: this engine always returns log-probabilities")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise _BadRequestError("input_ids: a list of ids is needed")
    if not all(type(token_id) is int and 0 <= token_id <= _MAX_ID for token_id in ids):
        raise _BadRequestError("input_ids: not all are ids")
    sampling = body.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise _BadRequestError("sampling_params: not an object")
    limit = sampling.get("max_new_tokens", 0)
    if type(limit) is not int or limit < 0:
        raise _BadRequestError(
            f"sampling_params.max_new_tokens: {limit!r} is not a number of tokens"
        )
    tag = sampling.get("structural_tag")
    if tag is not None and not _is_object(tag):
        raise _BadRequestError("sampling_params.structural_tag: it cannot be read")
    start = body.get("logprob_start_len", -1)
    if type(start) is not int or start not in (-1, 0):
        raise _BadRequestError(f"logprob_start_len: {start!r} is neither -1 nor 0")
    experts_from = body.get("routed_experts_start_len", 0)
    if type(experts_from) is not int or not 0 <= experts_from <= len(ids):
        raise _BadRequestError(
            f"routed_experts_start_len: {experts_from!r} is no position of the prompt"
        )
    return Call(
        rid=str(body.get("rid", "")),
        routing_key=unquote(routing_key),
        input_ids=np.array(ids, dtype=np.int32),
        sampling=sampling,
        logprob_start_len=start,
        experts_from=experts_from if body.get("return_routed_experts") is True else None,
    )


def _is_object(text: Any) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _respond(outcome: Outcome) -> Any:
    """The ASGI response to an unstreamed call."""
    match outcome:
        case Answer(body):
            return _answer(body)
        case Failure(status, message):
            return _error(status, message)
        case _:
            return _BrokenOff()


def _answer(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _answer({"error": {"message": message}}, status)
