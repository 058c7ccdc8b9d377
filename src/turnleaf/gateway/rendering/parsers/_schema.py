"""Types for values that a model writes without quotes: the tool's schema decides."""

import json
from collections.abc import Mapping
from typing import Any

from turnleaf.gateway._json import DECODER, check_text
from turnleaf.gateway.rendering.parsers._base import Tools

__all__ = ["json_text", "parameters_of", "types_of"]

_PYTHON_SPELLING = {"True": "true", "False": "false", "None": "null"}


def parameters_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """The JSON schema of a tool's parameters; empty when there is none."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def types_of(key: str, schema: Mapping[str, Any]) -> set[str]:
    """JSON types that a property names, itself, by reference or as one of several."""
    properties = schema.get("properties")
    open_ = [properties.get(key)] if isinstance(properties, Mapping) else []
    types: set[str] = set()
    seen: set[int] = set()
    while open_:
        described = open_.pop()
        if not isinstance(described, Mapping) or id(described) in seen:
            continue
        seen.add(id(described))
        types.update(name for name in _listed(described.get("type")) if isinstance(name, str))
        open_.append(_resolve(described.get("$ref"), schema))
        for several in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := described.get(several), list):
                open_ += options
    return types


def _listed(named: Any) -> list[Any]:
    return named if isinstance(named, list) else [named]


def _resolve(reference: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str):
        return None
    at: Any = schema
    for step in reference.removeprefix("#/").split("/"):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at


def json_text(value: str, types: set[str]) -> str:
    """The JSON of a value that was written without quotes.

    A string stays as it is; any other type is read as JSON, booleans and null in Python's spelling
    too. A value that fits none of `types` is a string. JSON values keep their sampled text.
    """
    bare = value.strip()
    bare = _PYTHON_SPELLING.get(bare, bare)
    if "null" in types and bare == "null":
        return bare
    if "string" not in types and _fits(bare, types):
        return bare
    return json.dumps(value, ensure_ascii=False)


def _fits(text: str, types: set[str]) -> bool:
    if not types:
        return False
    try:
        value = DECODER.decode(text)
        check_text(value)
    except (ValueError, RecursionError):
        return False
    match value:
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number"})
        case float():
            return "number" in types or ("integer" in types and value.is_integer())
        case dict():
            return "object" in types
        case list():
            return "array" in types
        case _:
            return False
