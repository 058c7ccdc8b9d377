"""Parsers of model output, one small file per format, by the names SGLang gives them.

A parser reads a whole output: its decoded text or, where a format has messages of its own, its text
and control tokens. A reader reads the same as it is sampled, and tells what of the parse is certain
whatever follows.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import TypeVar

from turnleaf.core import ContractError
from turnleaf.gateway.rendering.parsers._base import (
    CallFrame,
    CallParser,
    CallReader,
    ContentDelta,
    Delta,
    MessageParser,
    MessageReader,
    ParsedCall,
    Piece,
    ReasoningDelta,
    Segments,
    Tools,
)
from turnleaf.gateway.rendering.parsers._call_reader import CallForm, TaggedCallReader
from turnleaf.gateway.rendering.parsers._content import content_of
from turnleaf.gateway.rendering.parsers._deepseek import DEEPSEEK_FORM, parse_deepseek
from turnleaf.gateway.rendering.parsers._glm import parse_glm
from turnleaf.gateway.rendering.parsers._harmony import CALL_END, parse_harmony
from turnleaf.gateway.rendering.parsers._harmony_reader import HarmonyReader
from turnleaf.gateway.rendering.parsers._hermes import hermes_frame, parse_hermes
from turnleaf.gateway.rendering.parsers._llama import LlamaReader, parse_llama
from turnleaf.gateway.rendering.parsers._qwen_xml import parse_qwen_xml
from turnleaf.gateway.rendering.parsers._reasoning import ReasoningReader, split_reasoning
from turnleaf.gateway.rendering.parsers._text_reader import TextReader

__all__ = [
    "CALL_END",
    "CallFrame",
    "CallParser",
    "ContentDelta",
    "Delta",
    "HarmonyReader",
    "MessageParser",
    "MessageReader",
    "ParsedCall",
    "Piece",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningReader",
    "Segments",
    "TextReader",
    "Tools",
    "call_frame",
    "call_parser",
    "call_reader",
    "content_of",
    "message_parser",
    "parse_deepseek",
    "parse_glm",
    "parse_harmony",
    "parse_hermes",
    "parse_llama",
    "parse_qwen_xml",
    "reasoning_parser",
    "split_reasoning",
]

ReasoningParser = Callable[[str, bool], tuple[str, str]]
"""(text, whether the prompt opened the reasoning) → (reasoning, answer)."""

_HARMONY = "gpt-oss"
_CALLS: Mapping[str, CallParser | None] = {
    "none": None,
    "hermes": parse_hermes,
    "qwen": parse_hermes,
    "qwen25": parse_hermes,
    "qwen3_coder": parse_qwen_xml,
    "llama3": parse_llama,
    "glm": parse_glm,
    "glm45": parse_glm,
    "deepseekv3": parse_deepseek,
    _HARMONY: None,
}
_REASONING: Mapping[str, ReasoningParser | None] = {
    "none": None,
    "qwen3": split_reasoning,
    "qwen3-thinking": split_reasoning,
    "glm45": split_reasoning,
    "deepseek-r1": split_reasoning,
    "deepseek-v3": split_reasoning,
    _HARMONY: None,
}
_MARKS: tuple[tuple[CallParser, tuple[str, ...]], ...] = (
    (parse_qwen_xml, ("<function=", "<parameter=")),
    (parse_glm, ("<tool_call>", "<arg_key>")),
    (parse_hermes, ("<tool_call>", "arguments")),
    (parse_deepseek, ("<｜tool▁calls▁begin｜>", "```json")),
    (parse_llama, ("<|start_header_id|>", '"parameters": ')),
)
"""What a template holds that asks for a format; the first that fits is taken."""

_TAGGED = CallForm("<tool_call>", "</tool_call>")
_FORMS: Mapping[CallParser, CallForm] = {
    parse_hermes: _TAGGED,
    parse_qwen_xml: _TAGGED,
    parse_glm: _TAGGED,
    parse_deepseek: DEEPSEEK_FORM,
}

_Parser = TypeVar("_Parser")


def call_parser(name: str, template: str) -> CallParser | None:
    """The parser of tool calls with that name; "auto" reads it off the chat template.

    None when nothing can parse calls in a text. Raises ContractError for an unknown name.
    """
    if name != "auto":
        return _named(_CALLS, name, "tool_call_parser")
    for parser, marks in _MARKS:
        if all(mark in template for mark in marks):
            return parser
    return None


def call_frame(parser: CallParser | None) -> Callable[[str], CallFrame] | None:
    """How a function's calls, which `parser` reads, are written around their arguments.

    None where arguments are not written as a JSON object in one place.
    """
    return hermes_frame if parser is parse_hermes else None


def call_reader(parse: CallParser, tools: Tools, *, parallel: bool) -> CallReader:
    """A reader of what that parser parses. parallel: a reply may have several calls."""
    if parse is parse_llama:
        return LlamaReader()
    return TaggedCallReader(parse, _FORMS[parse], tools, parallel=parallel)


def reasoning_parser(name: str, template: str) -> ReasoningParser | None:
    """The parser of reasoning with that name; "auto" reads it off the chat template.

    None when the text has no reasoning apart. Raises ContractError for an unknown name.
    """
    if name != "auto":
        return _named(_REASONING, name, "reasoning_parser")
    return split_reasoning if "</think>" in template else None


def message_parser(calls: str, reasoning: str, template: str) -> MessageParser | None:
    """The parser that takes the place of both, where an output consists of messages.

    calls, reasoning: the names given for the two; calls may be "none". Raises ContractError when
    the other's is of another kind.
    """
    detected = "<|channel|>" in template and "<|message|>" in template
    if _HARMONY not in (calls, reasoning) and not (detected and "auto" in (calls, reasoning)):
        return None
    if calls in (_HARMONY, "auto", "none") and reasoning in (_HARMONY, "auto"):
        return parse_harmony
    raise ContractError(
        f"tool_call_parser {calls!r} and reasoning_parser {reasoning!r} do not go together: "
        f"{_HARMONY!r} reads both, so name it for both or leave both at 'auto'"
    )


def _named(parsers: Mapping[str, _Parser], name: str, setting: str) -> _Parser:
    if name in parsers:
        return parsers[name]
    names = ("auto", *parsers)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    raise ContractError(
        f"{setting}: {name!r} is not a parser; did you mean {nearest[0]!r}? "
        f"There are {', '.join(names)}."
    )
