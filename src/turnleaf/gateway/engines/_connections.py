"""HTTP towards engines and routers: connections that notice a lost host, and sizes with a limit."""

import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import anyio
import attrs

from turnleaf.gateway.engines._base import UntrustedReply

__all__ = ["BROKEN", "Connections", "Response", "describe", "read_body", "read_whole"]

_CONNECT_TIMEOUT = 10.0  # seconds
# SGLang's server closes a connection that was idle for 5 s; a call sent into that moment is lost.
_KEEP_IDLE = 4.0
_MAX_CONTROL_REPLY = 2**20
_MUCH = 2**14  # bytes; behind so many, more is read at once, lest its sender has to wait
_SHARE_OF_TIME = 0.05  # of the time that a body takes
_SHORTEST_PAUSE = 0.002  # seconds

BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""What is raised when an exchange does not come to its end."""


@attrs.frozen
class Response:
    """A whole response."""

    status: int
    body: bytes


class Connections:
    """Belongs to the event loop that first uses it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def exchange(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit: int = _MAX_CONTROL_REPLY,
    ) -> Response:
        """Send a request and read the whole response.

        Raises UntrustedReply when that has more than `limit` bytes, and what BROKEN lists.
        """
        async with self.opened(method, url, body=body, headers=headers) as response:
            return await read_whole(response, limit=limit)

    def opened(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request; the response's body is still to be read, or its connection is closed."""
        headers = {**(headers or {}), "Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        return self._client().request(
            method, url, data=body, headers=headers, allow_redirects=False
        )

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,  # a call that queued here would hold up its rollout unseen
                    keepalive_timeout=_KEEP_IDLE,
                    socket_factory=_watched_socket,
                ),
                # Sampling takes as long as it takes; the rollout's own time limit ends it.
                timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def read_whole(response: aiohttp.ClientResponse, *, limit: int) -> Response:
    """Raises as `read_body` does."""
    chunks: list[bytes] = []
    await read_body(response, chunks.append, limit=limit)
    return Response(response.status, b"".join(chunks))


async def read_body(
    response: aiohttp.ClientResponse,
    take: Callable[[bytes], None],
    *,
    limit: int,
    collect: float = 0.0,
) -> None:
    """Hand over the body as it arrives; raises UntrustedReply when it has more than `limit`
    bytes.

    collect: seconds for which what arrives in small pieces is left to the kernel, at most, between
    two times that it is read. It is less for a body that has only begun, so that its end is never
    noticed much later than it might have been.
    """
    received = 0
    began = time.monotonic()
    async for chunk in response.content.iter_any():
        received += len(chunk)
        if received > limit:
            raise UntrustedReply(f"{response.url.origin()} sent a reply of more than {limit} bytes")
        take(chunk)
        pause = min(collect, _SHARE_OF_TIME * (time.monotonic() - began))
        if pause > _SHORTEST_PAUSE and len(chunk) < _MUCH:
            await _leave(response, pause)


async def _leave(response: aiohttp.ClientResponse, pause: float) -> None:
    """Read nothing for a while, unless all is there."""
    transport = None if response.connection is None else response.connection.transport
    if transport is None:
        return
    # Each piece that is read wakes the event loop, which costs more than all that is done with it.
    transport.pause_reading()
    await anyio.sleep(pause)
    if not transport.is_closing():
        transport.resume_reading()


def describe(error: BaseException | None) -> str:
    """An error in one line; some have no text."""
    # These quote what an engine sent that does not speak HTTP.
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):
        return type(error).__name__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _watched_socket(address: Any) -> socket.socket:
    """A socket that notices within a minute that the other host is gone: no limit is set on how
    long a reply may take, and a host that loses power closes nothing."""
    family, kind, protocol, _, _ = address
    watched = socket.socket(family, kind, protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has no TCP_KEEPIDLE
            watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return watched
