r"""GLM-4.5 tool calls:

    <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n…</tool_call>

The format has no escapes: a value ends at the first `</arg_value>` that is followed by another key
or by the end of the call. One that contains the tag of a key or value is more likely without its
own end tag: the call counts as malformed.
"""

import json
import re

from turnleaf.gateway.rendering.parsers._base import ParsedCall, Segments, Tools
from turnleaf.gateway.rendering.parsers._schema import json_text, parameters_of, types_of

__all__ = ["parse_glm"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
# A name and nothing else: prose, or another format's JSON, is no call without arguments.
_NAME = re.compile(r"""\s*([^\s<>{}"]+)[ \t]*(?:\n\s*|(?=<))""")
_ARGUMENT = re.compile(
    r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>((?:(?!<arg_key>|<arg_value>).)*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|</tool_call>))\s*",
    re.DOTALL,
)


def parse_glm(text: str, tools: Tools) -> Segments:
    """Cut `text` into text and calls.

    Nothing is removed from a value. The tool's schema gives it its type: a string stays as it is,
    any other type is read as JSON; what does not fit, or belongs to no known key, is a string.
    """
    parts: list[str | ParsedCall] = []
    malformed = 0
    done = search = 0
    while (start := text.find(_OPEN, search)) >= 0:
        call, end = _read_call(text, start + len(_OPEN), tools)
        if call is None:
            malformed += 1
            close = text.find(_CLOSE, end)
            search = len(text) if close < 0 else close + len(_CLOSE)
            continue
        parts += (text[done:start], call)
        done = search = end
    parts.append(text[done:])
    return Segments(tuple(parts), malformed)


def _read_call(text: str, start: int, tools: Tools) -> tuple[ParsedCall | None, int]:
    """The call whose opening tag ends at `start`, and where it ends or stops being one."""
    name = _NAME.match(text, start)
    if name is None:
        return None, start
    schema = parameters_of(name[1], tools)
    members: dict[str, str] = {}
    at = name.end()
    while argument := _ARGUMENT.match(text, at):
        key = argument[1]
        if key in members:
            return None, argument.end()
        members[key] = json_text(argument[2], types_of(key, schema))
        at = argument.end()
    if not text.startswith(_CLOSE, at):
        return None, at
    arguments = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items()
    )
    return ParsedCall(name[1], f"{{{arguments}}}"), at + len(_CLOSE)
