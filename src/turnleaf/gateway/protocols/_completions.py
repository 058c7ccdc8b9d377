"""OpenAI chat completions, as replies: whole bodies and event streams."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from turnleaf.core import Logprobs
from turnleaf.gateway.protocols._errors import RequestError

__all__ = [
    "Choice",
    "Completion",
    "EventStream",
    "TokenLogprobs",
    "completion",
    "completion_events",
    "error_event",
]

_LONG = 10_000
"""Log-probabilities in a reply from which on it takes some milliseconds to encode."""


@attrs.frozen(eq=False)
class TokenLogprobs:
    """Every sampled token of a reply.

    texts: of each; U-FFFD where it is no whole character of its own. logprobs: float32[n].
    """

    texts: Sequence[str]
    logprobs: Logprobs

    def to_json(self) -> bytes:
        """The protocol's `logprobs`. What it costs follows the texts that differ, not the tokens,
        as far as it can: a request may ask for a hundred thousand of them."""
        around = {text: _around_logprob(text) for text in set(self.texts)}
        numbers = orjson.dumps(self.logprobs.tolist())[1:-1].split(b",") if self.texts else []
        entries = [
            number.join(around[text]) for text, number in zip(self.texts, numbers, strict=True)
        ]
        return b'{"content":[' + b",".join(entries) + b'],"refusal":null}'


def _around_logprob(text: str) -> tuple[bytes, bytes]:
    """What stands before and behind the log-probability in the entry of a token."""
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    of_text = list(text.encode()) if whole else None
    return (
        b'{"token":' + orjson.dumps(text) + b',"logprob":',
        b',"bytes":' + orjson.dumps(of_text) + b',"top_logprobs":[]}',
    )


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
    logprobs: TokenLogprobs | None = None

    def told_logprobs(self) -> orjson.Fragment | None:
        """The protocol's `logprobs`."""
        return None if self.logprobs is None else orjson.Fragment(self.logprobs.to_json())


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
    def long(self) -> bool:
        """It takes so long to encode that it is not to be done in the event loop."""
        told = sum(
            choice.completion_tokens for choice in self.choices if choice.logprobs is not None
        )
        return told > _LONG

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
    _calls: Counter[int] = attrs.field(init=False, factory=Counter)
    """How many calls of each choice were told."""

    def more(self, index: int, message: dict[str, Any]) -> bytes:
        """What comes next in the message of a choice, in the shape of a message."""
        deltas = [
            {name: message[name]} for name in ("reasoning_content", "content") if message.get(name)
        ]
        calls = message.get("tool_calls", ())
        deltas += [
            {"tool_calls": [{"index": position, **call}]}
            for position, call in enumerate(calls, self._calls[index])
        ]
        self._calls[index] += len(calls)
        return self._begin(index) + b"".join(self._choice(index, delta) for delta in deltas)

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
    messages = (stream.more(index, choice.message) for index, choice in enumerate(reply.choices))
    return b"".join([*messages, stream.end(reply)])


def error_event(error: RequestError) -> bytes:
    """The server-sent event that ends a stream which broke."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"
