import json
import re

import pytest
from hypothesis import given

from tests.strategies import output_texts
from turnleaf.core import ContractError
from turnleaf.gateway.rendering.parsers import (
    CallParser,
    ParsedCall,
    call_parser,
    parse_hermes,
    parse_qwen_xml,
    reasoning_parser,
    split_reasoning,
)


def tool(name: str, **properties: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def xml(function: str, **parameters: str) -> str:
    values = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()
    )
    return f"<tool_call>\n<function={function}>\n{values}</function>\n</tool_call>"


def test_hermes_end_tag_in_a_string_does_not_end_the_call() -> None:  # case B10
    text = (
        '<tool_call>\n{"name": "note", "arguments": {"text": "end it with </tool_call> please"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    )
    segments = parse_hermes(text, [])
    assert segments.parts == (
        "",
        ParsedCall("note", '{"text": "end it with </tool_call> please"}'),
        "\n",
        ParsedCall("ls", "{}"),
        "",
    )
    assert segments.malformed == 0


def test_hermes_call_that_is_cut_stays_text() -> None:  # case B15
    cut = '<tool_call>{"name": "write", "arguments": {"path": "a'
    text = f'<tool_call>{{"name": "ls", "arguments": {{}}}}</tool_call>\n{cut}'
    segments = parse_hermes(text, [])
    assert segments.parts == ("", ParsedCall("ls", "{}"), f"\n{cut}")
    assert segments.malformed == 1


def test_hermes_arguments_are_the_sampled_text() -> None:
    arguments = '{ "expression":  "2+2",\t"n": 1.0, "big": 12345678901234567890, "é": "\\u00e9" }'
    text = f'both.\n<tool_call>\n{{"arguments": {arguments}, "name": "f"}}\n</tool_call> done'
    assert parse_hermes(text, []).parts == ("both.\n", ParsedCall("f", arguments), " done")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "line\nbreak"}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {}} trailing',
        "{'name': 'f', 'arguments': {}}",
        '["f", {}]',
        "",
        '{"name": "f", "arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5001,
        '{"name": "f", "arguments": ' + '{"a": ' * 101 + "1" + "}" * 102,
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_hermes_broken_call_stays_text_and_the_next_is_found(call: str) -> None:
    broken = f"<tool_call>\n{call}\n</tool_call>"
    good = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    segments = parse_hermes(f"{broken}\n{good}", [])
    assert segments.parts == (f"{broken}\n", ParsedCall("g", "{}"), "")
    assert segments.malformed == 1


def test_hermes_call_inside_a_broken_call_is_not_a_call() -> None:
    inner = "<tool_call>{'name': 'rm', 'arguments': {}}</tool_call>"
    text = f'<tool_call>{{"name": "f", "arguments": {{"t": "{inner}\n'
    assert parse_hermes(text, []).parts == (text,)
    cut = '<tool_call>{"name": "f", "arguments": {"t": "<tool_call>{}</tool_call>'
    assert parse_hermes(cut, []).parts == (cut,)


def test_hermes_call_without_end_tag_before_another_call() -> None:
    first = '<tool_call>{"name": "f", "arguments": {}}\n'
    second = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    segments = parse_hermes(first + second, [])
    assert segments.parts == (first, ParsedCall("g", "{}"), "")
    assert segments.malformed == 1


def test_qwen_xml_keeps_whitespace_and_types() -> None:  # case B12
    text = (
        "<tool_call>\n<function=edit>\n<parameter=old>\n    if ok:\n        go()\n\n</parameter>\n"
        "<parameter=zip>\n03106\n</parameter>\n<parameter=force>\nfalse\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    edit = tool(
        "edit",
        old={"type": "string"},
        zip={"type": "string"},
        force={"type": ["boolean", "null"]},
    )
    (_, call, _) = parse_qwen_xml(text, [edit]).parts
    assert isinstance(call, ParsedCall)
    assert call.name == "edit"
    assert json.loads(call.arguments) == {
        "old": "    if ok:\n        go()\n",
        "zip": "03106",
        "force": False,
    }


@pytest.mark.parametrize(
    ("described", "value", "right"),
    [
        ({"type": "string"}, "true", '"true"'),
        ({"type": "string"}, "None", '"None"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "nothing", '"nothing"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": "integer"}, "7", "7"),
        ({"type": "integer"}, "7.0", "7.0"),
        ({"type": "integer"}, "7.5", '"7.5"'),
        ({"type": "integer"}, "007", '"007"'),
        ({"type": "integer"}, "true", '"true"'),
        ({"type": "number"}, "1e2", "1e2"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "array"}, "[1,  2]", "[1,  2]"),
        ({"type": "array"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": "object"}, '{"a": [', '"{\\"a\\": ["'),
        ({"type": "object"}, '{"a":\n 1}', '{"a":\n 1}'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", "3"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', '{"x": 1}'),
        ({"$ref": "#/$defs/missing"}, "1", '"1"'),
        ({}, "1", '"1"'),
        (None, "é", '"é"'),
    ],
)
def test_qwen_xml_types(described: object, value: str, right: str) -> None:
    schema = {"properties": {"p": described}, "$defs": {"Point": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (_, call, _) = parse_qwen_xml(xml("f", p=value), tools).parts
    assert call == ParsedCall("f", f'{{"p": {right}}}')


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        ("inline", "inline"),
        ("\n\nkept\n\n", "\nkept\n"),
        ("\nsay </parameter> here\n", "say </parameter> here"),
        ("\nsay </tool_call> here\n", "say </tool_call> here"),
        ("\nsay </function> here\n", "say </function> here"),
        ("\nsay <tool_call> here\n", "say <tool_call> here"),
    ],
)
def test_qwen_xml_framing(body: str, value: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=p>{body}</parameter>\n</function>\n</tool_call>"
    (_, call, _) = parse_qwen_xml(text, []).parts
    assert call == ParsedCall("f", json.dumps({"p": value}))


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n<function=f>\n<parameter=p>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=p>\nx\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=p>\nx\n<parameter=q>\ny\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nstray\n</function>\n</tool_call>",
        "<tool_call>\nnothing\n</tool_call>",
    ],
)
def test_qwen_xml_broken_call_stays_text_and_the_next_is_found(broken: str) -> None:
    segments = parse_qwen_xml(f"{broken}\n{xml('g')}", [])
    assert segments.parts == (f"{broken}\n", ParsedCall("g", "{}"), "")
    assert segments.malformed == 1


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(xml("f", p="x"))))
def test_qwen_xml_call_that_is_cut_stays_text(end: int) -> None:
    text = xml("f", p="x")[:end]
    segments = parse_qwen_xml(text, [])
    assert segments.parts == (text,)
    assert segments.malformed == 1


def test_qwen_xml_schema_that_refers_to_itself() -> None:
    schema = {"properties": {"p": {"$ref": "#/properties/p"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (_, call, _) = parse_qwen_xml(xml("f", p="1"), tools).parts
    assert call == ParsedCall("f", '{"p": "1"}')


def covers(parts: tuple[str | ParsedCall, ...], text: str) -> bool:
    """Whether texts and calls, each call a region between its tags, are the whole text."""
    if not parts:
        return not text
    part, *others = parts
    if isinstance(part, str):
        return text.startswith(part) and covers(tuple(others), text.removeprefix(part))
    ends = [found.end() for found in re.finditer("</tool_call>", text)]
    return text.startswith("<tool_call>") and any(covers(tuple(others), text[end:]) for end in ends)


@pytest.mark.parametrize("parse", [parse_hermes, parse_qwen_xml])
@given(text=output_texts)
def test_no_text_is_lost(parse: CallParser, text: str) -> None:
    segments = parse(text, [])
    assert covers(segments.parts, text)
    for part in segments.parts:
        if isinstance(part, ParsedCall):
            assert isinstance(json.loads(part.arguments), dict)
    calls = sum(isinstance(part, ParsedCall) for part in segments.parts)
    assert calls + segments.malformed <= text.count("<tool_call>")
    assert bool(calls + segments.malformed) == ("<tool_call>" in text)


@given(text=output_texts)
def test_reasoning_loses_only_framing(text: str) -> None:
    for opened in (False, True):
        reasoning, answer = split_reasoning(text, opened)
        assert reasoning in text
        assert text.endswith(answer)
        dropped = len(text) - len(reasoning) - len(answer)
        lead = len(text) - len(text.lstrip())
        assert dropped <= lead + len("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("text", "opened", "right"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("<think>\n\n</think>\n\nyes", False, ("", "yes")),
        ("<think>hm</think>yes", False, ("hm", "yes")),
        ("<think>\n\n hm \n\n</think>\n\n\nyes\n", False, ("\n hm \n", "\nyes\n")),
        ("<think>\nhalf a thou", False, ("half a thou", "")),
        ("half a thou", True, ("half a thou", "")),
        ("hm\n</think>\n\nyes", True, ("hm", "yes")),
        ("yes", False, ("", "yes")),
        ("yes <think> no </think>", False, ("", "yes <think> no </think>")),
        ("", False, ("", "")),
    ],
)
def test_reasoning(text: str, opened: bool, right: tuple[str, str]) -> None:
    assert split_reasoning(text, opened) == right


def test_parsers_by_name() -> None:
    assert call_parser("qwen25", "") is parse_hermes
    assert call_parser("qwen3_coder", "") is parse_qwen_xml
    assert call_parser("none", "<tool_call>arguments") is None
    assert call_parser("auto", "nothing of the kind") is None
    assert reasoning_parser("none", "</think>") is None
    with pytest.raises(ContractError, match=r"tool_call_parser: 'qwen3_code'.*'qwen3_coder'"):
        call_parser("qwen3_code", "")
    with pytest.raises(ContractError, match=r"reasoning_parser: 'qwen33'.*'qwen3'"):
        reasoning_parser("qwen33", "")
