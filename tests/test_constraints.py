"""Replies of a certain form: wished for, refused or enforced."""

import json
import logging
from typing import Any

import pytest
from openai import BadRequestError

from tests.gateway_stack import openai_client, running_gateway
from tests.messages import user

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
AS_JSON = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


STRICT = {"tools": [tool("add", strict=True), tool("wait")]}
FORCED = {"tools": [tool("add"), tool("wait")], "tool_choice": "required"}
NAMED = {**FORCED, "tool_choice": {"type": "function", "function": {"name": "wait"}}}
EACH = [
    (AS_JSON, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (STRICT, "tools[0].function.strict"),
    (FORCED, "tool_choice"),
    (NAMED, "tool_choice"),
]


async def ask(stack: Any, fields: dict[str, Any]) -> Any:
    key = await stack.open()
    async with openai_client(key) as client:
        try:
            return await client.chat.completions.create(model="m", messages=[user("?")], **fields)
        finally:
            await stack.close(key)


@pytest.mark.parametrize(("fields", "param"), EACH)
async def test_a_hint_changes_nothing_and_is_told_once(
    fields: dict[str, Any], param: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_gateway([{"text": "no"}]) as stack:
        await ask(stack, fields)
        assert stack.engine.calls[0].sampling.keys() & {"json_schema", "structural_tag"} == set()
        assert [turn.excluded for turn in stack.collected[0].turns] == [None]
    kind = param.replace("[0]", "")
    assert sum(f"asks for {kind};" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("fields", "param"), EACH)
async def test_it_can_be_refused(fields: dict[str, Any], param: str) -> None:
    async with running_gateway([], constraints="refuse") as stack:
        with pytest.raises(BadRequestError, match=r"turnleaf\.constraints") as refused:
            await ask(stack, fields)
        assert refused.value.param == param
        assert stack.engine.calls == []


@pytest.mark.parametrize("constraints", ["refuse", "enforce"])
async def test_what_asks_for_nothing_is_served(constraints: Any) -> None:
    plain = {"tools": [tool("add")], "tool_choice": "auto", "response_format": {"type": "text"}}
    async with running_gateway([{"text": "no"}] * 2, constraints=constraints) as stack:
        await ask(stack, plain)
        await ask(stack, {**STRICT, "tool_choice": "none"})
        assert [each.turns[0].excluded for each in stack.collected] == [None, None]


async def test_an_enforced_schema_reaches_the_engine_and_the_turn_is_not_trained() -> None:
    async with running_gateway([{"text": '{"sum": 4}'}], constraints="enforce") as stack:
        reply = await ask(stack, AS_JSON)
        assert reply.choices[0].message.content == '{"sum": 4}'
        assert json.loads(stack.engine.calls[0].sampling["json_schema"]) == SCHEMA
        (turn,) = stack.collected[0].turns
        assert turn.excluded == "constrained"
        assert stack.collected[0].leaves() == []


@pytest.mark.parametrize(
    ("fields", "names", "schemas", "forced"),
    [
        (STRICT, ["add", "wait"], [SCHEMA, {"type": "object"}], False),
        (FORCED, ["add", "wait"], [{"type": "object"}] * 2, True),
        (NAMED, ["wait"], [{"type": "object"}], True),
    ],
)
async def test_enforced_calls_are_written_as_the_template_does(
    fields: dict[str, Any], names: list[str], schemas: list[Any], forced: bool
) -> None:
    call = '<tool_call>\n{"name": "wait", "arguments": {"sum": 1}}\n</tool_call>'
    async with running_gateway([{"text": call}], constraints="enforce") as stack:
        reply = await ask(stack, fields)
        assert reply.choices[0].message.tool_calls[0].function.name == "wait"
        tag = json.loads(stack.engine.calls[0].sampling["structural_tag"])
        assert stack.collected[0].turns[0].excluded == "constrained"
    assert tag["triggers"] == ["<tool_call>"]
    assert tag["at_least_one"] is forced
    assert [one["schema"] for one in tag["structures"]] == schemas
    for name, one in zip(names, tag["structures"], strict=True):
        assert one["begin"] == f'<tool_call>\n{{"name": "{name}", "arguments": '
        assert one["end"] == "}\n</tool_call>"


async def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    async with running_gateway([], constraints="enforce") as stack:
        with pytest.raises(BadRequestError) as both:
            await ask(stack, {**AS_JSON, **FORCED})
        assert both.value.param == "tool_choice"
        # A schema would forbid what the model may want to call.
        with pytest.raises(BadRequestError, match="tool_choice 'none'") as calls:
            await ask(stack, {**AS_JSON, "tools": [tool("add")]})
        assert calls.value.param == "response_format"
        assert stack.engine.calls == []
    async with running_gateway([], constraints="enforce", template="qwen3_5_think") as stack:
        for fields, param in ((FORCED, "tool_choice"), (AS_JSON, "response_format")):
            with pytest.raises(BadRequestError) as refused:
                await ask(stack, fields)
            assert refused.value.param == param
        assert stack.engine.calls == []


async def test_a_schema_of_any_depth_is_refused_by_name() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"more": schema}}
    as_json = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    function = {"name": "add", "parameters": schema, "strict": True}
    for fields, param in (
        ({"response_format": as_json}, "response_format"),
        ({"tools": [{"type": "function", "function": function}]}, "tools[0].function.strict"),
    ):
        async with running_gateway([], constraints="enforce") as stack:
            with pytest.raises(BadRequestError, match="nested too deeply") as refused:
                await ask(stack, fields)
            assert refused.value.param == param
