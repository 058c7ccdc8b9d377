"""The demo's task, its texts as ids, and the policy before training."""

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest

from turnleaf.adapters.mock import Conversation, Policy, Recipe, sequence_logprobs, warmed_up
from turnleaf.adapters.mock._task import (
    FEEDBACK,
    answer_of,
    problems,
    question,
    question_again,
    reward,
)
from turnleaf.gateway.rendering import Renderer


@pytest.fixture(scope="module")
def conversation(checkpoint: Callable[..., Path]) -> Conversation:
    return Conversation(checkpoint("qwen3"))


def test_a_conversation_is_what_the_gateway_renders(
    conversation: Conversation, load_renderer: Callable[..., Renderer]
) -> None:
    """Ids are put together as they are in a rollout: prompt, sampled answer, what follows."""
    renderer = load_renderer("qwen3")
    digits = (3, 1, 4, 1, 5)
    messages = [{"role": "user", "content": question(digits)}]
    tokens = conversation.asked(digits)
    assert renderer.render(messages).ids.tolist() == tokens
    for answer in (4, 3):
        messages += [
            {"role": "assistant", "content": str(answer)},
            {"role": "user", "content": FEEDBACK},
        ]
        tokens += [conversation.digits[answer], conversation.end, *conversation.feedback]
        assert renderer.render(messages).ids.tolist() == tokens
    retold = [{"role": "user", "content": question_again(digits, 4)}]
    assert renderer.render(retold).ids.tolist() == conversation.retold(digits, 4)
    assert len(tokens) == 39
    assert {*tokens, *conversation.retold(digits, 4)} < {*conversation.vocabulary}
    assert len(conversation.vocabulary) == 19


@pytest.mark.parametrize(
    ("text", "answer"),
    [("7", 7), (" 0\n", 0), ("", None), ("77", None), ("seven", None), ("٣", None), ("-1", None)],
)
def test_an_answer_is_one_digit(text: str, answer: int | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("answers", "worth"),
    [([5], 1.0), ([4, 5], 0.5), ([None, 4, 5], 0.25), ([1, 2, 3], 0.0), ([], 0.0), ([None], 0.0)],
)
def test_an_early_answer_is_worth_more(answers: list[int | None], worth: float) -> None:
    assert reward(answers, (3, 1, 4, 1, 5)) == worth


def test_problems_have_any_largest_digit_and_are_the_seeds_own() -> None:
    drawn = problems(2000, seed=0, purpose="train")
    largest = np.bincount([max(digits) for digits in drawn], minlength=10)
    assert largest.min() > 150
    assert {len(digits) for digits in drawn} == {5}
    places = np.bincount([digits.index(9) for digits in drawn if max(digits) == 9], minlength=5)
    assert places.min() > 10
    assert problems(50, seed=0, purpose="train") == drawn[:50]
    assert problems(50, seed=0, purpose="held-out") != drawn[:50]
    assert problems(50, seed=1, purpose="train") != drawn[:50]


def accuracy(policy: Policy, conversation: Conversation, seed: int) -> float:
    """The probability that a first answer is right, over held-out problems."""
    drawn = problems(400, seed=seed, purpose="held-out")
    sequences = [
        [*conversation.asked(digits), conversation.digits[max(digits)], conversation.end]
        for digits in drawn
    ]
    scores = sequence_logprobs(policy, sequences)
    return float(np.mean([np.exp(score[-2] + score[-1]) for score in scores]))


def test_a_policy_begins_with_the_format_and_little_else(conversation: Conversation) -> None:
    policy = warmed_up(conversation, Recipe(), 0)
    assert 0.20 <= accuracy(policy, conversation, 0) <= 0.28
    tokens = conversation.asked((3, 1, 4, 1, 5))
    for answer in (4, 3, 1):
        said = [[*tokens, digit, conversation.end] for digit in conversation.digits]
        scores = sequence_logprobs(policy, said)
        assert sum(np.exp(score[-2]) for score in scores) > 0.98
        assert min(np.exp(score[-1]) for score in scores) > 0.9
        tokens = [*said[answer], *conversation.feedback]


def test_a_warm_up_is_the_seeds_own(conversation: Conversation) -> None:
    short = attrs.evolve(Recipe(), warm_up_updates=3, warm_up_batch=4)
    one, same, other = (warmed_up(conversation, short, seed).vector for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_held_out_problems_are_none_of_the_rows() -> None:
    rows = problems(400, seed=0, purpose="train")
    drawn = problems(500, seed=0, purpose="held-out")
    held_out = problems(500, seed=0, purpose="held-out", without=set(rows))
    assert len(held_out) == 500
    assert set(drawn) & set(rows)
    assert not set(held_out) & set(rows)
