"""From rollouts to what is trained: samples as slime's trainer takes them, one for each leaf."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import attrs

from turnleaf.adapters.mock._policy_training import TrainingSample
from turnleaf.adapters.mock._rollouts import Request
from turnleaf.core import Leaf, Rollout, WeightSpan, group_advantages

__all__ = ["Sample", "samples_of", "training_samples"]


@attrs.frozen(eq=False)
class Sample:
    """A leaf, and what its rollout earned.

    group, rollout: of the request. number: of the leaf within its rollout. reward, advantage: the
    same in every leaf of a rollout.
    """

    group: int
    rollout: int
    number: int
    leaf: Leaf
    reward: float
    advantage: float

    @property
    def weight_versions(self) -> list[WeightSpan]:
        """Which weights sampled the trained tokens, in their order; counts sum to the mask's."""
        spans = [span for turn in self.leaf.trained_turns for span in turn.weight_versions]
        return [
            WeightSpan(version, sum(span.count for span in same))
            for version, same in groupby(spans, key=lambda span: span.version)
        ]

    def to_mapping(self) -> dict[str, Any]:
        """As JSON values; docs/demo.md lists the fields."""
        leaf = self.leaf
        return {
            "group": self.group,
            "rollout": self.rollout,
            "leaf": self.number,
            "reward": self.reward,
            "advantage": self.advantage,
            "turns": [turn.id for turn in leaf.turns],
            "trained_turns": [turn.id for turn in leaf.trained_turns],
            "tokens": leaf.tokens.tolist(),
            "loss_mask": leaf.loss_mask.astype(int).tolist(),
            "logprobs": leaf.logprobs.tolist(),
            "prompt_length": leaf.prompt_length,
            "weight_versions": [[span.version, span.count] for span in self.weight_versions],
        }


def samples_of(requests: Sequence[Request], rollouts: Sequence[Rollout]) -> list[Sample]:
    """One sample for each leaf, with GRPO's advantages (not divided by the standard deviation).

    A rollout that failed earned 0, and what was sampled in it is trained. One without leaves has
    nothing to train: it is not there, and has no vote in its group.
    """
    earned = [
        (request, rollout.reward or 0.0, number, leaf)
        for request, rollout in zip(requests, rollouts, strict=True)
        for number, leaf in enumerate(rollout.trajectory.leaves())
    ]
    advantages = group_advantages(
        [reward for _, reward, _, _ in earned],
        [request.group for request, _, _, _ in earned],
        [request.rollout for request, _, _, _ in earned],
        estimator="grpo",
        normalize_std=False,
    )
    return [
        Sample(request.group, request.rollout, number, leaf, reward, float(advantage))
        for (request, reward, number, leaf), advantage in zip(earned, advantages, strict=True)
    ]


def training_samples(samples: Sequence[Sample]) -> list[TrainingSample]:
    """The same with their weight in the loss, which is the mean over rollouts of the mean over a
    rollout's trained tokens, in whichever of its leaves they are."""
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens[sample.rollout] += int(sample.leaf.loss_mask.sum())
    return [
        TrainingSample(
            tokens=sample.leaf.tokens,
            loss_mask=sample.leaf.loss_mask,
            logprobs=sample.leaf.logprobs,
            weight=sample.advantage / tokens[sample.rollout] / len(tokens),
        )
        for sample in samples
    ]
