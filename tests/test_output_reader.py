"""What is told of an output while it is sampled, beside what the whole of it says.

TURNLEAF_LONG=N tries N times 150 outputs of each format, and N times 8 of each family.
"""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.strategies import cuts, output_texts, sampled_fragments
from turnleaf.core import TokenIds
from turnleaf.gateway.rendering import (
    ContentDelta,
    ContradictionError,
    Delta,
    OutputReader,
    ParsedCall,
    ReasoningDelta,
    Renderer,
)
from turnleaf.gateway.rendering._control import ControlledTokenizer
from turnleaf.gateway.rendering._outputs import OutputFormat, Parsed
from turnleaf.gateway.rendering._pieces import PieceReader
from turnleaf.gateway.rendering.parsers import (
    CallParser,
    Piece,
    Tools,
    content_of,
    parse_deepseek,
    parse_glm,
    parse_harmony,
    parse_hermes,
    parse_llama,
    parse_qwen_xml,
    split_reasoning,
)
from turnleaf.gateway.rendering.parsers._content import ContentReader
from turnleaf.gateway.rendering.parsers._search import Search

Load = Callable[..., Renderer]
LONG = int(os.environ.get("TURNLEAF_LONG", "0"))
a_few = settings(max_examples=8 * LONG or 5, suppress_health_check=list(HealthCheck))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
HERMES = '<tool_call>\n{"name": "run", "arguments": {"a": "1"}}\n</tool_call>'
QWEN_XML = "<tool_call>\n<function=run>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>run\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
LLAMA = '{"name": "run", "parameters": {"a": "1"}}'
DEEPSEEK = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{"a": "1"}\n```<｜tool▁call▁end｜>'
)
FINAL = "<|channel|>final<|message|>"
DEEPSEEK_FIRST = f"<｜tool▁calls▁begin｜>{DEEPSEEK}"
DEEPSEEK_LAST = f"\n{DEEPSEEK}<｜tool▁calls▁end｜>"
HARMONY = '<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"a": "1"}<|call|>'
CALLS = {
    "qwen3-thinking-2507": HERMES,
    "qwen3.5": QWEN_XML,
    "llama-3.1": LLAMA,
    "glm-4.5": GLM,
    "deepseek-v3": DEEPSEEK,
    "gpt-oss": HARMONY,
}
every_family = pytest.mark.parametrize("name", CALLS)

FORMATS: dict[str, tuple[CallParser | None, tuple[str, ...]]] = {
    "hermes": (parse_hermes, (HERMES,)),
    "qwen_xml": (parse_qwen_xml, (QWEN_XML,)),
    "glm": (parse_glm, (GLM,)),
    "deepseek": (parse_deepseek, (DEEPSEEK_FIRST, DEEPSEEK, DEEPSEEK_LAST)),
    "llama": (parse_llama, (LLAMA, f"<|python_tag|>{LLAMA}")),
    "harmony": (None, (HARMONY, f"{HARMONY}<|start|>assistant")),
}
every_format = pytest.mark.parametrize("name", FORMATS)
STOPS = ["STOP", "\n\n", "\nOb", "日", "</tool_call>", "<|", "|>", "n>", " ", ""]


@cache
def byte_tokenizer() -> ControlledTokenizer:
    """Its tokens are bytes, and what the formats are made of."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            *("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|call|>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<|channel|>", "<|message|>"),
            *("<|start|>", "<|end|>", "<|return|>", "<|python_tag|>", "<|constrain|>"),
        ]
    )
    return ControlledTokenizer(backend)


def format_of(name: str, *, parallel: bool = True, opened: str | None = None) -> OutputFormat:
    tokenizer = byte_tokenizer()
    ends = frozenset(tokenizer.encode("<|im_end|><|return|><|call|>"))
    return OutputFormat(
        tokenizer=tokenizer,
        stop_ids=ends,
        turn_ends=ends,
        parse_calls=FORMATS[name][0],
        split_reasoning=split_reasoning,
        read_messages=parse_harmony if name == "harmony" else None,
        calls_can_be_read=True,
        parallel_calls=parallel,
        opened=opened,
    )


def ids(tokenizer: ControlledTokenizer, text: str, *, meant: bool = True) -> list[int]:
    """The tokens of a text in which control tokens are meant, or spelled out."""
    shield = tokenizer.shield()
    return tokenizer.encode(text if meant else shield.cover(text), shield)


def message_of(deltas: Sequence[Delta]) -> tuple[str, str, tuple[ParsedCall, ...]]:
    """Content, reasoning and calls that the deltas make together."""
    content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
    reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
    return content, reasoning, tuple(each for each in deltas if isinstance(each, ParsedCall))


def check(format_: OutputFormat, calls: Sequence[str], data: st.DataObject) -> None:
    """Draw an output and its chunks; behind each it could end, in one way or another."""
    output: list[int] = []
    for text, meant, kept in data.draw(sampled_fragments(calls)):
        output += ids(format_.tokenizer, text, meant=meant)[:kept]
    tools = data.draw(st.sampled_from([TOOLS, TOOLS, TOOLS, None]))
    prompt = data.draw(st.sampled_from([None, "", "<think>", "<think>\n"]))
    prompted = None if prompt is None else np.array(ids(format_.tokenizer, prompt), dtype=np.int32)
    stops = st.lists(st.sampled_from(STOPS), max_size=2)
    stop = data.draw(st.one_of(st.just([]), st.just([]), stops))
    compare(format_, output, data.draw(cuts(len(output))), tools, prompted, stop)


def ended(
    format_: OutputFormat, output: Sequence[int], tools: Tools | None, matched: str | None = None
) -> Parsed:
    return format_.parse(
        np.array(output, dtype=np.int32),
        tools=tools,
        finish_reason="length" if matched is None else "stop",
        matched=matched,
        prompt=None,
    )


def compare(
    format_: OutputFormat,
    output: Sequence[int],
    ends: Sequence[int],
    tools: Tools | None = TOOLS,
    prompt: TokenIds | None = None,
    stop: Sequence[str] = (),
) -> None:
    reader = OutputReader(format_, tools=tools, prompt=prompt, stop=stop)
    told: list[Delta] = []
    start = 0
    for end in ends:
        told += reader.feed(output[start:end])
        start = end
        endings: list[tuple[Any, Any]] = [("length", None), ("abort", None), ("stop", None)]
        endings += [("stop", matched) for matched in [*stop, *output[max(end - 1, 0) : end]]]
        for finish_reason, matched in endings if end == len(output) else endings[end % 3 :: 3]:
            truth = format_.parse(
                np.array(output[:end], dtype=np.int32),
                tools=tools,
                finish_reason=finish_reason,
                matched=matched,
                prompt=prompt,
            )
            rest = reader.finish(truth)
            assert message_of([*told, *rest]) == (truth.content, truth.reasoning, truth.calls)


@every_format
@settings(max_examples=150 * LONG or 60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_all_that_is_told_is_the_message(name: str, data: st.DataObject) -> None:
    opened = data.draw(st.sampled_from([None, "<think>", "<think>\n"]))
    format_ = format_of(name, parallel=data.draw(st.booleans()), opened=opened)
    check(format_, FORMATS[name][1], data)


@pytest.mark.parametrize(
    ("name", "opened", "text"),
    [
        ("hermes", None, f"a\n{HERMES}\n{HERMES}\nb"),
        ("hermes", None, f"\n{HERMES}"),
        ("hermes", "<think>", "\n\nhm\n\n</think>\n\n\nyes\n"),
        ("qwen_xml", "<think>\n", f"\nhm\n</think>\n\n\n{QWEN_XML} "),
        ("glm", None, f"<think></think>\n{GLM}<tool_call>{GLM}"),
        ("deepseek", None, f"so\n{DEEPSEEK_FIRST}{DEEPSEEK_LAST}\nyes"),
        ("deepseek", None, f"{DEEPSEEK}{DEEPSEEK_FIRST}"),
        ("llama", None, f" <|python_tag|>{LLAMA}; {LLAMA}"),
        ("llama", None, f"\n{LLAMA}"),
        ("llama", None, f"\nso {LLAMA}"),
        (
            "harmony",
            None,
            f"{FINAL}a\n<|end|><|start|>assistant{FINAL}b<|end|><|start|>assistant{HARMONY}",
        ),
        ("harmony", None, f"{FINAL}a\n<|start|>assistant{HARMONY}"),
    ],
)
def test_outputs_of_each_kind(name: str, opened: str | None, text: str) -> None:
    output = ids(byte_tokenizer(), text)
    compare(format_of(name, opened=opened), output, range(1, len(output) + 1))


@settings(max_examples=30)
@given(data=st.data())
def test_messages_of_harmony(data: st.DataObject) -> None:
    bodies = st.sampled_from(["", "\n", "yes", "yes\n", " no"])
    header = st.sampled_from(["analysis", "final", "commentary"])
    said = st.builds("<|channel|>{}<|message|>{}<|end|>".format, header, bodies)
    messages = data.draw(st.lists(st.one_of(said, said, st.just(HARMONY)), max_size=4))
    output = ids(byte_tokenizer(), "<|start|>assistant".join(messages))
    format_ = format_of("harmony", parallel=data.draw(st.booleans()))
    compare(format_, output, range(1, len(output) + 1))


@every_family
@a_few
@given(data=st.data())
def test_with_the_tokens_of_a_family(load_family: Load, name: str, data: st.DataObject) -> None:
    check(load_family(name)._outputs, [CALLS[name]], data)


# What is told before the end


def told_before_the_end(reader: OutputReader, output: Sequence[int]) -> list[Delta]:
    return [delta for token in output for delta in reader.feed([token])]


THINKING = {"qwen3-thinking-2507", "qwen3.5", "qwen3.6", "glm-4.5", "deepseek-v3"}
PROSE = "The quick brown fox jumps over the lazy dog, and then\nover it again. " * 12


@every_family
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_text_and_reasoning_are_told_as_they_come(
    load_family: Load, name: str, tools: Tools | None
) -> None:
    renderer = load_family(name)
    text = f"<think>\n{PROSE}\n</think>\n\n{PROSE}" if name in THINKING else PROSE
    if name == "gpt-oss":
        text = (
            f"<|channel|>analysis<|message|>{PROSE}<|end|>"
            f"<|start|>assistant<|channel|>final<|message|>{PROSE}"
        )
    output = ids(renderer._tokenizer, text)
    assert len(output) > 150
    reader = renderer.reader(tools=tools, prompt=None, stop=["STOP", "\nObservation"])
    told: list[Delta] = []
    for end in range(1, len(output) + 1):
        told += reader.feed(output[end - 1 : end])
        so_far = text[: len(renderer.decode(np.array(output[:end])))]
        content, reasoning, _ = message_of(told)
        tags = len(text) - text.count(PROSE) * len(PROSE)
        assert len(so_far) - len(content) - len(reasoning) <= tags + len("\nagain ")
    assert (PROSE[: len(content)], reasoning) == (
        content,
        PROSE if name in {*THINKING, "gpt-oss"} else "",
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, call) for name, call in CALLS.items() if call in (HERMES, QWEN_XML, GLM)),
        ("deepseek-v3", DEEPSEEK),
    ],
)
def test_calls_are_told_once_they_are_complete(load_family: Load, name: str, call: str) -> None:
    renderer = load_family(name)
    before = "<think>\n\n</think>\n\n" if name in THINKING else ""
    before += "So.\n" + ("<｜tool▁calls▁begin｜>" if call == DEEPSEEK else "")
    reader = renderer.reader(tools=TOOLS, prompt=None, stop=[])
    ran = ParsedCall("run", '{"a": "1"}')
    first = ids(renderer._tokenizer, f"{before}{call}\n")
    told = told_before_the_end(reader, first)
    assert message_of(told) == ("So.", "", (ran,))
    second = ids(renderer._tokenizer, f"{call}\nThat is all.")
    told += told_before_the_end(reader, second)
    assert message_of(told) == ("So.\nThat is all", "", (ran, ran))
    assert message_of(told[: told.index(ran)]) == ("So.", "", ())
    rest = reader.finish(ended(renderer._outputs, [*first, *second], TOOLS))
    assert rest == (ContentDelta("."),)


def test_harmony_tells_calls_where_several_can_be_shown() -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    output = ids(byte_tokenizer(), f"{thought}{HARMONY}<|start|>assistant{HARMONY}<|start|>")
    several = OutputReader(format_of("harmony"), tools=TOOLS, prompt=None, stop=[])
    calls = (ParsedCall("run", '{"a": "1"}'),) * 2
    assert message_of(told_before_the_end(several, output)) == ("", "hm", calls)
    single = format_of("harmony", parallel=False)
    one = OutputReader(single, tools=TOOLS, prompt=None, stop=[])
    assert message_of(told_before_the_end(one, output)) == ("", "hm", ())
    # More calls than can be shown are text, and what was reasoning still is.
    parsed = ended(single, output, TOOLS)
    one.finish(parsed)
    called = HARMONY.removesuffix("<|call|>")
    assert parsed.content.count(called) == 2
    assert (parsed.reasoning, parsed.calls, parsed.malformed) == ("hm", (), 2)


def test_a_call_whose_value_spells_out_its_end() -> None:
    call = HERMES.replace('"1"', '"a </tool_call> b </tool_call> c"')
    reader = OutputReader(format_of("hermes"), tools=TOOLS, prompt=None, stop=[])
    told = told_before_the_end(reader, ids(byte_tokenizer(), call + "\n"))
    arguments = '{"a": "a </tool_call> b </tool_call> c"}'
    assert told == [ParsedCall("run", arguments)]


def test_a_stop_string_is_held_back() -> None:
    tokenizer = byte_tokenizer()
    format_ = format_of("hermes")
    reader = OutputReader(format_, tools=None, prompt=None, stop=["\nObservation:"])
    first, second = ids(tokenizer, "one\nOb two\nObserv"), ids(tokenizer, "ation: three")
    told = told_before_the_end(reader, first)
    assert message_of(told) == ("one\nOb two", "", ())
    told += told_before_the_end(reader, second)
    assert message_of(told) == ("one\nOb two", "", ())
    assert reader.finish(ended(format_, [*first, *second], None, "\nObservation:")) == ()
    # The engine may as well have gone on.
    went_on = reader.finish(ended(format_, [*first, *second], None))
    assert went_on == (ContentDelta("\nObservation: three"),)


def test_a_stop_string_that_the_reader_was_not_told() -> None:
    format_, output = format_of("hermes"), ids(byte_tokenizer(), "one STOP two")
    reader = OutputReader(format_, tools=None, prompt=None, stop=[])
    reader.feed(output)
    with pytest.raises(ContradictionError, match="tell the reader every stop string"):
        reader.finish(ended(format_, output, None, "STOP"))


# What it costs


HOSTILE = {
    "an end in a string": '<tool_call>{"a": "' + "</tool_call>" * 300,
    "no call": "<tool_call></tool_call>" * 200,
    "calls": "CALL" * 60,
    "whitespace": " \n" * 1500,
    "whitespace behind a call": "CALL" + " \n" * 1500,
    "beginnings": "<tool_cal</thin\nSTO<|star" * 150,
    "a header without end": "<|channel|>" * 1000,
    "text": PROSE * 4,
    "reasoning": "<think>" + PROSE * 4,
}


@pytest.mark.parametrize("kind", HOSTILE)
@every_format
def test_the_cost_follows_the_new_tokens(name: str, kind: str) -> None:
    text = HOSTILE[kind].replace("CALL", FORMATS[name][1][0])
    if name == "deepseek":
        text = text.replace("<tool_call>", "<｜tool▁calls▁begin｜>")
        text = text.replace("</tool_call>", "<｜tool▁call▁end｜>")
    output = ids(byte_tokenizer(), text)
    once, twice = work(name, output, output)
    assert twice < 2.2 * once


def work(name: str, *outputs: Sequence[int]) -> list[int]:
    """Calls that reading the tokens one by one has made behind each of the outputs, which follow
    each other, and characters that parsers were given."""
    reader = OutputReader(format_of(name), tools=TOOLS, prompt=None, stop=["STOP"])
    parsers = {parse.__name__ for parse, _ in CALLS_IN_TEXT}
    done, after = 0, []
    for output in outputs:
        done += calls_of(partial(told_before_the_end, reader, output), texts_of=parsers)
        after.append(done)
    return after


def calls_of(run: Callable[[], object], *, texts_of: Collection[str] = ()) -> int:
    """Calls that are made, and characters of the texts that functions of these names are given."""
    done = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal done
        done += 1
        if event == "call" and frame.f_code.co_name in texts_of:
            done += len(frame.f_locals["text"])

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return done


# The parts that it is made of


@given(
    text=st.text("ab", max_size=30),
    marks=st.lists(st.text("ab", min_size=2, max_size=6), max_size=3, unique=True),
    size=st.integers(1, 31),
)
def test_search(text: str, marks: list[str], size: int) -> None:
    search = Search(marks)
    ends = [text.find(mark) + len(mark) for mark in marks if mark in text]
    read = 0
    for start in range(0, len(text), size):
        end, mark = search.feed(text[start : start + size])
        read = start + end
        begun = [mark[:n] for mark in marks for n in range(len(mark) + 1)]
        assert search.held == max(
            (len(each) for each in begun if text[:read].endswith(each)), default=0
        )
        if mark is not None:
            assert read == min(ends)
            assert text[:read].endswith(mark)
            return
    assert not ends


def test_what_may_be_a_mark_for_long_is_not_read_again() -> None:
    marks = ["ab" * 100 + "c", "aab" + "ab" * 100, "b" * 50 + "a"]

    def read(length: int) -> None:
        search = Search(marks)
        for sign in ("ab" * length)[:length]:
            assert search.feed(sign) == (1, None)

    once, twice = (calls_of(partial(read, length)) for length in (1000, 2000))
    assert twice < 2.2 * once


@given(
    parts=st.lists(
        st.sampled_from(["", "\n", " ", "a", "a\n", "\n\na\n", ParsedCall("run", "{}")]), max_size=6
    )
)
def test_whitespace_waits_for_the_calls_that_may_come(parts: list[str | ParsedCall]) -> None:
    reader = ContentReader(calls=True)
    told: list[Delta] = []
    for at, part in enumerate(parts):
        if at and isinstance(part, str) and isinstance(parts[at - 1], str):
            reader.end_text()
        for piece in part if isinstance(part, str) else [part]:
            told += reader.feed(piece)
        content, _, _ = message_of(told)
        for more in ((), (ParsedCall("f", "{}"),), ("b", ParsedCall("f", "{}"))):
            assert content_of([*parts[: at + 1], *more]).startswith(content)


def test_a_control_token_is_certain_as_a_whole() -> None:
    reader = PieceReader(byte_tokenizer(), ["|>x"])
    held = list(reader.feed(ids(byte_tokenizer(), "a<|call|>b")))
    assert held == [Piece("a", False)]
    assert list(reader.feed(ids(byte_tokenizer(), "c"))) == [
        Piece("<|call|>", True),
        Piece("b", False),
    ]


CALLS_IN_TEXT = [
    (parse_hermes, HERMES),
    (parse_qwen_xml, QWEN_XML),
    (parse_glm, GLM),
    (parse_deepseek, DEEPSEEK_FIRST),
]


@pytest.mark.parametrize(("parse", "call"), CALLS_IN_TEXT)
@given(data=st.data())
def test_what_follows_a_call_does_not_change_it(
    parse: CallParser, call: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(call)))
    text = call[:at] + data.draw(output_texts) + call[at:]
    first = parse(text, TOOLS).parts
    more = parse(text + data.draw(output_texts), TOOLS).parts
    if len(first) == 3 and first[0] == first[2] == "":
        assert more[:2] == first[:2]
    assert parse(call, TOOLS).parts == ("", ParsedCall("run", '{"a": "1"}'), "")


@given(ids_=st.lists(st.integers(0, 300), max_size=40))
def test_bytes_of_any_kind_become_the_text_that_the_tokenizer_makes(ids_: list[int]) -> None:
    tokenizer = byte_tokenizer()
    reader = PieceReader(tokenizer, [])
    pieces = list(reader.feed(ids_))
    told = "".join(piece.text for piece in pieces)
    whole = tokenizer.decode(ids_)
    assert whole.startswith(told)
    # The last token is held back, and what may be the beginning of one character.
    assert (
        tokenizer.decode(ids_[:-4]).rstrip("\ufffd")
        == told[: len(tokenizer.decode(ids_[:-4]).rstrip("\ufffd"))]
    )
    assert all((piece.text in tokenizer._ids) for piece in pieces if piece.control)


def test_text_that_comes_at_once_is_read_in_one_piece() -> None:
    tokenizer = byte_tokenizer()
    reader = PieceReader(tokenizer, [])
    assert list(reader.feed(ids(tokenizer, f"{PROSE}<think>{PROSE}"))) == [
        Piece(PROSE, False),
        Piece("<think>", True),
        Piece(PROSE[:-1], False),
    ]


def test_a_tokenizer_whose_tokens_are_not_bytes_is_read_at_the_end() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = ControlledTokenizer(backend)
    reader = PieceReader(tokenizer, [])
    assert list(reader.feed([0, 1, 0])) == []
