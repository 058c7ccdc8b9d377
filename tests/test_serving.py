"""Limits on what comes before a request's body."""

import contextlib
import socket
from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import SocketStream
from starlette.types import Receive, Scope, Send

from turnleaf.gateway import _bounded_http
from turnleaf.gateway._serving import served

pytestmark = pytest.mark.anyio


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


@pytest.fixture
async def port(anyio_backend: str) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    async with served(answer, listening):
        yield port


async def closes(stream: SocketStream) -> bool:
    """Whether the server ends the connection without an answer."""
    try:
        with anyio.fail_after(10):
            await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return True
    return False


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 99, b"GET /" + b"a" * 99])
async def test_a_head_without_end_is_cut_off(port: int, head: bytes) -> None:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(head)
        sent = 0
        with contextlib.suppress(anyio.BrokenResourceError):
            while sent < 100 * _bounded_http.HEAD_LIMIT:
                await stream.send(b"z: " + b"z" * 65_000)
                sent += 65_000
        assert sent < 100 * _bounded_http.HEAD_LIMIT


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n"])
async def test_a_head_that_takes_too_long_is_cut_off(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bounded_http, "HEAD_TIMEOUT", 0.1)
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        if sent:
            await stream.send(sent)
        assert await closes(stream)


async def test_a_large_body_and_requests_one_after_another_are_no_long_head(port: int) -> None:
    body = b"b" * (4 * _bounded_http.HEAD_LIMIT)
    request = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for _ in range(3):
            await stream.send(request)
            received = b""
            with anyio.fail_after(10):
                while b"fine" not in received:
                    received += await stream.receive()
