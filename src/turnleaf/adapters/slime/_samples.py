"""From a rollout to slime's samples: one for each leaf, or a placeholder."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from turnleaf.adapters.slime._rollout_samples import RolloutSamples
from turnleaf.core import Leaf, Rollout, Turn

__all__ = ["NO_REPLAYS", "Outcome", "Replays", "clean_copy", "give", "requeues_of", "samples_of"]

REQUEUES = 2
"""How often a rollout without a turn is put back before it counts as failed."""

SAMPLED = (
    "tokens",
    "response",
    "response_length",
    "reward",
    "loss_mask",
    "weight_versions",
    "rollout_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "remove_sample",
    "teacher_log_probs",
    "status",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
)
"""Fields of slime's Sample that a rollout fills in; the others are the data source's."""


@attrs.frozen
class Replays:
    """What of the sampler's choices the trainer repeats, so that every sample must have it.

    routed_experts: (layers, top_k), or None.
    """

    top_p: bool
    routed_experts: tuple[int, int] | None


NO_REPLAYS = Replays(top_p=False, routed_experts=None)


@attrs.frozen(kw_only=True)
class Outcome:
    """What a rollout came to, for slime.

    reward: as slime reads it, or None where slime is to score it. removed: why nothing of it is
    trained and it does not vote, or None. session_id: what the session calls itself, or else
    slime's name for it. requeues: how often it was put back before because there was no turn.
    """

    rollout: Rollout
    leaves: Sequence[Leaf]
    reward: Any
    removed: str | None
    session_id: str
    requeues: int

    @property
    def status(self) -> str:
        """The name of slime's status."""
        if self.rollout.status == "aborted":
            return "ABORTED"
        if not self.leaves:
            return "FAILED" if self.requeues >= REQUEUES else "ABORTED"
        return "TRUNCATED" if self.rollout.hit_limit else "COMPLETED"

    def about(self, leaf: Leaf | None, number: int) -> dict[str, Any]:
        """What the metadata of a leaf's sample says of it, as JSON values."""
        return {
            "session_id": self.session_id,
            "status": self.rollout.status,
            "error": None if self.rollout.error is None else _encodable(self.rollout.error),
            "cause": self.rollout.cause,
            "refused": dict(self.rollout.trajectory.refused),
            "removed": self.removed,
            "requeues": self.requeues,
            "leaf": number,
            "leaves": len(self.leaves),
            "turns": [turn.id for turn in leaf.turns] if leaf else [],
            "trained_turns": [turn.id for turn in leaf.trained_turns] if leaf else [],
        }


def _encodable(error: Exception) -> str:
    """The error's text, in which nothing keeps it from being written as UTF-8."""
    return str(error).encode("utf-8", "backslashreplace").decode()


def clean_copy(sample: Any) -> Any:
    """A sample of the same type with the data source's fields, and nothing of an earlier run.

    sample: as slime hands it in; a RolloutSamples when it was put back.
    """
    source = sample[-1] if isinstance(sample, RolloutSamples) else sample
    clean = copy.copy(source)
    for field in dataclasses.fields(source):
        if field.name in SAMPLED:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            setattr(clean, field.name, default)
    # A row's metadata may be any JSON value; only an object can be read, by slime too.
    given = source.metadata if isinstance(source.metadata, dict) else {}
    clean.metadata = {
        name: copy.deepcopy(value) for name, value in given.items() if name != "turnleaf"
    }
    clean.train_metadata = copy.deepcopy(source.train_metadata)
    return clean


def give(samples: RolloutSamples, outcome: Outcome) -> None:
    """Give a rollout's samples the reward of its outcome, which was scored on the final one.

    What the reward model wrote on that one holds for all of the rollout.
    """
    final = samples[-1]
    removed = outcome.removed or ("reward model" if final.remove_sample else None)
    outcome = attrs.evolve(outcome, removed=removed)
    for number, (sample, leaf) in enumerate(zip(samples, outcome.leaves, strict=True)):
        if sample is not final:
            sample.metadata = copy.deepcopy(final.metadata)
            sample.train_metadata = copy.deepcopy(final.train_metadata)
        sample.metadata["turnleaf"] = outcome.about(leaf, number)
        sample.reward = copy.copy(outcome.reward)
        sample.remove_sample = removed is not None


def requeues_of(sample: Any) -> int:
    """How often a sample was put back because its rollout had no turn."""
    if not isinstance(sample, RolloutSamples):
        return 0
    about = sample.metadata.get("turnleaf")
    if not isinstance(about, dict):
        return 0
    had_no_turn = about["leaves"] == 0 and about["status"] != "aborted"
    requeues: int = about["requeues"] + had_no_turn
    return requeues


def samples_of(
    outcome: Outcome, clean: Any, replays: Replays, text_of: Callable[[list[int]], str]
) -> RolloutSamples:
    """One sample for each leaf, or the placeholder that keeps the batch's size.

    clean: the incoming sample, as `clean_copy` makes it. text_of: decodes token ids.
    """
    if outcome.leaves:
        filled = [
            _filled(_sibling(clean, outcome, leaf, number), leaf, replays, text_of)
            for number, leaf in enumerate(outcome.leaves)
        ]
    else:
        filled = [_placeholder(_sibling(clean, outcome, None, 0), replays)]
    seconds = _outside_generation(outcome.rollout)
    for sample in filled:
        sample.non_generation_time = seconds
    # slime counts trace events by sample, and goes on writing into the incoming sample's own.
    for sample in filled[:-1]:
        vars(sample).pop("trace", None)
    return RolloutSamples(filled)


def _sibling(clean: Any, outcome: Outcome, leaf: Leaf | None, number: int) -> Any:
    """A sample with what it has in common with the rollout's others."""
    sample = clean_copy(clean)
    # The loss is a mean per rollout id: leaves of a rollout share one, of no other rollout.
    sample.rollout_id = clean.index if clean.rollout_id is None else clean.rollout_id
    sample.metadata["turnleaf"] = outcome.about(leaf, number)
    sample.status = type(sample).Status[outcome.status]
    sample.reward = copy.copy(outcome.reward)
    sample.remove_sample = outcome.removed is not None
    return sample


def _filled(sample: Any, leaf: Leaf, replays: Replays, text_of: Callable[[list[int]], str]) -> Any:
    start = leaf.prompt_length
    sample.tokens = leaf.tokens.tolist()
    sample.response_length = len(leaf.tokens) - start
    sample.response = text_of(sample.tokens[start:])
    sample.loss_mask = leaf.loss_mask[start:].astype(int).tolist()
    sample.rollout_log_probs = leaf.logprobs[start:].tolist()
    sample.weight_versions = [
        span.version for turn in leaf.trained_turns for span in turn.weight_versions
    ]
    for turn in leaf.trained_turns:
        _count(sample, turn)
    if replays.top_p:
        ids, offsets = leaf.top_p_ids, leaf.top_p_offsets
        if ids is None or offsets is None:
            raise _lacks(sample, "the ids that top-p kept")
        sample.rollout_top_p_token_ids = ids.astype(np.int32)
        sample.rollout_top_p_token_offsets = offsets[start:].astype(np.int32)
    if replays.routed_experts is not None:
        if leaf.routed_experts is None:
            raise _lacks(sample, "its routed experts")
        sample.rollout_routed_experts = leaf.routed_experts.astype(np.int32)
    return sample


def _lacks(sample: Any, what: str) -> RuntimeError:
    turns = sample.metadata["turnleaf"]["turns"]
    return RuntimeError(f"rollout {sample.rollout_id}: not every turn of {turns} recorded {what}")


def _count(sample: Any, turn: Turn) -> None:
    """Add a turn to the sample's counts, which slime reads from the reply's `meta_info`."""
    sample.prefix_cache_info.cached_tokens += turn.cached_tokens
    sample.prefix_cache_info.total_prompt_tokens += turn.end - len(turn.output)
    if turn.speculation is not None:
        sample.spec_info.spec_accept_token_num += turn.speculation.accepted
        sample.spec_info.spec_draft_token_num += turn.speculation.drafted
        sample.spec_info.spec_verify_ct += turn.speculation.verifications
        sample.spec_info.completion_token_num += len(turn.output)


def _placeholder(sample: Any, replays: Replays) -> Any:
    """Two tokens, of which none is trained: the least that slime's trainer can lay out."""
    sample.tokens = [0, 0]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    if replays.top_p:
        sample.rollout_top_p_token_ids = np.zeros(0, dtype=np.int32)
        sample.rollout_top_p_token_offsets = np.zeros(2, dtype=np.int32)
    if replays.routed_experts is not None:
        layers, top_k = replays.routed_experts
        # slime takes a layer whose experts are all 0 for one that was not recorded.
        experts = np.arange(top_k, dtype=np.int32)
        sample.rollout_routed_experts = np.tile(experts, (1, layers, 1))
    return sample


def _outside_generation(rollout: Rollout) -> float:
    """Seconds of a session in which none of its turns was under way."""
    covered, until = 0.0, float("-inf")
    for turn in sorted(rollout.trajectory.turns, key=lambda turn: turn.timings.started):
        end = turn.timings.started + turn.timings.total
        covered += max(end - max(turn.timings.started, until), 0.0)
        until = max(until, end)
    return max(rollout.timings.session - covered, 0.0)
