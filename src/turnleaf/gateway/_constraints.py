"""What becomes of a request's wish for replies of a certain form.

A mask on the logits changes the probabilities of what is sampled, and a trainer that computes them
again does so without the mask: such a turn cannot be trained.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from turnleaf.gateway.protocols import (
    ConstraintPolicy,
    Constraints,
    bad_request,
    not_supported,
)
from turnleaf.gateway.rendering import CallFrame

__all__ = ["constrained_sampling"]


def constrained_sampling(
    constraints: Constraints,
    policy: ConstraintPolicy,
    *,
    call_frame: Callable[[str], CallFrame] | None,
    may_call: bool,
) -> Mapping[str, Any] | None:
    """SGLang's sampling parameters that enforce constraints; None when nothing is to be enforced.

    may_call: the reply may call tools. call_frame: how a call of a function is written around its
    arguments; None when they are not JSON, or when the engine would not be told. Raises
    RequestError, naming the field, for what is refused or cannot be enforced.
    """
    if not constraints or policy == "hint":
        return None
    field = constraints.fields[0]
    if policy == "refuse":
        raise not_supported(field, "the trainer's setting turnleaf.constraints refuses it")
    if constraints.json_schema is not None:
        if constraints.tools:
            raise not_supported(
                constraints.fields[-1], "it cannot be enforced together with response_format"
            )
        if may_call:
            raise not_supported(
                field,
                "it cannot be enforced while the reply may call tools, since it would forbid all "
                "calls; send tool_choice 'none' or no tools",
            )
        return {"json_schema": _json(constraints.json_schema, field)}
    if call_frame is None:
        raise not_supported(
            field,
            "it cannot be enforced in this model's format of tool calls, or behind the engine's "
            "router, as the gateway's log says",
        )
    return {"structural_tag": _json(_structural_tag(constraints, call_frame), field)}


def _json(wanted: Mapping[str, Any], field: str) -> str:
    try:
        return orjson.dumps(wanted).decode()
    except orjson.JSONEncodeError:
        raise bad_request(field, "its schema is nested too deeply") from None


def _structural_tag(
    constraints: Constraints, call_frame: Callable[[str], CallFrame]
) -> dict[str, Any]:
    structures, triggers = [], set()
    for tool in constraints.tools:
        function = tool["function"]
        frame = call_frame(function["name"])
        schema = function.get("parameters") if function.get("strict") else None
        structures.append(
            {"begin": frame.begin, "schema": schema or {"type": "object"}, "end": frame.end}
        )
        triggers.add(frame.trigger)
    return {
        "type": "structural_tag",
        "structures": structures,
        "triggers": sorted(triggers),
        "at_least_one": constraints.forced,
    }
