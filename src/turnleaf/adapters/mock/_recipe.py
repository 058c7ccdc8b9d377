"""The numbers by which the demo's policy learns its task."""

from collections.abc import Sequence

import attrs

from turnleaf.adapters.mock._policy import Shape

__all__ = ["Recipe"]


@attrs.frozen
class Recipe:
    """How the policy is warmed up and trained.

    layers, width, heads, hidden, positions: its size; see `Shape`.

    warm_up_updates, warm_up_batch, warm_up_learning_rate, warm_up_betas: Adam on that many
        batches of demonstrations, in each of which somebody has three tries.
    attentive: the share of tries, in the second half of the warm-up, that name one of the five
        digits; the others name any digit. In the first half all do. No try is better than chance,
        so the share sets the accuracy with which training begins: about 0.24.

    steps, prompts, rollouts: training takes so many steps of so many prompts, each with so many
        rollouts: a group.
    epochs: updates per step, each on all of its rollouts. clip: of the probability ratio.
    learning_rate, betas: Adam's. temperature: of sampling. max_new_tokens: per turn; an answer
        takes two.
    held_out: problems on which accuracy is measured, before and after.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    hidden: int = 128
    positions: int = 96

    warm_up_updates: int = 200
    warm_up_batch: int = 64
    warm_up_learning_rate: float = 2e-3
    warm_up_betas: tuple[float, float] = (0.9, 0.99)
    attentive: float = 0.5

    steps: int = 24
    prompts: int = 16
    rollouts: int = 8
    epochs: int = 4
    clip: float = 0.2
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    temperature: float = 1.0
    max_new_tokens: int = 4
    held_out: int = 500

    def shape(self, vocabulary: Sequence[int]) -> Shape:
        """The policy's, for these token ids."""
        return Shape(
            vocabulary,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            hidden=self.hidden,
            positions=self.positions,
        )
