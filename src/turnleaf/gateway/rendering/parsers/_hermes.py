"""Hermes tool calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The JSON decides where a call ends, so that an end tag inside of a string is part of the string.
"""

import json
import re
from typing import Any

import attrs

from turnleaf.gateway._json import DECODER, check_text
from turnleaf.gateway.rendering.parsers._base import ParsedCall, Segments, Tools

__all__ = ["parse_hermes"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SPACE = re.compile(r"[ \t\n\r]*")


def parse_hermes(text: str, tools: Tools) -> Segments:
    """Cut `text` into text and calls. Arguments are the exact substring that was sampled.

    A call is strict JSON: an object with a `name` and with `arguments` that are an object, between
    both tags. Anything else stays text, up to its own end tag where it has one: what stands inside
    a broken call is never taken for another call.
    """
    parts: list[str | ParsedCall] = []
    malformed = 0
    done = search = 0
    while (start := text.find(_OPEN, search)) >= 0:
        call, search = _read_call(text, start + len(_OPEN))
        if call is None:
            malformed += 1
            continue
        parts += (text[done:start], call)
        done = search
    parts.append(text[done:])
    return Segments(tuple(parts), malformed)


def _read_call(text: str, start: int) -> tuple[ParsedCall | None, int]:
    """The call whose opening tag ends at `start`, and where to look for the next one."""
    try:
        members, end = _read_object(text, _skip_space(text, start))
    except _BrokenError as broken:
        close = text.find(_CLOSE, broken.position)
        return None, len(text) if close < 0 else close + len(_CLOSE)
    close = _skip_space(text, end)
    if not text.startswith(_CLOSE, close):
        return None, end
    end = close + len(_CLOSE)
    name, arguments = members.get("name"), members.get("arguments")
    if name is None or arguments is None:
        return None, end
    if not isinstance(name.value, str) or not name.value or not isinstance(arguments.value, dict):
        return None, end
    return ParsedCall(name.value, text[arguments.start : arguments.end]), end


class _BrokenError(Exception):
    def __init__(self, position: int) -> None:
        self.position = position


@attrs.frozen
class _Member:
    value: Any
    start: int
    end: int


def _read_object(text: str, start: int) -> tuple[dict[str, _Member], int]:
    """The members of the JSON object at `start`, with their places, and where the object ends."""
    members: dict[str, _Member] = {}
    at = _skip_space(text, _expect(text, start, "{"))
    if text.startswith("}", at):
        return members, at + 1
    while True:
        key, at = _read_string(text, at)
        at = _skip_space(text, _expect(text, _skip_space(text, at), ":"))
        value, end = _read_value(text, at)
        members[key] = _Member(value, at, end)
        at = _skip_space(text, end)
        if text.startswith("}", at):
            return members, at + 1
        at = _skip_space(text, _expect(text, at, ","))


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise _BrokenError(at)
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
        raise _BrokenError(_position(error, text)) from None
    except (ValueError, RecursionError):
        # NaN, an integer beyond Python's limit, or nesting beyond ours.
        raise _BrokenError(at) from None
    return value, end


def _position(error: json.JSONDecodeError, text: str) -> int:
    # The error of a string without an end points to its start: the text ran out in it.
    return len(text) if error.msg.startswith("Unterminated string") else error.pos
