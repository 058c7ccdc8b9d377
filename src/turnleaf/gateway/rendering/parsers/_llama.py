"""Llama 3 tool calls: the whole reply is `{"name": …, "parameters": {…}}`.

There are no tags; `<|python_tag|>` may stand before the object. Several objects, separated by `;`,
are several calls. An object without parameters is an answer that happens to be JSON.
"""

import re
from collections.abc import Iterator

from turnleaf.gateway.rendering.parsers._base import ParsedCall, Segments, Tools
from turnleaf.gateway.rendering.parsers._json_objects import (
    SPACE,
    BrokenJson,
    Member,
    read_object,
    skip_space,
)
from turnleaf.gateway.rendering.parsers._search import Beginning

__all__ = ["LlamaReader", "parse_llama"]

_TAG = "<|python_tag|>"
_LIKE_A_CALL = re.compile(r"\{\s*\"(?:name|parameters|arguments)\"\s*:")
_WITHIN_TEXT = re.compile(r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:\s*\{')
_PARAMETERS = ("parameters", "arguments")


def parse_llama(text: str, tools: Tools) -> Segments:
    """Read `text` as calls and nothing else, or as text. Arguments are the exact substring.

    Parameters may be called `arguments`: the template asks for the one, other formats taught the
    model the other. A reply of which any part is no call stays text as a whole; a call that stands
    behind other text is counted, too.
    """
    start = skip_space(text, 0)
    tagged = text.startswith(_TAG, start)
    if tagged:
        start = skip_space(text, start + len(_TAG))
    if not tagged and not text.startswith("{", start):
        return Segments((text,), len(_WITHIN_TEXT.findall(text)))
    calls, like_calls = _read_calls(text, start)
    if calls is None:
        return Segments((text,), int(tagged or like_calls))
    return Segments(calls, 0)


def _read_calls(text: str, start: int) -> tuple[tuple[ParsedCall, ...] | None, bool]:
    """The calls from `start` to the end, if they are nothing else; whether they look like calls."""
    calls: list[ParsedCall] = []
    like_calls = bool(_LIKE_A_CALL.match(text, start) or _WITHIN_TEXT.search(text, start))
    while True:
        try:
            members, end = read_object(text, start)
        except BrokenJson:
            return None, like_calls
        call = _call(text, members)
        if call is None:
            return None, bool(calls) or any(name in members for name in _PARAMETERS)
        calls.append(call)
        at = skip_space(text, end)
        if at == len(text):
            return tuple(calls), True
        if not text.startswith(";", at):
            return None, True
        start = skip_space(text, at + 1)
        if start == len(text):
            return tuple(calls), True


def _call(text: str, members: dict[str, Member]) -> ParsedCall | None:
    name = members.get("name")
    given = [members[key] for key in _PARAMETERS if key in members]
    if name is None or not isinstance(name.value, str) or not name.value:
        return None
    if len(given) != 1 or not isinstance(given[0].value, dict):
        return None
    return ParsedCall(name.value, text[given[0].start : given[0].end])


class LlamaReader:
    """Reads a reply that is not finished: as text, unless it begins as a call does.

    Then it stays text or consists of calls as a whole, which only its end tells.
    """

    def __init__(self) -> None:
        self._beginning = Beginning(["{", _TAG], SPACE)
        self._found: str | None = None

    def feed(self, text: str) -> Iterator[str | ParsedCall]:
        """See `CallReader.feed`."""
        if self._found is None:
            self._found = self._beginning.feed(text)
            text = self._beginning.text if self._found == "" else ""
        if self._found == "":
            yield text
