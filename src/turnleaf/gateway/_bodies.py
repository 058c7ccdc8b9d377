"""Reading the bodies of one rollout's requests, each from where it goes beyond an earlier one."""

import hashlib
import json
import re
import secrets
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from turnleaf.gateway._http import decoded

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["Bodies", "Body"]

_CONTINUED = secrets.token_hex(16).encode()
"""What a list of messages is called of which only the rest is read: a name that no client knows."""
_HASH = hashlib.sha256
"""Of digests that no client can make equal, the one that processors have instructions for."""
_SCANNER = json.JSONDecoder()
"""Tells where a value ends."""
_SEPARATORS = re.compile(r"[ \t\n\r,:]*")
_MOST_OPENINGS = 8
"""So many conversations of one rollout that take turns are read from where they were left."""
_MOST_FIELDS = 100
_MOST_MESSAGES = 10_000
_MOST_CHARACTERS = 1_000_000
"""For more, the event loop would wait too long until their end is found, and too much would be kept
of the fields before the messages."""
_UNREADABLE = (ValueError, RecursionError)
"""What is raised for values that are nested too deeply, and for too many."""


@attrs.frozen(eq=False)
class _Opening:
    """What a body begins with, up to the end of its last message.

    size, digest: of these bytes. fields: those before the messages.
    """

    size: int
    digest: bytes
    fields: dict[str, Any]
    messages: list[Any]


@attrs.frozen(eq=False)
class Body:
    """A request body.

    value: what it says. digest: SHA-256 of its bytes. new_size: how many of them repeat no earlier
    body's. opening: None where its end is not known. continues: another's, with which it begins.
    """

    value: Any
    digest: bytes
    new_size: int
    _opening: _Opening | None
    _continues: _Opening | None


class Bodies:
    """Decodes request bodies, of which most repeat an earlier one and add to its messages.

    Where a body begins with the very bytes of one that was kept, up to the end of that one's
    messages, only what follows is decoded. Only their digest is kept of these bytes, and not of
    more than the last few conversations.
    """

    def __init__(self) -> None:
        # Those that no other one continues, and those that one does: a conversation may fork.
        self._latest: list[_Opening] = []
        self._continued: list[_Opening] = []
        self._misses = 0

    def read(self, data: bytes) -> Body:
        """Decode a body. Raises RequestError as `decoded` does.

        Messages that it repeats are the very objects that were kept; nobody may change them.
        """
        for openings in (self._latest, self._continued):
            begun = _longest(openings, data)
            body = None if begun is None else _continued(*begun, data)
            if body is not None:
                self._misses = 0
                return body
        value = decoded(data)
        self._misses += 1
        # Some clients put another value before the messages each time. To look for the end of
        # these takes longer than to decode them, so it is tried after 1, 2, 4, 8 … misses.
        found = _found(data, value) if self._misses.bit_count() == 1 else None
        return Body(value, _HASH(data).digest(), len(data), found, None)

    def keep(self, body: Body, messages: list[Any]) -> None:
        """Expect further bodies to begin like this one. messages: those of the body, or equals."""
        opening, continued = body._opening, body._continues
        if opening is None:
            return
        if continued is not None:
            self._latest = _without(self._latest, continued)
            self._continued = _last(self._continued, continued)
        self._latest = _last(self._latest, attrs.evolve(opening, messages=messages))


def _longest(openings: list[_Opening], data: bytes) -> "tuple[_Opening, _Hash] | None":
    """The longest one that a body begins with, and the digest of its bytes."""
    digest, hashed, longest = _HASH(), 0, None
    for opening in sorted(openings, key=lambda one: one.size):
        if opening.size > len(data):
            break
        digest.update(memoryview(data)[hashed : opening.size])
        hashed = opening.size
        if digest.digest() == opening.digest:
            longest = opening, digest.copy()
    return longest


def _without(openings: list[_Opening], one: _Opening) -> list[_Opening]:
    return [other for other in openings if other.digest != one.digest]


def _last(openings: list[_Opening], one: _Opening) -> list[_Opening]:
    """With this one as the last, and no more of those before than may be kept."""
    return [*_without(openings, one), one][-_MOST_OPENINGS:]


def _continued(opening: _Opening, digest: "_Hash", data: bytes) -> Body | None:
    """A body that begins with an opening. digest: of the opening's bytes.

    None where only the whole body tells what it says.
    """
    rest = data[opening.size :]
    read = _read_on(rest)
    if read is None:
        return None
    added, fields = read
    messages = [*opening.messages, *added]
    value = {**opening.fields, "messages": messages, **fields}
    text = rest.decode()
    try:
        end = len(text[: _end_of_values(text, 0, len(added))].encode())
    except _UNREADABLE:
        digest.update(rest)
        return Body(value, digest.digest(), len(rest), None, opening)
    digest.update(rest[:end])
    begun = _Opening(opening.size + end, digest.digest(), opening.fields, messages)
    digest.update(rest[end:])
    return Body(value, digest.digest(), len(rest), begun, opening)


def _read_on(rest: bytes) -> tuple[list[Any], dict[str, Any]] | None:
    """What follows behind a message: further messages, and fields behind all of them.

    None where that is not JSON, or has another list of messages, which is then the one that counts.
    """
    try:
        fields = orjson.loads(b'{"%b":[{}%b' % (_CONTINUED, rest))
    except orjson.JSONDecodeError:
        return None
    _, *messages = fields.pop(_CONTINUED.decode())
    return None if "messages" in fields else (messages, fields)


def _found(data: bytes, value: Any) -> _Opening | None:
    """What a body begins with that says `value`; None where that is not to be told."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        return None
    text = data.decode()
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        start = _start_of_messages(text)
        end = _end_of_values(text, start + 1, len(messages))
    except _UNREADABLE:
        return None
    begun, rest = text[:end].encode(), text[end:].encode()
    if text[start] != "[" or _read_on(rest) is None:
        return None  # these are not the messages that count
    fields = orjson.loads(text[:start] + "0}")
    del fields["messages"]
    return _Opening(len(begun), _HASH(begun).digest(), fields, messages)


def _start_of_messages(text: str) -> int:
    """Where the value of the first field with that name begins, in the text of an object."""
    at = text.index("{") + 1
    for _ in range(_MOST_FIELDS):
        name, at = _SCANNER.raw_decode(text, _next_value(text, at))
        at = _next_value(text, at)
        if name == "messages":
            return at
        _, at = _SCANNER.raw_decode(text, at)
    raise ValueError("there are other fields first")


def _end_of_values(text: str, at: int, count: int) -> int:
    """Where the last of so many values ends, of which the first comes next."""
    if count > _MOST_MESSAGES or len(text) - at > _MOST_CHARACTERS:
        raise ValueError("there are too many")
    for _ in range(count):
        _, at = _SCANNER.raw_decode(text, _next_value(text, at))
    return at


def _next_value(text: str, at: int) -> int:
    """Where the value behind whatever separates it from the one before begins."""
    return _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
