"""Parsers of model output, one small file per format, by the names SGLang gives them.

They read the decoded text of a whole output.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import TypeVar

from turnleaf.core import ContractError
from turnleaf.gateway.rendering.parsers._base import CallParser, ParsedCall, Segments, Tools
from turnleaf.gateway.rendering.parsers._hermes import parse_hermes
from turnleaf.gateway.rendering.parsers._qwen_xml import parse_qwen_xml
from turnleaf.gateway.rendering.parsers._reasoning import split_reasoning

__all__ = [
    "CallParser",
    "ParsedCall",
    "ReasoningParser",
    "Segments",
    "Tools",
    "call_parser",
    "parse_hermes",
    "parse_qwen_xml",
    "reasoning_parser",
    "split_reasoning",
]

ReasoningParser = Callable[[str, bool], tuple[str, str]]
"""(text, whether the prompt opened the reasoning) → (reasoning, answer)."""

_CALLS: Mapping[str, CallParser | None] = {
    "none": None,
    "hermes": parse_hermes,
    "qwen": parse_hermes,
    "qwen25": parse_hermes,
    "qwen3_coder": parse_qwen_xml,
}
_REASONING: Mapping[str, ReasoningParser | None] = {
    "none": None,
    "qwen3": split_reasoning,
    "qwen3-thinking": split_reasoning,
}
_Parser = TypeVar("_Parser")


def call_parser(name: str, template: str) -> CallParser | None:
    """The parser of tool calls with that name; "auto" reads it off the chat template.

    None when nothing can parse calls. Raises ContractError for an unknown name.
    """
    if name != "auto":
        return _named(_CALLS, name, "tool_call_parser")
    if "<function=" in template and "<parameter=" in template:
        return parse_qwen_xml
    if "<tool_call>" in template and "arguments" in template and "<arg_key>" not in template:
        return parse_hermes
    return None


def reasoning_parser(name: str, template: str) -> ReasoningParser | None:
    """The parser of reasoning with that name; "auto" reads it off the chat template.

    None when the output has no reasoning apart. Raises ContractError for an unknown name.
    """
    if name != "auto":
        return _named(_REASONING, name, "reasoning_parser")
    return split_reasoning if "</think>" in template else None


def _named(parsers: Mapping[str, _Parser], name: str, setting: str) -> _Parser:
    if name in parsers:
        return parsers[name]
    names = ("auto", *parsers)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    raise ContractError(
        f"{setting}: {name!r} is not a parser; did you mean {nearest[0]!r}? "
        f"There are {', '.join(names)}."
    )
