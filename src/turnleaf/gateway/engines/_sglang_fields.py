"""Single fields of a reply's JSON, read or refused by name."""

from typing import Any

import numpy as np

from turnleaf.gateway.engines._base import UntrustedReply

__all__ = ["MAX_ID", "count", "member", "shown", "untrusted"]

MAX_ID = int(np.iinfo(np.int32).max)


def untrusted(reason: str) -> UntrustedReply:
    """The error of a reply that does not add up."""
    return UntrustedReply(f"the engine's reply cannot be trusted: {reason}")


def shown(value: Any) -> str:
    """A short form of a value: a reply may be long, and its text is not for logs."""
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"


def member(value: Any, name: str, where: str) -> dict[str, Any]:
    """The object of that name in an object."""
    if not isinstance(value, dict):
        raise untrusted(f"{where} is {shown(value)}, not an object")
    found = value.get(name)
    if not isinstance(found, dict):
        raise untrusted(f"{where} has no object {name!r}, but {shown(found)}")
    return found


def count(meta: dict[str, Any], name: str, *, default: int) -> int:
    """The number of that name, from 0; `default` where it is absent or null."""
    value = meta.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise untrusted(f"{name} is {shown(value)}")
    return value
