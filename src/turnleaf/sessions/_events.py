"""The last event of a text/event-stream, in memory of one event."""

import codecs

__all__ = ["EventTooLarge", "LastEvent"]


class EventTooLarge(Exception):
    """An event has more bytes than allowed."""


class LastEvent:
    """Keeps the data of the last event of a stream that arrives in pieces.

    max_bytes: of one event; `feed` raises EventTooLarge beyond. Format: the WHATWG's «Server-sent
    events», except that a last event without its blank line counts: whatever a cut stream ends
    with must not let the event before it pass for the last.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._last: bytes | None = None
        self._is_first_line = True

    def feed(self, piece: bytes) -> None:
        half_ended = self._line.endswith(b"\r")
        self._line += piece
        if half_ended or b"\n" in piece or b"\r" in piece:
            lines = bytes(self._line).splitlines(keepends=True)
            # A carriage return may be the first half of a line end.
            self._line = bytearray() if lines[-1].endswith(b"\n") else bytearray(lines.pop())
            for line in lines:
                self._take(line.rstrip(b"\r\n"))
        if self._size + len(self._line) > self._max_bytes:
            raise EventTooLarge

    def finish(self) -> bytes | None:
        """The data of the last event, its lines joined; None when there was none."""
        self._take(bytes(self._line).rstrip(b"\r"))
        self._take(b"")
        return self._last

    def _take(self, line: bytes) -> None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(codecs.BOM_UTF8)
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(line)
                if self._size > self._max_bytes:
                    raise EventTooLarge
        elif self._data:
            self._last = b"\n".join(self._data)
            self._data, self._size = [], 0
