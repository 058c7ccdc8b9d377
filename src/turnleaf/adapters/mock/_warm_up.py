"""The policy before training: it knows how a conversation goes, but not which digit to name."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from turnleaf.adapters.mock._policy import Policy
from turnleaf.adapters.mock._policy_training import Learner, TrainingSample
from turnleaf.adapters.mock._recipe import Recipe
from turnleaf.adapters.mock._task import FEEDBACK, REWARDS, problem, question, question_again
from turnleaf.adapters.mock._tokenizer import FileTokenizer

__all__ = ["Conversation", "warmed_up"]

_RETOLD = 0.1  # share of later tries that follow a rewritten history
_RAMP = 20  # updates over which the learning rate rises


class Conversation:
    """The task's conversations as ids, in ChatML as turnleaf's own chat template writes it.

    checkpoint: a folder with a Qwen tokenizer. end: the id that ends a message. vocabulary: every
    id of these conversations.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._encode = FileTokenizer(checkpoint / "tokenizer.json").encode
        (self.end,) = self._encode("<|im_end|>")
        self.digits = [token for digit in range(10) for token in self._encode(str(digit))]
        self.feedback = self._encode("\n") + self._asked(FEEDBACK)
        seen = [*self.digits, *self.feedback, *self.retold(range(5), 0)]
        self.vocabulary = tuple(sorted({*seen, self.end}))

    def asked(self, digits: Sequence[int]) -> list[int]:
        """The prompt of a first turn."""
        return self._asked(question(digits))

    def retold(self, digits: Sequence[int], wrong: int) -> list[int]:
        """The prompt of a turn whose history was rewritten."""
        return self._asked(question_again(digits, wrong))

    def _asked(self, text: str) -> list[int]:
        return self._encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def warmed_up(
    conversation: Conversation,
    recipe: Recipe,
    seed: int,
    *,
    updated: Callable[[], None] = lambda: None,
) -> Policy:
    """A policy that has seen demonstrations: always a digit and the end of the message, mostly
    one of those shown, and no preference for the largest. The same for a seed.

    updated: is called after each update.
    """
    policy = Policy.random(recipe.shape(conversation.vocabulary), seed)
    learner = Learner(
        policy, learning_rate=recipe.warm_up_learning_rate, betas=recipe.warm_up_betas
    )
    rng = np.random.default_rng([seed, *b"warm-up"])
    for update in range(recipe.warm_up_updates):
        learner.learning_rate = recipe.warm_up_learning_rate * min(1.0, (update + 1) / _RAMP)
        attentive = 1.0 if 2 * update < recipe.warm_up_updates else recipe.attentive
        learner.update(
            [
                _demonstration(conversation, attentive, rng, 1 / recipe.warm_up_batch)
                for _ in range(recipe.warm_up_batch)
            ]
        )
        updated()
    return policy


def _demonstration(
    conversation: Conversation, attentive: float, rng: np.random.Generator, weight: float
) -> TrainingSample:
    """Three tries at one problem, none twice, whether or not one is right: the first is not told
    from the others, so that a right one teaches nothing."""
    digits = problem(rng)
    tokens = conversation.asked(digits)
    trained: list[int] = []
    tried: list[int] = []
    for _ in REWARDS:
        if tried and rng.random() < _RETOLD:
            tokens = conversation.retold(digits, tried[-1])
            trained = []
        elif tried:
            tokens = tokens + conversation.feedback
        shown = [digit for digit in digits if digit not in tried]
        if not shown or rng.random() >= attentive:
            shown = [digit for digit in range(10) if digit not in tried]
        tried.append(int(shown[rng.integers(len(shown))]))
        trained += [len(tokens), len(tokens) + 1]
        tokens = [*tokens, conversation.digits[tried[-1]], conversation.end]
    mask = np.zeros(len(tokens), dtype=np.bool_)
    mask[trained] = True
    return TrainingSample(
        tokens=np.array(tokens),
        loss_mask=mask,
        logprobs=np.zeros(len(tokens)),
        weight=weight / len(trained),
    )
