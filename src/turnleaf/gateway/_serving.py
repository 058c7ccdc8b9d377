"""Serving an ASGI app inside a running event loop, on a socket that is already bound."""

import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import anyio
import uvicorn
from starlette.types import ASGIApp

from turnleaf.gateway._bounded_http import BoundedHttpProtocol

__all__ = ["BACKLOG", "allow_connections", "served"]

logger = logging.getLogger(__name__)

BACKLOG = 4096
KEEP_ALIVE = 75
"""Seconds for which an idle connection is kept: fewer lose requests of clients that reuse one."""
ACCEPTED_AT_ONCE = 16
"""Connections that the event loop takes on between two looks at those that it has. uvloop takes on
one for each listening socket: of a thousand agents that come to a busy loop, the last would wait
half a minute."""
SHUTDOWN_GRACE = 3
"""Seconds that requests in flight get to end when the server does."""
_LOOK = 0.005  # seconds between two looks at whether they have
_TICK = 1.0  # seconds for which the date in replies holds
_REFRESHING = 0  # the number of a tick that brings the date up to date


def allow_connections() -> None:
    """Let this process have as many connections as the system lets any have.

    A model call takes two, the agent's and the engine's, and many systems allow a process 1,024
    files in all until it asks for more.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses what it calls unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Server(uvicorn.Server):
    """uvicorn as a part of a program that ends in its own way, not by signals, and at once: uvicorn
    itself looks every tenth of a second for what it waits for."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []
        self._ending = anyio.Event()

    def end(self) -> None:
        """Have `serve` return, once requests in flight have ended or their grace is over."""
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(_REFRESHING):
            with anyio.move_on_after(_TICK):
                await self._ending.wait()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self._stop_listening()  # uvicorn does not where it is cancelled

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop_listening()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with anyio.move_on_after(SHUTDOWN_GRACE) as grace:
            while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                await anyio.sleep(_LOOK)  # the sets tell nobody when they are empty
            for server in self.servers:
                await server.wait_closed()
        if grace.cancelled_caught:
            logger.warning("requests in flight were cut off: %d", len(self.server_state.tasks))
            for task in list(self.server_state.tasks):
                task.cancel()

    def _stop_listening(self) -> None:
        for server in self.servers:
            server.close()


@contextlib.asynccontextmanager
async def served(app: ASGIApp, listening: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on `listening`, which is closed at the end, until the context is left.

    Leaving it lets requests in flight end for a few seconds, then cuts them.
    """
    server = _Server(
        uvicorn.Config(
            app,
            access_log=False,
            backlog=BACKLOG,
            http=BoundedHttpProtocol,
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            ws="none",
        )
    )
    failure: BaseException | None = None
    with listening:
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                with contextlib.ExitStack() as closing:
                    more = [
                        closing.enter_context(listening.dup()) for _ in range(ACCEPTED_AT_ONCE - 1)
                    ]
                    await server.serve(sockets=[listening, *more])

            tasks.start_soon(serve)
            try:
                yield
            except Exception as error:  # noqa: BLE001  # kept, so that no group wraps it
                failure = error
            finally:
                server.end()
    if failure is not None:
        raise failure
