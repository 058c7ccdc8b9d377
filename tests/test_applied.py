"""The short way to a chat template says what the tokenizer's own method says."""

from collections import OrderedDict
from datetime import date
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.strategies import chat_texts, chats, told_reasoning
from turnleaf.gateway.rendering._applied import AppliedTemplate

# Shows everything that it is given, in order.
SHOWS = (
    "{{ [messages, tools, documents, add_generation_prompt, eos_token] | tojson }}"
    "{{ more | tojson }}{{ day }}{{ undefined }}"
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"b": None, "a": [1, 1.0, True]}}}
]


def tokenizer_with(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def check(
    tokenizer: PreTrainedTokenizerFast,
    applied: AppliedTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    **arguments: Any,
) -> None:
    for prompt in (True, False):
        more = {"more": {"prompt": [prompt]}}
        own = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=prompt,
            tokenize=False,
            **arguments,
            **more,
        )
        assert applied.render(messages, tools, prompt=prompt, more=more) == own


@given(data=st.data(), tools=st.sampled_from([None, TOOLS]))
def test_a_template_is_given_what_the_tokenizer_gives_it(
    data: st.DataObject, tools: list[dict[str, Any]] | None
) -> None:
    tokenizer = tokenizer_with(SHOWS)
    arguments = {"day": "Monday", "enable_thinking": False, "eos_token": "</s>"}
    messages = [
        {**message, **data.draw(told_reasoning)} for message in data.draw(chats(chat_texts))
    ]
    applied = AppliedTemplate(tokenizer, arguments, "")
    assert applied.direct
    check(tokenizer, applied, messages, tools, **arguments)


def test_a_template_of_its_own_for_tools() -> None:
    tokenizer = tokenizer_with({"default": "plain " + SHOWS, "tool_use": "tools " + SHOWS})
    applied = AppliedTemplate(tokenizer, {"day": 1}, "")
    for tools in (None, TOOLS, None):
        check(tokenizer, applied, [{"role": "user", "content": "q"}], tools, day=1)


class Effort(StrEnum):
    HIGH = "high"


class Count(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"day": date(2024, 2, 3)},
        {"day": 1, "no name": 2},
        {"day": Effort.HIGH},
        {"day": [Count.ONE]},
        {"day": {"of": OrderedDict(a=1)}},
    ],
)
def test_what_is_not_plain_is_left_to_the_tokenizer(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_with(SHOWS)
    applied = AppliedTemplate(tokenizer, arguments, "")
    assert not applied.direct
    assert "takes longer" in caplog.text
    check(tokenizer, applied, [{"role": "user", "content": "q"}], TOOLS, **arguments)
