"""Reading a JSON object out of a text, with the places of its members."""

import json
import re
from typing import Any

import attrs

from turnleaf.gateway._json import DECODER, check_text

__all__ = ["SPACE", "BrokenJson", "Member", "read_object", "skip_space"]

SPACE = " \t\n\r"
"""The whitespace of JSON."""
_SPACE = re.compile(f"[{SPACE}]*")


class BrokenJson(Exception):
    """There is no JSON object here. position: where the text stops being one."""

    def __init__(self, position: int) -> None:
        self.position = position


@attrs.frozen
class Member:
    """A value and its place in the text."""

    value: Any
    start: int
    end: int


def read_object(text: str, start: int) -> tuple[dict[str, Member], int]:
    """The members of the JSON object at `start`, with their places, and where the object ends.

    Raises BrokenJson.
    """
    members: dict[str, Member] = {}
    at = skip_space(text, _expect(text, start, "{"))
    if text.startswith("}", at):
        return members, at + 1
    while True:
        key, at = _read_string(text, at)
        at = skip_space(text, _expect(text, skip_space(text, at), ":"))
        value, end = _read_value(text, at)
        members[key] = Member(value, at, end)
        at = skip_space(text, end)
        if text.startswith("}", at):
            return members, at + 1
        at = skip_space(text, _expect(text, at, ","))


def skip_space(text: str, at: int) -> int:
    """Where the whitespace of JSON at `at` ends."""
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise BrokenJson(at)
    return at + 1


def _read_string(text: str, at: int) -> tuple[str, int]:
    _expect(text, at, '"')
    value, end = _read_value(text, at)
    return str(value), end


def _read_value(text: str, at: int) -> tuple[Any, int]:
    try:
        value, end = DECODER.raw_decode(text, at)
        check_text(value)
    except json.JSONDecodeError as error:
        raise BrokenJson(_position(error, text)) from None
    except (ValueError, RecursionError):
        # NaN, an integer beyond Python's limit, or nesting beyond ours.
        raise BrokenJson(at) from None
    return value, end


def _position(error: json.JSONDecodeError, text: str) -> int:
    # The error of a string without an end points to its start: the text ran out in it.
    return len(text) if error.msg.startswith("Unterminated string") else error.pos
