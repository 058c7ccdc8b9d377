r"""Qwen XML tool calls, as Qwen3-Coder and later models write them:

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

The format has no escapes, so some values cannot be told from structure. What is decided here:

- A call ends at the first `</function>` that is followed by `</tool_call>`.
- A value ends at the first `</parameter>` that is followed by another parameter or by the end of
  the call; any other `</parameter>` is part of the value.
- A value that contains `<parameter=` is more likely a parameter without its end tag: the call
  counts as malformed.
"""

import json
import re

from turnleaf.gateway.rendering.parsers._base import ParsedCall, Segments, Tools
from turnleaf.gateway.rendering.parsers._schema import json_text, parameters_of, types_of

__all__ = ["parse_qwen_xml"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_END = re.compile(r"</function>\s*</tool_call>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>((?:(?!<parameter=).)*?)</parameter>(?=\s*(?:<parameter=|\Z))",
    re.DOTALL,
)


def parse_qwen_xml(text: str, tools: Tools) -> Segments:
    """Cut `text` into text and calls.

    One framing newline is removed on each side of a value, and nothing else. The tool's schema
    gives a value its type: a string stays as it is, any other type is read as JSON, booleans and
    null in Python's spelling too. A value that does not fit, and one of an unknown parameter, is
    a string. JSON values keep their sampled text.
    """
    parts: list[str | ParsedCall] = []
    malformed = 0
    done = search = 0
    end = _END.search(text)
    while (start := text.find(_OPEN, search)) >= 0:
        while end and end.start() < start:
            end = _END.search(text, end.end())
        call = _read_call(text, start + len(_OPEN), end.start(), tools) if end else None
        if call and end:
            parts += (text[done:start], call)
            done = search = end.end()
        else:
            malformed += 1
            close = text.find(_CLOSE, start)
            search = len(text) if close < 0 else close + len(_CLOSE)
    parts.append(text[done:])
    return Segments(tuple(parts), malformed)


def _read_call(text: str, start: int, end: int, tools: Tools) -> ParsedCall | None:
    """The call between the end of its opening tag and its `</function>`."""
    function = _FUNCTION.match(text, start, end)
    values = _values(text, function.end(), end) if function else None
    if function is None or values is None:
        return None
    name = function[1].strip()
    schema = parameters_of(name, tools)
    members = (
        f"{json.dumps(key, ensure_ascii=False)}: {json_text(value, types_of(key, schema))}"
        for key, value in values.items()
    )
    return ParsedCall(name, "{" + ", ".join(members) + "}")


def _values(text: str, start: int, end: int) -> dict[str, str] | None:
    """The parameters between the function's tags; None when anything else is there."""
    values: dict[str, str] = {}
    while parameter := _PARAMETER.match(text, start, end):
        values[parameter[1]] = parameter[2].removeprefix("\n").removesuffix("\n")
        start = parameter.end()
    return None if text[start:end].strip() else values
