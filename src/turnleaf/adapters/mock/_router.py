"""A stand-in for the router in front of engines: as its registry build does it, traps included."""

import socket
import zlib
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import anyio
import attrs
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from turnleaf.gateway._serving import BACKLOG, served

__all__ = ["UNKNOWN_FIELDS", "serve_router"]

UNKNOWN_FIELDS = frozenset(
    {
        "custom_params",
        "return_routed_experts",
        "routed_experts_start_len",
        "spaces_between_special_tokens",
        "structural_tag",
    }
)
"""Request fields that sglang-router 0.3.2 of the registry does not pass on; slime's build does."""


@asynccontextmanager
async def serve_router(
    engines: Sequence[str],
    *,
    drops: Collection[str] = UNKNOWN_FIELDS,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[str]:
    """Serve a router in this event loop until the context is left; yields its URL.

    It has `/generate` (a rollout's calls go to one of the engines, streams are handed on as they
    come), `/workers` and `/health`, and, like the real one, no `/abort_request`. drops: fields that
    it leaves out of requests, of their sampling parameters too. Raises OSError when the port is
    taken.
    """
    listening = socket.create_server((host, port), backlog=BACKLOG)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
        served(_app(_Router(tuple(engines), frozenset(drops), http)), listening),
    ):
        yield f"http://{host}:{listening.getsockname()[1]}"


@attrs.frozen(eq=False)
class _Router:
    engines: tuple[str, ...]
    drops: frozenset[str]
    http: aiohttp.ClientSession

    async def generate(self, request: Request) -> ASGIApp:
        body = orjson.loads(await request.body())
        body = {name: value for name, value in body.items() if name not in self.drops}
        sampling = body.get("sampling_params", {}).items()
        body["sampling_params"] = {n: value for n, value in sampling if n not in self.drops}
        key = request.headers.get("x-smg-routing-key", "")
        engine = self.engines[zlib.crc32(key.encode()) % len(self.engines)]
        forward = self.http.post(
            f"{engine}/generate",
            data=orjson.dumps(body),
            headers={"content-type": "application/json", "x-smg-routing-key": key},
        )

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with anyio.create_task_group() as tasks:

                async def notice_departure() -> None:
                    while (await request.receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(notice_departure)
                await _hand_on(forward, scope, receive, send)
                tasks.cancel_scope.cancel()

        return answer

    async def workers(self, _: Request) -> Response:
        listed = [{"url": url, "is_healthy": True} for url in self.engines]
        body = orjson.dumps({"workers": listed, "total": len(listed)})
        return Response(body, media_type="application/json")

    async def health(self, _: Request) -> Response:
        return Response()


async def _hand_on(
    forward: AbstractAsyncContextManager[aiohttp.ClientResponse],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer with the engine's response as it arrives; one that breaks, breaks here too."""
    begun = False
    try:
        async with forward as response:
            begun = True
            headers = [(b"content-type", response.content_type.encode())]
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers}
            )
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
    except aiohttp.ClientError:
        if not begun:
            await Response(status_code=502)(scope, receive, send)


def _app(router: _Router) -> Starlette:
    return Starlette(
        routes=[
            Route("/generate", router.generate, methods=["POST"]),
            Route("/workers", router.workers),
            Route("/health", router.health),
        ]
    )
