"""Limits on what comes before a request's body."""

import contextlib
import resource
import socket
from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import SocketStream
from starlette.types import Receive, Scope, Send

from tests.waiting import until
from turnleaf.gateway import _bounded_http, _serving
from turnleaf.gateway._serving import allow_connections, served

pytestmark = pytest.mark.anyio


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Repeats a short body; waits for the client to leave when it says so."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
        if body == b"nope":
            break
    if body == b"slow":
        await anyio.sleep(0.2)  # longer than the limit on what is not a reply
    if body == b"wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    headers = [(b"content-length", b"%d" % len(body[:4]))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body[:4]})


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


async def test_a_reply_that_nobody_reads_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_bounded_http, "READ_TIMEOUT", 0.2)
    size, done = 16 * 2**20, anyio.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})
        done.set()

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with (
        served(large, listening),
        await anyio.connect_tcp("127.0.0.1", port) as stream,
    ):
        await stream.send(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        await done.wait()
        await until(lambda: "took too long to read" in caplog.text)
        received = 0
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                received += len(await stream.receive(2**20))
        assert received < size


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
                while not received.endswith(b"bbbb"):
                    received += await stream.receive()


@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
async def test_an_offer_to_upgrade_is_ignored_and_the_body_read(port: int, offered: bytes) -> None:
    head = (
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "
        + offered
        + b"\r\nHTTP2-Settings: AAMAAABkAAQAAP\r\nContent-Length: 4\r\n\r\n"
    )
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for piece in (head[:20], head[20:], b"bo", b"dy"):
            await stream.send(piece)
        received = b""
        with anyio.fail_after(10):
            while not received.endswith(b"body"):
                received += await stream.receive()
    assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_second_request_before_the_answer_ends_the_connection(
    port: int, at_once: bool
) -> None:
    body = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nwait"
    pieces = [body + body] if at_once else [body, body]
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for piece in pieces:
            await stream.send(piece)
        assert await closes(stream)


async def test_a_request_behind_a_body_that_was_refused_is_served(port: int) -> None:
    refused = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nnope"
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(refused)
        assert (await stream.receive()).endswith(b"nope")
        await stream.send(b"nopePOST / HTTP/1.1\r\nHost: x\r\n")
        await stream.send(b"Content-Length: 4\r\n\r\ngood")
        received = b""
        with anyio.fail_after(10):
            while not received.endswith(b"good"):
                received += await stream.receive()


async def test_the_head_behind_a_refused_body_is_limited_too(port: int) -> None:
    refused = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nnope"
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(refused)
        await stream.receive()
        await stream.send(b"nopePOST / HTTP/1.1\r\n")
        sent = 0
        with contextlib.suppress(anyio.BrokenResourceError):
            while sent < 100 * _bounded_http.HEAD_LIMIT:
                await stream.send(b"z: " + b"z" * 65_000)
                sent += 65_000
        assert sent < 100 * _bounded_http.HEAD_LIMIT


async def test_trailers_are_limited(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n"
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(head)
        sent = 0
        with contextlib.suppress(anyio.BrokenResourceError):
            while sent < 100 * _bounded_http.HEAD_LIMIT:
                await stream.send(b"z: " + b"z" * 1000 + b"\r\n")
                sent += 1005
        assert sent < 100 * _bounded_http.HEAD_LIMIT


async def test_the_rest_of_a_refused_body_is_not_waited_for_long(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nnope"
    monkeypatch.setattr(_bounded_http, "HEAD_TIMEOUT", 0.1)
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(refused)
        assert (await stream.receive()).endswith(b"nope")
        await stream.send(b"n")
        assert await closes(stream)


async def test_a_stray_line_feed_does_not_end_a_reply_that_takes_its_time(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bounded_http, "HEAD_TIMEOUT", 0.05)
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nslow\r\n")
        with anyio.fail_after(10):
            assert (await stream.receive()).endswith(b"slow")


def test_a_busy_loop_takes_on_many_connections_at_once() -> None:
    """As a worker's, which is uvloop's."""
    clients = 64
    rounds = 0

    async def served_between_rounds() -> None:
        nonlocal rounds
        served_requests = 0

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal served_requests
            served_requests += 1
            await answer(scope, receive, send)

        listening = socket.create_server(("127.0.0.1", 0), backlog=clients)
        address = listening.getsockname()
        async with served(count, listening):
            with contextlib.ExitStack() as connections:
                for _ in range(clients):
                    client = connections.enter_context(socket.create_connection(address))
                    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while served_requests < clients:
                    rounds += served_requests > 0
                    await anyio.lowlevel.checkpoint()

    anyio.run(served_between_rounds, backend_options={"use_uvloop": True})
    assert rounds < clients // 2


def test_a_worker_may_have_as_many_connections_as_the_system_allows() -> None:
    given, most = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (given // 2, most))
    try:
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_request_in_flight_is_answered_at_the_end() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        begun = anyio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            await answer(scope, receive, send)

        async with served(app, listening):
            await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nslow")
            await begun.wait()
        with anyio.fail_after(10):
            assert (await stream.receive()).endswith(b"slow")


async def test_a_request_that_does_not_end_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_serving, "SHUTDOWN_GRACE", 0.05)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    begun, cut = anyio.Event(), anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            cut.set()

    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        with anyio.fail_after(10):
            async with served(app, listening):
                await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await begun.wait()
            await cut.wait()
    assert "requests in flight were cut off: 1" in caplog.text


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_nobody_is_listened_to_once_it_is_cancelled(use_uvloop: bool) -> None:
    async def serve_and_cancel() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        address = listening.getsockname()
        with anyio.CancelScope() as scope:
            async with served(answer, listening):
                async with await anyio.connect_tcp(*address) as stream:
                    await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    await stream.receive()
                scope.cancel()
        await anyio.lowlevel.checkpoint()  # uvloop closes sockets in its next round
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()

    anyio.run(serve_and_cancel, backend_options={"use_uvloop": use_uvloop})
