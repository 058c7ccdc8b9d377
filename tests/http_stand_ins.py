"""Stand-ins for engines and routers that speak HTTP."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from aiohttp import web

__all__ = ["serve", "silent"]


@asynccontextmanager
async def serve(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Serve the routes; the URL of whoever does."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def silent(asked: anyio.Event) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that never answers; it sets `asked` when a request has come."""

    async def handle(_: web.Request) -> web.StreamResponse:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    return handle
