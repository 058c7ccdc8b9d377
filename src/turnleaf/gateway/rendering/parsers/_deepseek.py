r"""DeepSeek-V3 tool calls, all between one pair of outer tags:

    <｜tool▁calls▁begin｜>CALL\nCALL…<｜tool▁calls▁end｜>

with CALL = `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>`.
The JSON decides where a call ends.
"""

import re

from turnleaf.gateway.rendering.parsers._base import ParsedCall, Segments, Tools
from turnleaf.gateway.rendering.parsers._call_reader import CallForm
from turnleaf.gateway.rendering.parsers._json_objects import BrokenJson, read_object, skip_space

__all__ = ["DEEPSEEK_FORM", "parse_deepseek"]

_OPEN_ALL = "<｜tool▁calls▁begin｜>"
_CLOSE_ALL = "<｜tool▁calls▁end｜>"
_OPEN = "<｜tool▁call▁begin｜>"
_CLOSE = "<｜tool▁call▁end｜>"
_HEAD = re.compile(r"function<｜tool▁sep｜>([^\n<>]*[^\n<>\s])\n```json\n")
_TAIL = re.compile(r"\s*```\s*" + re.escape(_CLOSE))
DEEPSEEK_FORM = CallForm(_OPEN_ALL, _CLOSE, further=_OPEN, behind=_CLOSE_ALL)


def parse_deepseek(text: str, tools: Tools) -> Segments:
    """Cut `text` into text and calls. Arguments are the exact substring that was sampled.

    The outer tags belong to the call beside them. A call that is broken, or outside of the outer
    tags, stays text; those around it are calls all the same.
    """
    parts: list[str | ParsedCall] = []
    malformed = 0
    done = search = 0
    within = False
    while (start := text.find(_OPEN, search)) >= 0:
        opened, closed = (text.rfind(tag, search, start) for tag in (_OPEN_ALL, _CLOSE_ALL))
        within = opened > closed if opened != closed else within
        call, search = _read_call(text, start + len(_OPEN))
        if call is None or not within:
            malformed += 1
            continue
        before = text[done:start]
        if not any(isinstance(part, ParsedCall) for part in parts):
            lead, _, between = before.partition(_OPEN_ALL)
            before = lead if not between.strip() else before
        parts += (before, call)
        done = search
    rest = text[done:]
    if done and rest.lstrip().startswith(_CLOSE_ALL):
        rest = rest.lstrip().removeprefix(_CLOSE_ALL)
    parts.append(rest)
    # The outer tag of a first call that was cut before it began.
    malformed += _OPEN_ALL in text and len(parts) == 1 and not malformed
    return Segments(tuple(parts), malformed)


def _read_call(text: str, start: int) -> tuple[ParsedCall | None, int]:
    """The call whose opening tag ends at `start`, and where to look for the next one."""
    head = _HEAD.match(text, start)
    at = head.end() if head else start
    try:
        _, end = read_object(text, at := skip_space(text, at))
    except BrokenJson as broken:
        close = text.find(_CLOSE, broken.position)
        return None, len(text) if close < 0 else close + len(_CLOSE)
    tail = _TAIL.match(text, end)
    if head is None or tail is None:
        return None, end
    return ParsedCall(head[1], text[at:end]), tail.end()
