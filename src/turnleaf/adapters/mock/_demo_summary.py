"""What a demo did, counted while it runs, and checked at its end."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from turnleaf.adapters.mock._balance import compare
from turnleaf.adapters.mock._ledger import Ledger
from turnleaf.adapters.mock._samples import Sample
from turnleaf.core import Rollout, Trajectory

__all__ = ["Counts", "Summary", "Tally"]

LARGEST_DIFFERENCE = 1e-4
"""Between a log-probability as it was recorded and as the trainer computes it, in float32."""


@attrs.define
class Counts:
    """What was collected.

    rollouts: for training; evaluation_rollouts are apart, and in no other number but failures.
    forks: rollouts of more than one leaf. trained_tokens, masked_tokens: of all leaves. failures:
    rollouts that did not complete. sampled_tokens: by the engine, for whatever purpose.
    """

    rollouts: int = 0
    turns: int = 0
    leaves: int = 0
    forks: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    failures: int = 0
    evaluation_rollouts: int = 0
    sampled_tokens: int = 0
    max_logprob_difference: float = 0.0


@attrs.frozen(kw_only=True)
class Summary:
    """What came of a demo.

    accuracy_before, accuracy_after: share of first answers to held-out problems that are right.
    rewards: mean of each step. phases: seconds of each. problems: what should not be, one sentence
    each; empty when every token is accounted for.
    """

    folder: str
    seed: int
    learning_rate: float
    accuracy_before: float
    accuracy_after: float
    rewards: Sequence[float]
    counts: Counts
    seconds: float
    phases: dict[str, float]
    problems: Sequence[str]

    def to_json(self) -> str:
        """One JSON object on one line; docs/demo.md lists the fields."""
        fields = attrs.asdict(self)
        return json.dumps({"version": 1} | fields.pop("counts") | fields)


class Tally:
    """Counts rollouts and writes `samples.jsonl` as they come."""

    def __init__(self, folder: Path) -> None:
        self.counts = Counts()
        self._folder = folder
        self._trajectories: list[Trajectory] = []

    def evaluated(self, rollouts: Sequence[Rollout]) -> None:
        """Take note of rollouts that are not trained."""
        self.counts.evaluation_rollouts += len(rollouts)
        self._collect(rollouts)

    def trained(
        self, step: int, rollouts: Sequence[Rollout], samples: Sequence[Sample], difference: float
    ) -> None:
        """Take note of a step's rollouts and samples; difference: of the log-probabilities."""
        counts = self.counts
        leaves = Counter(sample.rollout for sample in samples)
        counts.rollouts += len(rollouts)
        counts.turns += sum(len(rollout.trajectory) for rollout in rollouts)
        counts.leaves += len(samples)
        counts.forks += sum(number > 1 for number in leaves.values())
        trained = sum(int(sample.leaf.loss_mask.sum()) for sample in samples)
        counts.trained_tokens += trained
        counts.masked_tokens += sum(len(sample.leaf.tokens) for sample in samples) - trained
        # numpy's, unlike Python's, keeps a nan.
        counts.max_logprob_difference = float(np.maximum(counts.max_logprob_difference, difference))
        self._collect(rollouts)
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": step} | sample.to_mapping()) + "\n")

    def problems(self) -> list[str]:
        """Compare everything that was collected with the engine's ledger."""
        report = compare(Ledger.read(self._folder / "ledger.jsonl"), self._trajectories)
        self.counts.sampled_tokens = report.sampled
        problems = list(report.problems)
        if not self.counts.max_logprob_difference <= LARGEST_DIFFERENCE:
            problems.append(
                f"a log-probability differs by {self.counts.max_logprob_difference:.1e} from the "
                "trainer's own under the weights that sampled it"
            )
        return problems

    def _collect(self, rollouts: Sequence[Rollout]) -> None:
        self._trajectories += [rollout.trajectory for rollout in rollouts]
        self.counts.failures += sum(rollout.error is not None for rollout in rollouts)
