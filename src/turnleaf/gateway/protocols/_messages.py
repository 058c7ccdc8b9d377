"""Chat messages as agents send them, brought into the one form that templates are given."""

import json
from collections.abc import Mapping
from typing import Any

import attrs

from turnleaf.gateway._json import DECODER, check_text
from turnleaf.gateway.protocols._errors import RequestError, bad_request, not_supported

__all__ = ["Message", "canonical_text", "normalise", "parse_arguments"]

Message = dict[str, Any]
"""A normalised message: `role`; `content`, always a string; where they apply `reasoning_content`,
`tool_calls` (arguments as a dict where they are a JSON object), `tool_call_id` and `name`."""

# json.dumps would make one each time.
_CANONICAL = json.JSONEncoder(sort_keys=True)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def normalise(raw: Any, where: str) -> Message:
    """Bring one message into normal form; raises RequestError that names the field at fault.

    Part lists are joined, and null, absent and empty content are all "". What templates never
    see (annotations, refusals that are null, call indices) is dropped.
    """
    if not isinstance(raw, Mapping):
        raise bad_request(where, "each message is an object")
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role", f"is {role!r}, not one of {', '.join(_ROLES)}")
    message: Message = {
        "role": _ROLES[role],
        "content": _text(raw.get("content"), f"{where}.content"),
    }
    name = raw.get("name")
    # An assistant's name is the client's own: no reply of ours had one.
    if name is not None and role != "assistant":
        message["name"] = _string(name, f"{where}.name")
    if role == "assistant":
        _add_assistant_fields(message, raw, where)
    if role == "tool" and raw.get("tool_call_id") is not None:
        message["tool_call_id"] = _string(raw["tool_call_id"], f"{where}.tool_call_id")
    return message


def canonical_text(message: Message) -> str:
    """The text by which messages are compared.

    Surrounding whitespace is ignored, and so are ids and reasoning, which the caller compares in
    its own way. Arguments are compared as parsed JSON with exact types: 1 is neither true nor 1.0.
    """
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    return _CANONICAL.encode(
        [message["role"], message.get("name"), message["content"].strip(), calls]
    )


def parse_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments as an object, or as the text that they are when they are none."""
    if not text.strip():
        return {}
    try:
        value = DECODER.decode(text)
        check_text(value)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _add_assistant_fields(message: Message, raw: Mapping[str, Any], where: str) -> None:
    if raw.get("function_call") is not None:
        raise not_supported(f"{where}.function_call", "send tool_calls instead")
    for name in ("reasoning_content", "reasoning"):
        if raw.get(name):
            message["reasoning_content"] = _string(raw[name], f"{where}.{name}")
            break
    calls = raw.get("tool_calls")
    if not calls:
        return
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls", "is a list of calls")
    message["tool_calls"] = [
        _call(call, f"{where}.tool_calls[{position}]") for position, call in enumerate(calls)
    ]


def _call(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("function"), Mapping):
        raise bad_request(where, "a call is an object with a function")
    if raw.get("type", "function") != "function":
        raise not_supported(f"{where}.type", "only calls of type 'function' exist here")
    function = raw["function"]
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    elif not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments", "is a string of JSON")
    return {
        "id": _string(raw.get("id", ""), f"{where}.id"),
        "type": "function",
        "function": {
            "name": _string(function.get("name"), f"{where}.function.name"),
            "arguments": arguments,
        },
    }


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(where, f"is a string, not {type(value).__name__}")
    return value


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(where, "is a string or a list of parts")
    return "".join(_part(part, f"{where}[{position}]") for position, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise bad_request(where, "a part is an object with a type")
    kind = part.get("type")
    if kind == "text":
        return _string(part.get("text"), f"{where}.text")
    raise _unsupported_part(where, kind)


def _unsupported_part(where: str, kind: Any) -> RequestError:
    error = not_supported(
        f"{where} of type {kind!r}", "only text parts can be turned into training samples"
    )
    return attrs.evolve(error, param=where)
