"""The demo's task: name the largest of five digits, within three tries.

Every text that the agent, the warm-up and the checks must agree on is here.
"""

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

__all__ = [
    "DIGITS",
    "FEEDBACK",
    "REWARDS",
    "answer_of",
    "problem",
    "problems",
    "question",
    "question_again",
    "reward",
]

DIGITS = 5
FEEDBACK = "wrong"
"""What the user says to a wrong answer, and to what is no answer."""
REWARDS = (1.0, 0.5, 0.25)
"""Of a rollout whose first, second or third answer is right."""


def question(digits: Sequence[int]) -> str:
    """The user's first message, such as "max 31415"."""
    return "max " + "".join(map(str, digits))


def question_again(digits: Sequence[int], wrong: int) -> str:
    """A first message that retells what came before, for an agent that rewrites its history."""
    return f"{question(digits)} not {wrong}"


def answer_of(text: str) -> int | None:
    """The digit that a reply consists of; None when it is anything else."""
    text = text.strip()
    return int(text) if len(text) == 1 and text in "0123456789" else None


def reward(answers: Sequence[int | None], digits: Sequence[int]) -> float:
    """Of a rollout: the earlier the right answer, the more."""
    for value, answer in zip(REWARDS, answers, strict=False):
        if answer == max(digits):
            return value
    return 0.0


def problem(rng: np.random.Generator) -> tuple[int, ...]:
    """Five digits. The largest is drawn uniformly, so that no constant answer is often right; the
    others are drawn uniformly up to it."""
    largest = int(rng.integers(10))
    digits = rng.integers(0, largest + 1, DIGITS)
    digits[rng.integers(DIGITS)] = largest
    return tuple(digits.tolist())


def problems(
    count: int, *, seed: int, purpose: str, without: Collection[tuple[int, ...]] = ()
) -> list[tuple[int, ...]]:
    """Problems of a run, drawn independently for each purpose ("train", "held-out", …).

    without: problems that are passed over. A longer list begins with the shorter one.
    """
    rng = np.random.default_rng([seed, *purpose.encode()])
    drawn = iter(lambda: problem(rng), None)
    return list(islice((digits for digits in drawn if digits not in without), count))
