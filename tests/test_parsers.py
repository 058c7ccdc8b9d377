import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import harmony_texts, output_texts
from turnleaf.core import ContractError
from turnleaf.gateway.rendering.parsers import (
    CallParser,
    ParsedCall,
    Piece,
    call_parser,
    message_parser,
    parse_deepseek,
    parse_glm,
    parse_harmony,
    parse_hermes,
    parse_llama,
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


# Llama


@pytest.mark.parametrize("lead", ["", "\n ", "<|python_tag|>", " <|python_tag|> "])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_llama_call(lead: str, key: str) -> None:
    arguments = '{ "a":  1.0,\t"é": "\\u00e9", "b": "end it with }; {\\"name\\": 1" }'
    text = f'{lead}{{"name": "f", "{key}": {arguments}}}\n'
    assert parse_llama(text, []).parts == (ParsedCall("f", arguments),)
    assert parse_llama(f'{lead}{{"{key}": {{}}, "name": "f"}}', []).parts == (
        ParsedCall("f", "{}"),
    )


def test_llama_several_calls() -> None:
    text = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": ";"}} ;'
    calls = (ParsedCall("f", "{}"), ParsedCall("g", '{"a": ";"}'))
    assert parse_llama(text, []).parts == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1,}}',
        '{"name": "f", "parameters": {"a": NaN}}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": null}',
        '{"name": "", "parameters": {}}',
        '{"name": 3, "parameters": {}}',
        '{"parameters": {}}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '{"name": "f", "parameters": {}} and more',
        '{"name": "f", "parameters": {}} {"name": "g", "parameters": {}}',
        '{"name": "f", "parameters": {}}; {"name": "g"',
        '<|python_tag|>search.call(query="x")',
        '<|python_tag|>{"name": "f"}',
        'I look.\n{"name": "f", "parameters": {"a": 1}}',
        'I look: {"name": "f", "parameters": {"a": 1',
        '{"type": "function", "name": "f", "parameters": {"a": 1',
    ],
)
def test_llama_broken_call_stays_text(text: str) -> None:
    segments = parse_llama(text, [])
    assert segments.parts == (text,)
    assert segments.malformed == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "yes", '{"answer": 3}', "{", "[1]", '{"name": "Bob"}', 'so: {"name": "f"}'),
        '{"example": {"name": "f", "parameters": {}}}',
    ],
)
def test_llama_answer_is_no_call(text: str) -> None:
    segments = parse_llama(text, [])
    assert segments.parts == (text,)
    assert segments.malformed == 0


LLAMA_CALL = '{"name": "write", "parameters": {"path": "a}"}}'


@pytest.mark.parametrize("end", range(len('{"name":'), len(LLAMA_CALL)))
def test_llama_call_that_is_cut_stays_text(end: int) -> None:  # case B15
    segments = parse_llama(LLAMA_CALL[:end], [])
    assert segments.parts == (LLAMA_CALL[:end],)
    assert segments.malformed == 1


# GLM


def glm(function: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{function}\n{pairs}</tool_call>"


def test_glm_end_tags_in_a_value_do_not_end_the_call() -> None:  # case B10
    value = "end it with </tool_call> or </arg_value> or <tool_call>, please"
    text = f"so\n{glm('note', text=value)}\n{glm('ls')}"
    segments = parse_glm(text, [])
    note = ParsedCall("note", json.dumps({"text": value}))
    assert segments.parts == ("so\n", note, "\n", ParsedCall("ls", "{}"), "")
    assert segments.malformed == 0


def test_glm_keeps_whitespace_and_types() -> None:  # case B12
    edit = tool(
        "edit",
        old={"type": "string"},
        zip={"type": "string"},
        force={"type": ["boolean", "null"]},
        more={"type": "object"},
    )
    old = "\n    if ok:\n        go()\n\n"
    text = glm("edit", old=old, zip="03106", force="false", more='{"a":  [1]}', other="1")
    (_, call, _) = parse_glm(text, [edit]).parts
    assert isinstance(call, ParsedCall)
    assert '"more": {"a":  [1]}' in call.arguments
    assert json.loads(call.arguments) == {
        "old": old,
        "zip": "03106",
        "force": False,
        "more": {"a": [1]},
        "other": "1",
    }


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f</tool_call>",
        "<tool_call> f \n</tool_call>",
        "<tool_call>\nf<arg_key>p</arg_key><arg_value>x</arg_value></tool_call>",
        "<tool_call>f\n<arg_key>p</arg_key>  <arg_value>x</arg_value>\n\n</tool_call>",
    ],
)
def test_glm_framing(text: str) -> None:
    (_, call, _) = parse_glm(text, []).parts
    assert call in (ParsedCall("f", "{}"), ParsedCall("f", '{"p": "x"}'))


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n</tool_call>",
        "<tool_call>f\nstray</tool_call>",
        "<tool_call>f\n<arg_key>p</arg_key>\n</tool_call>",
        "<tool_call>f\n<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>x\n</tool_call>",
        "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>x\n<arg_key>q</arg_key>\n"
        "<arg_value>y</arg_value>\n</tool_call>",
        "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>p</arg_key>\n<arg_value>y</arg_value>\n</tool_call>",
    ],
)
def test_glm_broken_call_stays_text_and_the_next_is_found(broken: str) -> None:
    segments = parse_glm(f"{broken}\n{glm('g')}", [])
    assert segments.parts == (f"{broken}\n", ParsedCall("g", "{}"), "")
    assert segments.malformed == 1


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(glm("f", p="x"))))
def test_glm_call_that_is_cut_stays_text(end: int) -> None:  # case B15
    cut = glm("f", p="x")[:end]
    segments = parse_glm(f"{glm('ls')}\n{cut}", [])
    assert segments.parts == ("", ParsedCall("ls", "{}"), f"\n{cut}")
    assert segments.malformed == 1


# DeepSeek


def deepseek(*calls: tuple[str, str]) -> str:
    return (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
            "<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def test_deepseek_end_tags_in_a_string_do_not_end_the_call() -> None:  # case B10
    arguments = '{"text": "end it with\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> please"}'
    segments = parse_deepseek("so\n" + deepseek(("note", arguments), ("ls", "{}")), [])
    note = ParsedCall("note", arguments)
    assert segments.parts == ("so\n", note, "\n", ParsedCall("ls", "{}"), "")
    assert segments.malformed == 0


@pytest.mark.parametrize(
    "broken",
    [
        ("f", '{"a": 1,}'),
        ("f", '{"a": NaN}'),
        ("f", "[1]"),
        ("f", "null"),
        ("", "{}"),
        ("f", "{} trailing"),
        ("f<｜tool▁sep｜>g", "{}"),
    ],
)
def test_deepseek_broken_call_stays_text_and_the_next_is_found(broken: tuple[str, str]) -> None:
    text = deepseek(broken, ("g", "{}"))
    first, second = text.split("\n<｜tool▁call▁begin｜>")
    segments = parse_deepseek(text, [])
    assert segments.parts == (f"{first}\n", ParsedCall("g", "{}"), "")
    assert segments.malformed == 1
    assert second


def test_deepseek_call_without_the_outer_tags_is_none() -> None:
    text = deepseek(("g", "{}")).removeprefix("<｜tool▁calls▁begin｜>")
    segments = parse_deepseek(text, [])
    assert segments.parts == (text,)
    assert segments.malformed == 1


def test_deepseek_call_behind_the_outer_tags_is_none() -> None:
    text = deepseek(("f", "{}"))
    inner = deepseek(("g", "{}")).removeprefix("<｜tool▁calls▁begin｜>")
    inner = inner.removesuffix("<｜tool▁calls▁end｜>")
    segments = parse_deepseek(f"{text}so {inner}", [])
    assert segments.parts == ("", ParsedCall("f", "{}"), f"so {inner}")
    assert segments.malformed == 1
    # A tag in an argument is text; another pair of tags holds calls again.
    told = deepseek(("f", '{"a": "<｜tool▁calls▁end｜>"}'), ("g", "{}")) + deepseek(("h", "{}"))
    calls = [part.name for part in parse_deepseek(told, []).parts if isinstance(part, ParsedCall)]
    assert calls == ["f", "g", "h"]


WHOLE = deepseek(("ls", "{}"), ("write", '{"path": "a"}'))
FIRST_END = len(deepseek(("ls", "{}"))) - len("<｜tool▁calls▁end｜>")


@pytest.mark.parametrize("end", range(len("<｜tool▁calls▁begin｜>"), len(WHOLE)))
def test_deepseek_call_that_is_cut_stays_text(end: int) -> None:  # case B15
    segments = parse_deepseek(WHOLE[:end], [])
    calls = [part for part in segments.parts if isinstance(part, ParsedCall)]
    complete = WHOLE[:end].count("<｜tool▁call▁end｜>")
    assert [call.name for call in calls] == ["ls", "write"][:complete]
    cut = WHOLE[:end].count("<｜tool▁call▁begin｜>") - complete
    assert segments.malformed == (cut if complete else 1)
    if end < FIRST_END:
        assert segments.parts == (WHOLE[:end],)


# Harmony

HARMONY = re.compile(r"(<\|(?:start|end|return|call|channel|message|constrain)\|>)")


def pieces(text: str, *spelled: str) -> list[Piece]:
    """Pieces of a text whose control tokens are meant, followed by texts that spell them out."""
    meant = [Piece(piece, bool(HARMONY.fullmatch(piece))) for piece in HARMONY.split(text) if piece]
    return meant + [Piece(piece, False) for piece in spelled]


THOUGHT = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant"
LS = "<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "parts"),
    [
        ("<|channel|>final<|message|>yes<|return|>", "", ("yes",)),
        (f"{THOUGHT}<|channel|>final<|message|>yes\n<|return|>", "hm\n", ("yes\n",)),
        (THOUGHT + LS, "hm\n", (ParsedCall("ls", "{}"),)),
        (
            f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{LS}",
            "hm\n",
            ("I look.", ParsedCall("ls", "{}")),
        ),
        (
            ' to=functions.f<|channel|>commentary json<|message|> {"a":  1}\n<|call|>',
            "",
            (ParsedCall("f", '{"a":  1}'),),
        ),
        (
            "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
            "",
            (ParsedCall("f", "{}"),),
        ),
        (
            "<|channel|>commentary to=functions.f code<|message|>{}<|call|>",
            "",
            (ParsedCall("f", "{}"),),
        ),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>", "hm\n\nhm\n", ()),
        (
            "<|channel|>commentary<|message|><|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "",
            ("Yes.",),
        ),
        ("no channel, but to=functions.f", "", ("no channel, but to=functions.f",)),
        ("<|channel|>other<|message|>to=x<|end|>", "", ("<|channel|>other<|message|>to=x",)),
        (
            "<|channel|>commentary<|message|>So.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "",
            ("So.", "\nYes."),
        ),
        ("<|channel|>analysis<|message|>half a thou", "half a thou", ()),
        ("<|channel|>final<|message|>half an ans", "", ("half an ans",)),
        ("no channel at all", "", ("no channel at all",)),
        ("<|channel|>other<|message|>x<|end|>", "", ("<|channel|>other<|message|>x",)),
        ("<|channel|>fin", "", ("<|channel|>fin",)),
        ("", "", ()),
    ],
)
def test_harmony(text: str, reasoning: str, parts: tuple[object, ...]) -> None:
    got, segments = parse_harmony(pieces(text), calls=True)
    assert got == reasoning
    assert segments.parts == parts
    assert segments.malformed == 0


def test_harmony_calls_only_where_they_are_wanted() -> None:
    reasoning, segments = parse_harmony(pieces(THOUGHT + LS), calls=False)
    assert reasoning == "hm\n"
    assert segments.parts == (f"<|start|>assistant{LS}".removesuffix("<|call|>"),)
    assert segments.malformed == 0


def test_harmony_structure_is_made_of_control_tokens() -> None:  # case B10
    start = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "'
    spelled = "end it with <|call|> or <|end|><|start|>assistant"
    text = [*pieces(start, spelled + '"}'), Piece("<|call|>", True)]
    _, segments = parse_harmony(text, calls=True)
    assert segments.parts == (ParsedCall("note", f'{{"text": "{spelled}"}}'),)
    _, segments = parse_harmony(pieces("", "<|channel|>final<|message|>no message"), calls=True)
    assert segments.parts == ("<|channel|>final<|message|>no message",)
    header = [Piece("<|channel|>", True), Piece("final<|x|>", False), Piece("<|message|>", True)]
    assert parse_harmony(header, calls=True)[1].parts == ("<|channel|>final<|x|><|message|>",)


@pytest.mark.parametrize(
    "broken",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|return|>",
        "<|channel|>commentary to=functions.f json<|message|>{'a': 1}<|call|>",
        "<|channel|>commentary to=functions.f json<|message|>[1]<|call|>",
        "<|channel|>commentary to=functions.f json<|message|>{} trailing<|call|>",
        "<|channel|>commentary to=functions.f json<|message|>{}<|channel|>{}<|call|>",
        "<|channel|>commentary to=functions. json<|message|>{}<|call|>",
        "<|channel|>commentary to=python code<|message|>{}<|call|>",
        "<|channel|>analysis to=functions.f json<|message|>{}<|call|>",
        " to=functions.f<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f<|call|>",
    ],
)
def test_harmony_broken_call_stays_text_and_the_next_is_found(broken: str) -> None:
    _, segments = parse_harmony(pieces(f"{broken}<|start|>assistant{LS}"), calls=True)
    assert segments.parts == (broken, ParsedCall("ls", "{}"))
    assert segments.malformed == 1


@pytest.mark.parametrize("end", range(len("<|channel|>commentary to="), len(LS)))
def test_harmony_call_that_is_cut_stays_text(end: int) -> None:  # case B15
    cut = LS[:end]
    _, segments = parse_harmony(pieces(f"{LS}<|start|>assistant{cut}"), calls=True)
    assert segments.parts == (ParsedCall("ls", "{}"), f"<|start|>assistant{cut}")
    assert segments.malformed == 1


def test_harmony_header_that_never_ends_takes_no_longer_than_its_text() -> None:
    header = [Piece("<|channel|>", True), Piece("commentary" + "\n" * 100_000, False)]
    began = time.monotonic()
    _, segments = parse_harmony(header, calls=True)
    assert time.monotonic() - began < 5
    assert segments.malformed == 0


@given(parts=st.lists(st.tuples(harmony_texts, st.booleans()), max_size=12))
def test_harmony_loses_nothing_but_structure(parts: list[tuple[str, bool]]) -> None:
    given_ = [Piece(text, control) for text, control in parts]
    reasoning, segments = parse_harmony(given_, calls=True)
    kept = reasoning + "".join(
        part if isinstance(part, str) else part.name + part.arguments for part in segments.parts
    )
    for piece in given_:
        if not piece.control and not re.search(
            r"analysis|commentary|final|assistant|to=|json", piece.text
        ):
            assert piece.text.strip() in kept


def covers(parts: tuple[str | ParsedCall, ...], text: str) -> bool:
    """Whether texts and calls, each call a region between its tags, are the whole text."""
    if not parts:
        return not text
    part, *others = parts
    if isinstance(part, str):
        return text.startswith(part) and covers(tuple(others), text.removeprefix(part))
    ends = [found.end() for found in re.finditer("</tool_call>", text)]
    return text.startswith("<tool_call>") and any(covers(tuple(others), text[end:]) for end in ends)


@pytest.mark.parametrize("parse", [parse_hermes, parse_qwen_xml, parse_glm])
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


@pytest.mark.parametrize("parse", [parse_llama, parse_deepseek])
@given(text=output_texts)
def test_calls_without_tags_of_their_own(parse: CallParser, text: str) -> None:
    segments = parse(text, [])
    calls = [part for part in segments.parts if isinstance(part, ParsedCall)]
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.arguments in text
    if not calls:
        assert segments.parts == (text,)


def test_parsers_by_name() -> None:
    assert call_parser("qwen25", "") is parse_hermes
    assert call_parser("qwen3_coder", "") is parse_qwen_xml
    assert call_parser("llama3", "") is parse_llama
    assert call_parser("glm45", "") is parse_glm
    assert call_parser("deepseekv3", "") is parse_deepseek
    assert call_parser("gpt-oss", "") is None
    assert call_parser("none", "<tool_call>arguments") is None
    assert call_parser("auto", "nothing of the kind") is None
    assert reasoning_parser("none", "</think>") is None
    with pytest.raises(ContractError, match=r"tool_call_parser: 'qwen3_code'.*'qwen3_coder'"):
        call_parser("qwen3_code", "")
    with pytest.raises(ContractError, match=r"reasoning_parser: 'qwen33'.*'qwen3'"):
        reasoning_parser("qwen33", "")


def test_a_format_of_messages_reads_calls_and_reasoning() -> None:
    template = "<|start|><|channel|><|message|>"
    assert message_parser("auto", "auto", template) is parse_harmony
    assert message_parser("none", "auto", template) is parse_harmony
    assert message_parser("gpt-oss", "gpt-oss", "") is parse_harmony
    assert message_parser("hermes", "none", template) is None
    assert message_parser("auto", "auto", "<|message|>") is None
    for calls, reasoning in (("hermes", "auto"), ("gpt-oss", "qwen3"), ("auto", "none")):
        with pytest.raises(ContractError, match="do not go together"):
            message_parser(calls, reasoning, template)


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "run", "arguments": {"s": "x"}}',
        "I think I should not",
        "run junk here\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n",
    ],
)
def test_what_is_no_name_in_glms_format_is_text_and_flagged(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    segments = parse_glm(text, [])
    assert (segments.parts, segments.malformed) == ((text,), 1)
