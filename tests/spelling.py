"""How the models of each family spell what they sample: thoughts, calls, ends of turns."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def _glm(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in given.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _deepseek(name: str, arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def _harmony(name: str, arguments: str) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{arguments}<|call|>"


@attrs.frozen
class Spelling:
    """thought, text: with a place for it. joint: between the parts of a reply. end: of a turn.
    ends: whatever ends a generation. broken: what no parser should take for a call, and control
    tokens where they do not belong.
    """

    call: Callable[[str, str], str]
    end: str
    ends: tuple[str, ...]
    broken: tuple[str, ...]
    thought: str | None = "<think>\n{}\n</think>\n\n"
    text: str = "{}"
    joint: str = "\n"

    def reply(self, thought: str | None, parts: list[Any]) -> str:
        """What is sampled: parts are texts, (name, arguments) of calls, and `Raw` pieces."""
        spelled = [
            part.text
            if isinstance(part, Raw)
            else self.text.format(part)
            if isinstance(part, str)
            else self.call(*part)
            for part in parts
        ]
        if thought is not None and self.thought is not None:
            return self.thought.format(thought) + self.joint.join(spelled)
        return self.joint.join(spelled)


@attrs.frozen
class Raw:
    text: str


SPELLINGS: Mapping[str, Spelling] = {
    "qwen3": Spelling(
        _hermes,
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
        (
            "<tool_call>\n{'name': § }\n</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {"a": "§',
            *("<think>", "<think>\n§", "</think>", "<|im_start|>user\n§", "</tool_call>"),
        ),
    ),
    "llama-3.1": Spelling(
        _llama,
        "<|eot_id|>",
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        (
            '{"name": "f", "parameters": {"a": "§',
            '{"name": "f"}§',
            *("<|python_tag|>", "<|start_header_id|>user<|end_header_id|>\n\n§"),
        ),
        thought=None,
        joint="; ",
    ),
    "glm-4.5": Spelling(
        _glm,
        "<|user|>",
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        (
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>§",
            *("<think>", "</think>", "<|assistant|>§", "<arg_value>§</arg_value>"),
        ),
        thought="\n<think>{}</think>\n",
    ),
    "deepseek-v3": Spelling(
        _deepseek,
        "<｜end▁of▁sentence｜>",
        ("<｜end▁of▁sentence｜>",),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{§",
            *("<｜tool▁sep｜>", "<｜User｜>§", "<｜tool▁calls▁end｜>"),
        ),
        thought=None,
    ),
    "gpt-oss": Spelling(
        _harmony,
        "<|return|>",
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{§<|call|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
            *("<|channel|>other<|message|>§", "§", "<|start|>user<|message|>§", "<|end|>"),
        ),
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        text="<|channel|>final<|message|>{}",
        joint="<|end|><|start|>assistant",
    ),
}
"""By family; § stands for a word that is found nowhere else."""
