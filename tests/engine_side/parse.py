"""Reads outputs with SGLang's own parsers, as its chat endpoint does.

Reads JSON, a list of `{"text", "tools", "tool_call_parser", "reasoning_parser", "opened"}`: of
outputs, with the names of parsers (or null) and whether the prompt opened the reasoning. Writes a
list of `[content, reasoning, [[name, arguments as text], …]]`.
"""

import json
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser


def main() -> None:
    print(json.dumps([read(asked) for asked in json.load(sys.stdin)]))


def read(asked):
    text, reasoning, calls = asked["text"], "", []
    if asked["reasoning_parser"] is not None:
        parser = ReasoningParser(
            model_type=asked["reasoning_parser"],
            stream_reasoning=False,
            force_reasoning=asked["opened"],
            tool_call_parser_active=True,
        )
        reasoning, text = parser.parse_non_stream(text)
    tools = [Tool(**tool) for tool in asked["tools"]]
    parser = FunctionCallParser(tools, asked["tool_call_parser"])
    if parser.has_tool_call(text):
        text, found = parser.parse_non_stream(text)
        calls = [[call.name, call.parameters] for call in found]
    return [text or "", reasoning or "", calls]


if __name__ == "__main__":
    main()
