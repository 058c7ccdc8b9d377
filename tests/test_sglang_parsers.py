"""SGLang's own parsers beside turnleaf's: what differs, and why, is told in docs/families.md."""

import json
import random
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from tests.families import FAMILIES, family_checkpoint
from tests.messages import user
from tests.sglang_stack import run_program
from tests.test_families import (
    SPELLINGS,
    TOOLS,
    TRAITS,
    Reading,
    explained,
    explanations,
    ids,
    outputs,
)
from turnleaf.gateway.rendering import Renderer

pytestmark = pytest.mark.sglang

HEADING = "Reading, beside SGLang"
PARSERS = {
    "qwen3-instruct-2507": ("qwen", None),
    "qwen3-thinking-2507": ("qwen", "qwen3-thinking"),
    "qwen3-coder": ("qwen3_coder", None),
    "qwen3.5": ("qwen3_coder", "qwen3"),
    "qwen3.6": ("qwen3_coder", "qwen3"),
    "llama-3.1": ("llama3", None),
    "glm-4.5": ("glm45", "glm45"),
    "deepseek-v3": ("deepseekv3", "deepseek-r1"),
    "gpt-oss": ("gpt-oss", "gpt-oss"),
}
VALUES = {
    "plain": "1",
    "an empty argument": "",
    "quotes in an argument": 'say "hi" and \\n',
    "an argument beyond ASCII": "é 语 🙂",
    "braces in an argument": "{x: [1}]",
    "tags in an argument": "<b>&amp;</b>",
    "lines in an argument": "a\n\nb",
    "whitespace around an argument": "\n  x \n",
}
COUNT = 80


@attrs.frozen(eq=False)
class Output:
    """An output, and the cases that are in it."""

    family: str
    text: str
    cases: frozenset[str]


def generated(name: str) -> Iterator[Output]:
    """Outputs with several of the cases at once, the same ones each time."""
    chance = random.Random(name)
    spelling, end = SPELLINGS[name], TRAITS[name].call_end if name == "gpt-oss" else ""
    opens = spelling.thought.format("").startswith("\n</think>")
    values = VALUES | {"end tag in a string": f"end it with {spelling.end_tag} please"}
    for _ in range(COUNT):
        cases = set()
        text = ""
        if opens or (TRAITS[name].reasons and chance.random() < 0.5):
            thought = chance.choice(["hm", " hm ", "one\n\ntwo"])
            cases.add("reasoning in whitespace" if thought == " hm " else "reasoning")
            text += spelling.thought.format(thought)
        function = chance.choice(["run", "run", "run", "rm"])
        case = chance.choice(sorted(values))
        call = spelling.call(function, values[case])
        cases |= {case, "unknown tool" if function == "rm" else "a call"}
        if chance.random() < 0.5 and name != "llama-3.1":
            text += spelling.text.format("I look.")
            cases.add("text and a call")
        if chance.random() < 0.2:
            call = call[: -len(spelling.end_tag) - 3]
            cases = cases - {"a call"} | {"cut call"}
        yield Output(name, text + call + ("" if "cut call" in cases else end), frozenset(cases))


def all_outputs(name: str) -> list[Output]:
    single = [Output(name, text, frozenset({case})) for case, text in outputs(name).items()]
    return [*single, *generated(name)]


def ours(renderer: Renderer, output: Output, prompt: Any) -> Reading:
    parsed = renderer.parse(
        ids(renderer, output.text),
        tools=TOOLS,
        finish_reason="length",
        matched=None,
        prompt=prompt,
    )
    return reading(
        parsed.content, parsed.reasoning, [(call.name, call.arguments) for call in parsed.calls]
    )


def reading(content: str, reasoning: str, calls: Any) -> Reading:
    """Without the line feeds around text and reasoning: SGLang leaves them where a format puts them
    beside its tags, and those are taken off here."""
    read = [(name, json.loads(arguments)) for name, arguments in calls]
    return content.strip("\n"), reasoning.strip("\n"), read


@pytest.fixture(scope="module")
def different() -> dict[str, list[Output]]:
    """The outputs of each family that the two read otherwise."""
    asked, expected = [], []
    for name in FAMILIES:
        renderer = Renderer.load(family_checkpoint(name))
        prompt = renderer.render([user("q")], TOOLS).ids
        tool_call_parser, reasoning_parser = PARSERS[name]
        for output in all_outputs(name):
            expected.append((output, ours(renderer, output, prompt)))
            asked.append(
                {
                    "text": output.text,
                    "tools": TOOLS,
                    "tool_call_parser": tool_call_parser,
                    "reasoning_parser": reasoning_parser,
                    "opened": renderer.opens_reasoning(prompt),
                }
            )
    found: dict[str, list[Output]] = {name: [] for name in FAMILIES}
    theirs = run_program("parse.py", json.dumps(asked))
    for (output, our), their in zip(expected, theirs, strict=True):
        if reading(*their) != our:
            found[output.family].append(output)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_difference_is_explained(different: dict[str, list[Output]], name: str) -> None:
    known = explained(HEADING, name)
    assert [output for output in different[name] if not output.cases & known] == []
    assert known <= {case for output in different[name] for case in output.cases}


def test_every_explanation_is_of_a_family() -> None:
    assert explanations(HEADING).keys() <= FAMILIES.keys()
