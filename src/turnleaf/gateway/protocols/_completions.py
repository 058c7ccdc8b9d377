"""OpenAI chat completions, as replies: whole bodies and event streams."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import orjson

from turnleaf.gateway.protocols._errors import RequestError

__all__ = [
    "Choice",
    "Completion",
    "EventStream",
    "TokenLogprob",
    "completion",
    "completion_events",
    "error_event",
]


@attrs.frozen
class TokenLogprob:
    """A sampled token. token: its text; U-FFFD where it is no whole character of its own."""

    token: str
    logprob: float

    def to_mapping(self) -> dict[str, Any]:
        """The protocol's entry of `logprobs.content`."""
        whole = "\N{REPLACEMENT CHARACTER}" not in self.token
        return {
            "token": self.token,
            "logprob": self.logprob,
            "bytes": list(self.token.encode()) if whole else None,
            "top_logprobs": [],
        }


@attrs.frozen(eq=False)
class Choice:
    """One sampled reply.

    turn_id: the turn that it was recorded as. message: the assistant message as the protocol has
    it. finish_reason: stop, length or tool_calls. logprobs: of every sampled token, what the
    message leaves out included; None when nobody asked.
    """

    turn_id: str
    message: dict[str, Any]
    finish_reason: str
    completion_tokens: int
    logprobs: Sequence[TokenLogprob] | None = None

    def told_logprobs(self) -> dict[str, Any] | None:
        """The protocol's `logprobs`."""
        if self.logprobs is None:
            return None
        return {"content": [entry.to_mapping() for entry in self.logprobs], "refusal": None}


@attrs.frozen(eq=False)
class Completion:
    """Sampled replies to one request, ready to be told; token counts are of the whole prompt and
    what the prefix cache held of it."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    created: int = attrs.field(factory=lambda: int(time.time()))

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns that its choices were recorded as."""
        return tuple(choice.turn_id for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """The protocol's usage object."""
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def completion(reply: Completion) -> bytes:
    """The body of an unstreamed reply."""
    return orjson.dumps(
        {
            "id": reply.id,
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [
                {
                    "index": index,
                    "message": choice.message,
                    "logprobs": choice.told_logprobs(),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(reply.choices)
            ],
            "usage": reply.usage(),
        }
    )


@attrs.define(eq=False)
class EventStream:
    """The server-sent events of a completion, in the pieces that its messages come in.

    id, model: of the completion.
    """

    _id: str
    _model: str
    _include_usage: bool
    _created: int = attrs.field(init=False, factory=lambda: int(time.time()))
    _begun: set[int] = attrs.field(init=False, factory=set)

    def delta(self, index: int, fields: dict[str, Any]) -> bytes:
        """What comes next in the message of a choice."""
        return self._begin(index) + self._choice(index, fields)

    def end(self, reply: Completion) -> bytes:
        """What follows when every message was told whole, `[DONE]` included."""
        events = []
        for index, choice in enumerate(reply.choices):
            events += [
                self._begin(index),
                self._choice(
                    index, {}, logprobs=choice.told_logprobs(), finish_reason=choice.finish_reason
                ),
            ]
        if self._include_usage:
            events.append(self._event([], usage=reply.usage()))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def _begin(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._choice(index, {"role": "assistant", "content": ""})

    def _choice(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        told = {"logprobs": None, "finish_reason": None, **more}
        return self._event([{"index": index, "delta": delta, **told}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **({"usage": None} if self._include_usage else {}),
            **more,
        }
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def completion_events(reply: Completion, *, include_usage: bool) -> bytes:
    """The server-sent events of a reply that is already whole, `[DONE]` included."""
    stream = EventStream(reply.id, reply.model, include_usage)
    deltas = (
        stream.delta(index, fields)
        for index, choice in enumerate(reply.choices)
        for fields in _deltas(choice.message)
    )
    return b"".join([*deltas, stream.end(reply)])


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    for position, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": position, **call}]}


def error_event(error: RequestError) -> bytes:
    """The server-sent event that ends a stream which broke."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"
