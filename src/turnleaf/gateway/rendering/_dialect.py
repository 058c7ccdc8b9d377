"""How one chat template wants what messages say, learned by rendering a few.

Templates agree on roles and content, not on what a reply holds beside: the field that reasoning is
in, whether a call's arguments are an object or its JSON text, and what may stand together.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

__all__ = ["Dialect", "Message", "Tool", "learn_dialect"]

Message = Mapping[str, Any]
"""`role`; `content`, a string; where they apply `reasoning_content`, `tool_calls` (arguments as a
dict where they are a JSON object), `tool_call_id` and `name`."""

Tool = Mapping[str, Any]
"""An OpenAI tool definition."""

_REASONING = ("reasoning_content", "thinking")


@attrs.frozen
class Dialect:
    """reasoning_field: where a message's reasoning is looked for. arguments_as_text: a call's
    arguments are JSON text. content_or_reasoning: a reply with calls cannot have both; its content
    is left out. parallel_calls: a reply may have several calls.
    """

    reasoning_field: str = _REASONING[0]
    arguments_as_text: bool = False
    content_or_reasoning: bool = False
    parallel_calls: bool = True

    def spell(self, messages: Iterable[Message]) -> list[Message]:
        """The messages as the template wants them."""
        return [self._spell(message) for message in messages]

    def without_reasoning(self, message: Message) -> Message:
        """The message without what is reasoning to the template.

        Where a reply with calls cannot have both, its content takes the place of reasoning.
        """
        silent = {field: value for field, value in message.items() if field != "reasoning_content"}
        if self.content_or_reasoning and message.get("tool_calls"):
            silent["content"] = ""
        return silent

    def _spell(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        reasoning = message.get("reasoning_content")
        if not calls and not reasoning:
            return message
        spelled = dict(message)
        if reasoning:
            del spelled["reasoning_content"]
            spelled[self.reasoning_field] = reasoning
            if calls and self.content_or_reasoning:
                spelled["content"] = ""
        if calls and self.arguments_as_text:
            spelled["tool_calls"] = [_with_text(call) for call in calls]
        return spelled


def learn_dialect(render: Callable[[Sequence[Message], Sequence[Tool]], str | None]) -> Dialect:
    """render: the text of messages; None where the template refuses them."""

    def shown(dialect: Dialect, *calls: str, **fields: str) -> str:
        reply: dict[str, Any] = {"role": "assistant", "content": "", **fields}
        reply["tool_calls"] = [_call(name) for name in calls]
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": "r"}
            for each in reply["tool_calls"]
        ]
        messages = dialect.spell([{"role": "user", "content": "q"}, reply, *results])
        return render(messages, [_TOOL]) or ""

    dialect = Dialect()
    as_text = attrs.evolve(dialect, arguments_as_text=True)
    if "value-first" not in shown(dialect, "first") and "value-first" in shown(as_text, "first"):
        dialect = as_text
    for field in _REASONING:
        candidate = attrs.evolve(dialect, reasoning_field=field)
        if "deliberation" in shown(candidate, "first", reasoning_content="deliberation"):
            dialect = candidate
            break
    both = {"content": "answer", "reasoning_content": "deliberation"}
    either = attrs.evolve(dialect, content_or_reasoning=True)
    if not shown(dialect, "first", **both) and shown(either, "first", **both):
        dialect = either
    one, two = shown(dialect, "first"), shown(dialect, "first", "second")
    return attrs.evolve(dialect, parallel_calls="value-first" not in one or "value-second" in two)


def _call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"text": f"value-{name}"}}
    # Some templates want ids of nine characters.
    return {"id": name.rjust(9, "0"), "type": "function", "function": function}


_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
