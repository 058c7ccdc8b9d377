"""uvicorn's HTTP protocol for clients that are not trusted.

uvicorn limits neither the size of a request's head nor the time that it may take, and a head is
read before any key can be checked. Its parser stops at a head that offers an upgrade, as Java's
HTTP client does on every first request, and the request's body is lost. And it stops listening to a
client that sends a second request before the first is answered, so that a disconnect goes unseen.
It waits for ever for a client that does not read its reply, and holds the reply for as long.
"""

import re
from asyncio import TimerHandle, Transport
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_LIMIT", "HEAD_TIMEOUT", "READ_TIMEOUT", "BoundedHttpProtocol"]

HEAD_LIMIT = 64 * 1024
"""Bytes of a request line with its headers."""
HEAD_TIMEOUT = 30.0
"""Seconds from a connection's start, or a head's first byte, until the head is complete; and from
the refusal of a request until the rest of its body has arrived."""
READ_TIMEOUT = 60.0
"""Seconds in which a client must have read its reply, apart from what the kernel holds of it."""

_TOO_LARGE = "its request's head is too large"
_TOO_EARLY = "it sent a request before the one before was answered"
_ONE_READ = 2**18  # bytes that arrive at once, at most
_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\n(?:upgrade|http2-settings)[ \t]*:.*?(?=\r\n)", re.IGNORECASE)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Hands complete heads of limited size to the parser, without offers to upgrade.

    A connection is closed when its head is too large or too slow, and when it sends a request
    before the one before is answered.
    """

    _head: bytes | None
    """What has arrived of a head; None while a request is being parsed."""
    _handed_over = False
    """The parser is to begin with the head that it was given."""
    _stray_bytes: int | None = None
    """Of a head that began behind the rest of a refused body; None when there is none."""
    _in_head = False
    """The parser has begun with a head and not come to its end."""
    _trailer_bytes = 0
    _timer: TimerHandle | None = None
    _unread: TimerHandle | None = None
    """Ends a connection whose client has not read its reply by then."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # TCP's always is one
        super().connection_made(transport)
        self._head = b""
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head = (self._head + data).lstrip(b"\r\n")
            if not self._head:
                return
            self._unset_keepalive_if_required()
            self._start_timer()
            end = self._head.find(_END)
            if max(end, len(self._head) if end < 0 else 0) > HEAD_LIMIT:
                self._give_up(_TOO_LARGE)
            if end < 0 or self.transport.is_closing():
                return
            if self._is_answering():
                self._give_up(_TOO_EARLY)
                return
            data, self._head, self._handed_over = self._head, None, True
            if _UPGRADE.search(data, 0, end + len(_END)):
                # Rare, and the body, which may be long, is copied.
                head, body = data[: end + len(_END)], data[end + len(_END) :]
                data = _UPGRADE.sub(b"", head) + body
        super().data_received(data)
        if self._stray_bytes is not None:
            self._stray_bytes += len(data)
            if self._stray_bytes > HEAD_LIMIT + _ONE_READ:
                self._give_up(_TOO_LARGE)

    def on_message_begin(self) -> None:
        if not self._handed_over:
            if self._is_answering():
                self._give_up(_TOO_EARLY)
                raise ValueError(_TOO_EARLY)  # ends the parsing
            # It came in one read with the end of a body that had been refused.
            self._head, self._stray_bytes = None, 0
            self._start_timer()
        self._handed_over, self._in_head, self._trailer_bytes = False, True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._trailer_bytes += len(name) + len(value)
            if self._trailer_bytes > HEAD_LIMIT:
                self._give_up(_TOO_LARGE)
                raise ValueError(_TOO_LARGE)  # ends the parsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._stray_bytes = False, None
        self._stop_timer()
        if not self.transport.get_write_buffer_size():
            self._stop_waiting_for_reader()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_timer()
        self._head = b""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head is None:
            # Refused before its body had arrived; the rest is nothing to wait for long.
            self._start_timer()
        if self.transport.get_write_buffer_size():
            self._wait_for_reader()

    def _is_answering(self) -> bool:
        latest = cast("RequestResponseCycle | None", self.cycle)  # there is none at first
        return latest is not None and not latest.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(
                HEAD_TIMEOUT, self._give_up, "its request took too long to arrive"
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for_reader(self) -> None:
        self._stop_waiting_for_reader()
        self._unread = self.loop.call_later(READ_TIMEOUT, self._end_unread)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _end_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self._give_up("its client took too long to read a reply")

    def _give_up(self, why: str) -> None:
        self.logger.warning("a connection was closed: %s", why)
        self.transport.abort()
