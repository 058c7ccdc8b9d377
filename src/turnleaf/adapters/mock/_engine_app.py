"""The scripted engine on SGLang's wire: `/generate` and what a trainer calls besides."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import anyio
import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from turnleaf.adapters.mock._scripted import Answer, Call, Failure, ScriptedEngine
from turnleaf.gateway._serving import BACKLOG, served

__all__ = ["engine_app", "serve_engine"]

_MAX_BODY = 64 * 2**20  # bytes; ten times the ids of the longest contexts
_MAX_ID = np.iinfo(np.int32).max


class _BrokenOff:
    """An ASGI response that the client sees break: headers, then the end of the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def engine_app(engine: ScriptedEngine) -> Starlette:
    """The ASGI app: `/generate` (unstreamed), `/abort_request`, `/pause_generation`,
    `/continue_generation`, `/health` and `/get_model_info`. It is no router: `/workers` is a 404.
    """

    async def generate(request: Request) -> Any:
        try:
            call = _call(await _json(request), request.headers.get("x-smg-routing-key", ""))
        except ValueError as error:
            return _error(400, str(error))
        outcome = None
        async with anyio.create_task_group() as tasks:

            async def notice_departure() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                call.lose_client()

            tasks.start_soon(notice_departure)
            outcome = await engine.generate(call)
            tasks.cancel_scope.cancel()
        match outcome:
            case Answer(body):
                return _answer(body)
            case Failure(status, message):
                return _error(status, message)
            case _:
                return _BrokenOff()

    async def abort_request(request: Request) -> Response:
        try:
            body = await _json(request)
        except ValueError as error:
            return _error(400, str(error))
        if body.get("abort_all") is True:
            engine.abort_all()
        else:
            engine.abort(str(body.get("rid", "")))
        return Response()

    def then_ok(action: Callable[[], None]) -> Callable[[Request], Any]:
        async def handle(_: Request) -> Response:
            action()
            return Response()

        return handle

    async def get_model_info(_: Request) -> Response:
        return _answer({"model_path": "scripted", "weight_version": engine.weight_version})

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/abort_request", abort_request, methods=["POST"]),
            Route("/pause_generation", then_ok(engine.pause), methods=["POST"]),
            Route("/continue_generation", then_ok(engine.resume), methods=["POST"]),
            Route("/health", then_ok(lambda: None)),
            Route("/get_model_info", get_model_info),
        ]
    )


@asynccontextmanager
async def serve_engine(
    engine: ScriptedEngine, *, host: str = "127.0.0.1", port: int = 0
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
    """The request's body; ValueError when it is too long or no object."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                raise ValueError(f"the body has more than {_MAX_BODY} bytes")
    except ClientDisconnect:
        raise ValueError("the client left before the end of its request") from None
    value = orjson.loads(bytes(body) or b"{}")
    if not isinstance(value, dict):
        raise ValueError("the body is no object")
    return value


def _call(body: dict[str, Any], routing_key: str) -> Call:
    """The call that a body of `/generate` asks for; ValueError when it is not one."""
    if body.get("stream"):
        raise ValueError("stream: the scripted engine answers unstreamed calls only")
    if body.get("return_logprob") is not True:
        raise ValueError("return_logprob: the scripted engine always returns log-probabilities")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids: a list of ids is needed")
    if not all(type(token_id) is int and 0 <= token_id <= _MAX_ID for token_id in ids):
        raise ValueError("input_ids: not all are ids")
    sampling = body.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise ValueError("sampling_params: not an object")
    limit = sampling.get("max_new_tokens", 0)
    if type(limit) is not int or limit < 0:
        raise ValueError(f"sampling_params.max_new_tokens: {limit!r} is not a number of tokens")
    return Call(
        rid=str(body.get("rid", "")),
        routing_key=unquote(routing_key),
        input_ids=np.array(ids, dtype=np.int32),
        sampling=sampling,
    )


def _answer(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _answer({"error": {"message": message}}, status)
