"""A trainer for the policy that treats samples as slime does."""

from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from turnleaf.adapters.mock._policy import Policy
from turnleaf.adapters.mock._policy_training import Learner, sequence_logprobs
from turnleaf.adapters.mock._recipe import Recipe
from turnleaf.adapters.mock._samples import Sample, training_samples
from turnleaf.core import EngineError

__all__ = ["Trainer"]


class Trainer:
    """Learns from samples and hands its weights to an engine.

    policy: is changed in place. engine: the engine's HTTP client. folder: an absolute path, where
    the weights go, as `<version>.npz`; the engine reads them there.
    """

    def __init__(
        self, policy: Policy, recipe: Recipe, *, engine: httpx.AsyncClient, folder: Path
    ) -> None:
        self.policy = policy
        self._recipe = recipe
        self._engine = engine
        self._folder = folder
        self._learner = Learner(
            policy,
            learning_rate=recipe.learning_rate,
            betas=recipe.betas,
            temperature=recipe.temperature,
            clip=recipe.clip,
        )

    async def publish(self, version: str) -> None:
        """Save the weights and have the engine sample with them from now on.

        Raises EngineError when it does not.
        """
        path = self._folder / f"{version}.npz"
        self.policy.save(path)
        body = {"model_path": str(path), "weight_version": version}
        try:
            response = await self._engine.post("/update_weights_from_disk", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the engine took no weights: {type(error).__name__}") from error
        if response.status_code != 200:
            raise EngineError(f"the engine refused the weights {path}: {response.text[:500]}")

    def logprob_difference(self, samples: Sequence[Sample]) -> float:
        """The largest difference between a trained token's log-probability as it was recorded and
        as the policy, before it learns from the samples, computes it."""
        computed = sequence_logprobs(
            self.policy, [sample.leaf.tokens for sample in samples], self._recipe.temperature
        )
        return max(
            (
                float(np.abs(own - sample.leaf.logprobs)[sample.leaf.loss_mask].max(initial=0.0))
                for sample, own in zip(samples, computed, strict=True)
            ),
            default=0.0,
        )

    def learn(self, samples: Sequence[Sample]) -> None:
        """A step: some updates, each on all samples that tell anything."""
        telling = [sample for sample in training_samples(samples) if sample.weight]
        for _ in range(self._recipe.epochs):
            self._learner.update(telling)
