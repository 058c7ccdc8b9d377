"""Hermes tool calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The JSON decides where a call ends, so that an end tag inside of a string is part of the string.
"""

import json

from turnleaf.gateway.rendering.parsers._base import CallFrame, ParsedCall, Segments, Tools
from turnleaf.gateway.rendering.parsers._json_objects import BrokenJson, read_object, skip_space

__all__ = ["hermes_frame", "parse_hermes"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


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


def hermes_frame(name: str) -> CallFrame:
    """How templates write a call of the function with that name."""
    begin = f'{_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return CallFrame(begin, f"}}\n{_CLOSE}", _OPEN)


def _read_call(text: str, start: int) -> tuple[ParsedCall | None, int]:
    """The call whose opening tag ends at `start`, and where to look for the next one."""
    try:
        members, end = read_object(text, skip_space(text, start))
    except BrokenJson as broken:
        close = text.find(_CLOSE, broken.position)
        return None, len(text) if close < 0 else close + len(_CLOSE)
    close = skip_space(text, end)
    if not text.startswith(_CLOSE, close):
        return None, end
    end = close + len(_CLOSE)
    name, arguments = members.get("name"), members.get("arguments")
    if name is None or arguments is None:
        return None, end
    if not isinstance(name.value, str) or not name.value or not isinstance(arguments.value, dict):
        return None, end
    return ParsedCall(name.value, text[arguments.start : arguments.end]), end
