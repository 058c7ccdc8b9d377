"""What both listeners share: reading bounded bodies and answering in JSON."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from turnleaf.gateway.protocols import RequestError

__all__ = ["bearer", "decoded", "guarded", "json_response", "not_served", "read_body", "read_json"]

BODY_LIMIT = 32 * 1024 * 1024
"""Bytes of a request body, at most."""
BODY_TIMEOUT = 60.0
"""Seconds in which a request body must arrive."""


async def read_json(request: Request, *, limit: int = BODY_LIMIT) -> Any:
    """The decoded body. Raises RequestError as `read_body` and `decoded` do."""
    return decoded(await read_body(request, limit=limit))


async def read_body(request: Request, *, limit: int = BODY_LIMIT) -> bytes:
    """The body. Raises RequestError for one of more than `limit` bytes, or too slow."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):  # a fraction of what a scope of anyio costs
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size > limit:
                    raise RequestError(
                        413, f"the request body is larger than {limit} bytes", code="too_large"
                    )
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(
            408,
            f"the request body did not arrive within {BODY_TIMEOUT:.0f} seconds",
            code="too_slow",
        ) from None
    return b"".join(chunks)


def decoded(body: bytes) -> Any:
    """What a body says. Raises RequestError when that is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(
            400, f"the request body is not JSON: {error}", code="invalid_json"
        ) from None


def bearer(request: Request) -> str | None:
    """The key of a request, from either header that clients put it in."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response whose body is `value` as JSON."""
    return Response(
        orjson.dumps(value), status_code=status, headers=headers, media_type="application/json"
    )


def not_served(what_is: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answers a path or method that an app does not have, in the protocol's shape.

    what_is: what the app does serve.
    """

    async def answer(request: Request, _: Exception) -> Response:
        error = RequestError(
            404,
            f"{request.method} {request.url.path} is not served: {what_is}",
            code="not_found",
        )
        return json_response(error.body(), error.status)

    return answer


def guarded(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint, answering a RequestError in the protocol's shape."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)  # to nobody
        except RequestError as error:
            return json_response(error.body(), error.status, error.headers())

    return answer
