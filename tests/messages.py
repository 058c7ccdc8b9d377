"""Messages as clients send them."""

from typing import Any


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, id_: str = "call_0", **arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, id_: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}
