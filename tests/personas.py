"""How agent clients send back what they were told: the table that real ones were measured for."""

import json
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]


def _parts(content: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if content else []


def _arguments(message: Message, spell: Callable[[str], str]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": spell(call["function"]["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _dumped(invalid: Callable[[str], str], **options: Any) -> Callable[[str], str]:
    def spell(arguments: str) -> str:
        try:
            return json.dumps(json.loads(arguments), **options)
        except ValueError:
            return invalid(arguments)

    return spell


def strands(message: Message) -> Message:
    sent = _arguments(_without_reasoning(message), _dumped(lambda _: "{}"))
    if "tool_calls" in sent and not sent["content"]:
        return {name: value for name, value in sent.items() if name != "content"}
    return {**sent, "content": _parts(sent["content"])}


def openai(message: Message) -> Message:
    return dict(message)


def openai_stream(message: Message) -> Message:
    sent: Message = {**message, "refusal": None, "parsed": None, "annotations": None}
    if "tool_calls" in sent:
        sent["tool_calls"] = [{**call, "index": at} for at, call in enumerate(sent["tool_calls"])]
    return sent


def openai_agents(message: Message) -> Message:
    return _without_reasoning(message)


def pydantic_ai(message: Message) -> Message:
    def invalid(arguments: str) -> str:
        return json.dumps({"INVALID_JSON": arguments})

    return _arguments(message, _dumped(invalid, separators=(",", ":")))


def langgraph(message: Message) -> Message:
    return _arguments(_without_reasoning(message), _dumped(lambda text: text))


def litellm(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "content" or value}


def smolagents(message: Message) -> Message:
    """Calls become text, and so do their results."""
    if message["role"] == "tool":
        return {"role": "user", "content": _parts(f"Observation:\n{message['content']}")}
    if message["role"] != "assistant":
        return {**message, "content": _parts(message["content"])}
    text = (message["content"] or "").strip()
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        text = f"{text}\nCalling tools:\n{functions}".strip()
    return {"role": "assistant", "content": _parts(text)}


PERSONAS: Mapping[str, Callable[[Message], Message]] = {
    "strands": strands,
    "openai": openai,
    "openai_stream": openai_stream,
    "openai_agents": openai_agents,
    "pydantic_ai": pydantic_ai,
    "langgraph": langgraph,
    "litellm": litellm,
    "smolagents": smolagents,
}


def as_sent(persona: str, messages: list[Message]) -> list[Message]:
    """The conversation as that client sends it."""
    send = PERSONAS[persona]
    if persona == "smolagents":
        return [send(message) for message in messages]
    return [send(m) if m["role"] == "assistant" else dict(m) for m in messages]
