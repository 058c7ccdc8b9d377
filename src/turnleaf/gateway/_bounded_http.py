"""uvicorn's HTTP protocol for clients that are not trusted.

uvicorn limits neither the size of a request's head nor the time that it may take, and a head is
read before any key can be checked. Its parser stops at a head that offers an upgrade, as Java's
HTTP client does on every first request, and the request's body is lost. And it stops listening to a
client that sends a second request before the first is answered, so that a disconnect goes unseen.
"""

import re
from asyncio import TimerHandle, Transport
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_LIMIT", "HEAD_TIMEOUT", "BoundedHttpProtocol"]

HEAD_LIMIT = 64 * 1024
"""Bytes of a request line with its headers."""
HEAD_TIMEOUT = 30.0
"""Seconds from a connection's start, or a head's first byte, until the head is complete."""

_TOO_EARLY = "it sent a request before the one before was answered"
_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"(?<=\r\n)(?:upgrade|http2-settings)[ \t]*:.*?\r\n", re.IGNORECASE)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Hands complete heads of limited size to the parser, without offers to upgrade.

    A connection is closed when its head is too large or too slow, and when it sends a request
    before the one before is answered.
    """

    _head: bytearray | None
    _head_timer: TimerHandle | None = None
    _handed_over = False
    _loose_bytes: int | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = bytearray()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._start_timer()
            self._head += data
            self._head = self._head.lstrip(b"\r\n")
            end = self._head.find(_END)
            if end > HEAD_LIMIT or (end < 0 and len(self._head) > HEAD_LIMIT):
                self._give_up("its request's head is too large")
            if end < 0 or self.transport.is_closing():
                return
            if self._is_answering():
                self._give_up(_TOO_EARLY)
                return
            head, body = self._head[: end + len(_END)], self._head[end + len(_END) :]
            data = _UPGRADE.sub(b"", bytes(head)) + bytes(body)
            self._head, self._handed_over = None, True
        super().data_received(data)
        if self._loose_bytes is not None:
            self._loose_bytes += len(data)
            if self._loose_bytes > HEAD_LIMIT:
                self._give_up("its request's head is too large")

    def on_message_begin(self) -> None:
        if not self._handed_over:
            # Right behind the body of a request that was answered before it had arrived.
            if self._is_answering():
                self._give_up(_TOO_EARLY)
                raise ValueError(_TOO_EARLY)  # ends the parsing
            self._head, self._loose_bytes = None, 0
            self._start_timer()
        self._handed_over = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._loose_bytes = None
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = bytearray()

    def _is_answering(self) -> bool:
        latest = cast("RequestResponseCycle | None", self.cycle)  # there is none at first
        return latest is not None and not latest.response_complete

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                HEAD_TIMEOUT, self._give_up, "its request's head took too long"
            )

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self, why: str) -> None:
        self.logger.warning("a connection was closed: %s", why)
        self.transport.abort()
