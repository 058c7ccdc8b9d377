"""uvicorn's HTTP protocol with limits on what comes before a request's body.

uvicorn limits neither the size of a request's head nor the time that it may take, and a head is
read before any key can be checked.
"""

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_LIMIT", "HEAD_TIMEOUT", "BoundedHttpProtocol"]

HEAD_LIMIT = 64 * 1024
"""Bytes of a request line with its headers."""
HEAD_TIMEOUT = 30.0
"""Seconds from the first byte of a connection or request until its headers are complete."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request head is too large or takes too long."""

    _head_size = 0
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Only what arrives while no head is complete counts: the rest is body, limited elsewhere.
        if self._head_timer is not None:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self._give_up()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_complete()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_size = 0
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _head_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self.logger.warning("a connection was closed: its request's head is too large or too slow")
        self.transport.abort()
