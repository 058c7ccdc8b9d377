"""What a request wants to be true of every reply, which only a masked sampling can ensure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from turnleaf.gateway.protocols._errors import bad_request, not_supported

__all__ = ["ConstraintPolicy", "Constraints", "read_constraints"]

ConstraintPolicy = Literal["hint", "refuse", "enforce"]
"""hint: nothing is masked. refuse: such a request is refused. enforce: the engine masks, and the
turn is not trained."""

_POSITION = re.compile(r"\[\d+\]")


@attrs.frozen(eq=False)
class Constraints:
    """fields: the fields that ask for it, by name. json_schema: of the reply's text; None where it
    may be any text. tools: those that the reply may call, as a schema must hold them. forced:
    whether it has to call one.
    """

    fields: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    forced: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The fields without the positions of tools."""
        return tuple(_POSITION.sub("", field) for field in self.fields)

    def __bool__(self) -> bool:
        return bool(self.fields)


def read_constraints(
    given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None
) -> Constraints:
    """What `response_format`, `tool_choice` and strict tools ask for.

    given: the request's fields that are not null. tools: checked. Raises RequestError that names
    the field at fault.
    """
    json_schema = _json_schema(given.get("response_format"))
    choice = given.get("tool_choice")
    chosen = _chosen(choice, tools or ())
    strict = [at for at, tool in enumerate(tools or ()) if _is_strict(tool, f"tools[{at}]")]
    if choice == "none":
        strict = []
    fields = []
    if json_schema is not None:
        fields.append("response_format")
    if chosen is not None:
        fields.append("tool_choice")
    fields += [f"tools[{at}].function.strict" for at in strict[:1]]
    return Constraints(
        fields=tuple(fields),
        json_schema=json_schema,
        tools=() if chosen is None and not strict else tuple(chosen or tools or ()),
        forced=chosen is not None,
    )


def _json_schema(wanted: Any) -> Mapping[str, Any] | None:
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise bad_request("response_format", "is an object with a type")
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad_request(
            "response_format.type", f"is {kind!r}, not 'text', 'json_object' or 'json_schema'"
        )
    described = wanted.get("json_schema")
    if not isinstance(described, dict):
        raise bad_request("response_format.json_schema", "is an object with a schema")
    schema = described.get("schema")
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, dict):
        raise bad_request("response_format.json_schema.schema", "is a JSON schema object")
    return schema


def _chosen(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
    """The tools of which one has to be called; None where none has to be."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice", "is 'required', but the request has no tools")
        return tools
    if not isinstance(choice, dict):
        raise bad_request("tool_choice", "is 'auto', 'none', 'required' or names a function")
    if choice.get("type", "function") != "function":
        raise not_supported("tool_choice.type", "name one function, or send only the tools allowed")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise bad_request("tool_choice.function.name", "names none of the request's tools")
    return chosen


def _is_strict(tool: Mapping[str, Any], where: str) -> bool:
    strict = tool["function"].get("strict")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{where}.function.strict", "is true or false")
    return bool(strict)
