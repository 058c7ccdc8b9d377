"""The messages of a rollout, known again by their bytes and compared by what they say."""

import hashlib
from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from turnleaf.gateway.protocols import Message, canonical_text, normalise

__all__ = ["ChildKey", "Known", "KnownMessages", "child_keys", "digest_of"]

ChildKey = tuple[bytes, int | str | None]
"""What the node of a message is found by below its parent."""


@attrs.define(eq=False)
class Known:
    """A message: digest and number of its raw bytes, normal form, and what it is compared by.

    raw: as it was sent. exact: whether that equals only what says the same. key: what a node for it
    is found by below its parent, unless it answers a call.
    """

    raw_digest: bytes
    size: int
    raw: Any
    exact: bool
    message: Message
    digest: bytes
    reasoning: str
    call_ids: tuple[str, ...]
    answers: str | None
    key: ChildKey

    def is_repeated_by(self, raw: Any) -> bool:
        """Whether a message as it was sent is this one, in the same spelling."""
        if self.raw is raw:
            return True
        if self.exact:
            return bool(self.raw == raw)
        try:
            # What differs to Python does so in its bytes, which take longer to make.
            return bool(self.raw == raw) and digest_of(orjson.dumps(raw)) == self.raw_digest
        except (orjson.JSONEncodeError, RecursionError):
            return False


@attrs.define(eq=False)
class KnownMessages:
    """Normalises and canonicalises each message once, however often it comes.

    Only what is remembered is known again.
    """

    _known: dict[bytes, Known] = attrs.field(init=False, factory=dict)

    def remember(self, known: Known) -> None:
        """Know the message again."""
        self._known[known.raw_digest] = known

    def know(self, raw: Any, where: str) -> Known:
        """The message; raises RequestError that names the field at fault, orjson's JSONEncodeError
        or RecursionError for what is nested too deeply."""
        raw_bytes = orjson.dumps(raw)
        key = digest_of(raw_bytes)
        known = self._known.get(key)
        if known is None:
            message = normalise(raw, where)
            digest = digest_of(canonical_text(message).encode())
            known = Known(
                raw_digest=key,
                size=len(raw_bytes),
                raw=raw,
                exact=_is_exact(raw),
                message=message,
                digest=digest,
                reasoning=message.get("reasoning_content", "").strip(),
                call_ids=tuple(call["id"] for call in message.get("tool_calls", ())),
                answers=message.get("tool_call_id"),
                key=(digest, None),
            )
        return known


def digest_of(data: bytes) -> bytes:
    """What stands for these bytes wherever they are compared."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _is_exact(raw: Any) -> bool:
    """Whether only what says the same equals it: to Python, 1 is true and 1.0, and the keys of an
    object have no order, which those of a call's arguments are shown in."""
    if isinstance(raw, dict):
        return not isinstance(raw.get("arguments"), dict) and all(map(_is_exact, raw.values()))
    if isinstance(raw, list):
        return all(map(_is_exact, raw))
    return raw is None or isinstance(raw, str)


def child_keys(conversation: Sequence[Known], start: int) -> list[ChildKey]:
    """The key of each message below its parent, from one on: a tool result is tied to the call it
    answers by that call's position, since ids differ between equal replies."""
    before = reversed(conversation[:start])
    positions = _positions(next((known for known in before if known.call_ids), None))
    keys = []
    for known in conversation[start:]:
        if known.call_ids:
            positions = _positions(known)
        answers = known.answers
        keys.append((known.digest, positions.get(answers, answers)) if answers else known.key)
    return keys


def _positions(calling: Known | None) -> dict[str, int]:
    return {call_id: at for at, call_id in enumerate(calling.call_ids)} if calling else {}
