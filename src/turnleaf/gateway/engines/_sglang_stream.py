"""A streamed reply of SGLang, event by event.

Facts, from SGLang 0.5.15 and 0.5.23. An event is a line `data: {…}` in the shape of an unstreamed
reply, the last one `data: [DONE]`. With `--incremental-streaming-output` an event's
`output_token_logprobs` are those of its own tokens, without it those of all tokens until then;
`completion_tokens` counts all tokens either way, which tells the two apart. A call that is aborted
while it waits to be taken up again lists all of them in its last event, whatever the server's
setting. Only the last event has a `finish_reason`, the `weight_versions` and the counts of
speculation. A refused request is an event `{"error": {"message", "code"}}` behind a status of 200,
and a failure of the scheduler an "abort" with a `status_code`.
"""

import math
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import attrs
import numpy as np
import orjson

from turnleaf.core import Logprobs, TokenIds
from turnleaf.gateway.engines._base import EngineReply, EngineRequest
from turnleaf.gateway.engines._connections import read_body
from turnleaf.gateway.engines._sglang_fields import member, shown, untrusted
from turnleaf.gateway.engines._sglang_wire import (
    check_prompt,
    one_line,
    read_entries,
    read_reply,
    reply_limit,
    weight_version,
)

__all__ = ["ReplyStream", "StreamError"]

_MAX_EVENT = 32 * 2**20  # bytes; a cumulative one of 100,000 tokens takes about 6 MB
_NOTHING_TO_US = (b"", b"event", b"id", b"retry")  # empty lines, comments, the protocol's own
_COLLECT = 0.1  # seconds; the cost of a token follows how many are read at once
_TRAILER_TIME = 0.2  # seconds for what follows the reply, so that its connection can be used again


class StreamError(Exception):
    """An event said that the call failed, before any token. status: as HTTP would have it."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status
        self.said = said


@attrs.define(eq=False)
class ReplyStream:
    """Joins a stream's events into one reply, and tells the new ids of what arrives together.

    tell: gets int32[n], n > 0, of ids whose log-probabilities and counts fit.

    on_cumulative: is called once, when the server turns out not to stream incrementally.

    cumulative: whether it was. sampled: how many tokens there are so far. finished: the reply is
    complete.
    """

    _request: EngineRequest
    _tell: Callable[[TokenIds], None]
    _on_cumulative: Callable[[], None]
    sampled: int = attrs.field(init=False, default=0)
    cumulative: bool = attrs.field(init=False, default=False)
    _broken: bool = attrs.field(init=False, default=False)
    _unread: list[Any] = attrs.field(init=False, factory=list)
    """Log-probability entries of the last `sampled` tokens, which are still to be checked."""
    _outputs: list[TokenIds] = attrs.field(init=False, factory=list)
    _logprobs: list[Logprobs] = attrs.field(init=False, factory=list)
    _spans: list[dict[str, Any]] = attrs.field(init=False, factory=list)
    _meta: dict[str, Any] = attrs.field(init=False, factory=dict)
    _finish: dict[str, Any] | None = attrs.field(init=False, default=None)
    _line: bytearray = attrs.field(init=False, factory=bytearray)

    @property
    def finished(self) -> bool:
        return self._finish is not None

    @property
    def _over(self) -> bool:
        return self.finished or self._broken

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Take every event until the reply is complete or the stream ends.

        Raises UntrustedReply for what does not add up or is too large, StreamError, and what a
        broken connection raises.
        """
        with anyio.CancelScope() as reading:

            def take(chunk: bytes) -> None:
                self.feed(chunk)
                if self._over and math.isinf(reading.deadline):
                    reading.deadline = anyio.current_time() + _TRAILER_TIME

            await read_body(response, take, limit=reply_limit(self._request), collect=_COLLECT)

    def feed(self, chunk: bytes) -> None:
        """Take what arrived, unless all is there that matters; see `read`."""
        if self._over:
            return
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = bytes(self._line + lines[0])
            self._line.clear()
        for line in lines:
            self._take_line(line.strip())
            if self._over:
                break
        self._read_on()
        if self._over:
            return
        self._line += rest
        if len(self._line) > _MAX_EVENT:
            raise untrusted(f"an event of its stream has more than {_MAX_EVENT} bytes")

    def reply(self) -> EngineReply:
        """What an unstreamed call would have been answered; raises UntrustedReply.

        Where the stream broke off, what was received until then, as the part of a call that the
        engine aborted, each event's with the version of the weights that it names.
        """
        meta, finish = self._meta, self._finish
        if finish is None:
            meta, finish = {**meta, "weight_versions": self._spans}, {"type": "abort"}
        return read_reply(
            meta,
            finish,
            _joined(self._outputs, np.int32),
            _joined(self._logprobs, np.float32),
            prompt_length=len(self._request.input_ids),
        )

    def _take_line(self, line: bytes) -> None:
        name, _, data = line.partition(b":")
        if name in _NOTHING_TO_US:
            return
        if name != b"data":
            raise untrusted("its stream has a line that is no event")
        if data.strip() == b"[DONE]":
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise untrusted(f"an event of its stream is not JSON ({error})") from None
        if isinstance(event, dict) and "error" in event:
            self._fail(event["error"])
        else:
            self._take_event(member(event, "meta_info", "an event of its stream"))

    def _take_event(self, meta: dict[str, Any]) -> None:
        finish = meta.get("finish_reason")
        if not isinstance(finish, dict | None):
            raise untrusted(f"finish_reason is {shown(finish)}")
        aborted = finish is not None and finish.get("type") == "abort"
        new = self._new(meta, aborted=aborted)
        if new:
            check_prompt(meta, len(self._request.input_ids))
            self._note_weights(weight_version(meta), self.sampled + len(new))
            self._unread += new
            self.sampled += len(new)
        self._meta = meta
        if finish is None:
            return
        self._read_on()
        status = finish.get("status_code") if aborted else None
        if type(status) is int and status >= 400 and not self.sampled:
            raise StreamError(status, one_line(finish))
        self._finish = finish

    def _read_on(self) -> None:
        """Read and tell what is unread."""
        if self._unread:
            first = self.sampled - len(self._unread)
            ids, logprobs = read_entries(self._unread, first=first)
            self._unread = []
            self._outputs.append(ids)
            self._logprobs.append(logprobs)
            self._tell(ids)

    def _note_weights(self, version: Any, end: int) -> None:
        if self._spans and self._spans[-1]["version"] == version:
            self._spans[-1]["end"] = end
        else:
            self._spans.append({"version": version, "start": self.sampled, "end": end})

    def _new(self, meta: dict[str, Any], *, aborted: bool) -> list[Any]:
        """The entries that the event has beyond those before."""
        entries, total = meta.get("output_token_logprobs"), meta.get("completion_tokens")
        if aborted and entries is None and total in (None, 0, self.sampled):
            return []
        if not isinstance(entries, list):
            raise untrusted(f"output_token_logprobs is {shown(entries)}, not a list")
        if type(total) is int and total == self.sampled + len(entries):
            return entries
        if type(total) is not int or not self.sampled <= total == len(entries):
            raise untrusted(
                f"completion_tokens is {shown(total)}, but there are {len(entries)} "
                f"log-probabilities behind {self.sampled}"
            )
        if not (aborted or self.cumulative):
            self.cumulative = True
            self._on_cumulative()
        self._read_on()
        ids, _ = read_entries(entries)
        if not np.array_equal(ids[: self.sampled], _joined(self._outputs, np.int32)):
            raise untrusted("an event of its stream contradicts the ones before")
        return entries[self.sampled :]

    def _fail(self, error: Any) -> None:
        if self.sampled:
            self._broken = True
            return
        code = error.get("code") if isinstance(error, dict) else None
        raise StreamError(code if type(code) is int else 500, one_line(error))


def _joined(arrays: list[Any], dtype: type[np.generic]) -> Any:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
