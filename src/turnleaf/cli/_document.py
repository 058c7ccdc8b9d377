"""A rollout as one JSON object, for machines."""

import json
from typing import Any

import attrs

from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Plan
from turnleaf.cli._tokens import spans
from turnleaf.core import MAX_NESTING, Leaf, is_interrupt, nesting_exceeds

__all__ = ["document", "json_result"]

VERSION = 1


def document(plan: Plan, outcome: Outcome) -> str:
    """The JSON text, on one line; docs/try.md lists the fields. The rollout's key is left out."""
    rollout = outcome.rollout
    error = rollout.error
    return outcome.hide(
        json.dumps(
            {
                "version": VERSION,
                "status": rollout.status,
                "reward": rollout.reward,
                "cause": rollout.cause,
                "error": error and {"type": type(error).__name__, "message": str(error)},
                "result": json_result(outcome),
                "scripted": plan.scripted,
                "timings": attrs.asdict(rollout.timings),
                "trajectory": rollout.trajectory.to_json().decode(),
                "leaves": [_leaf(leaf, outcome) for leaf in rollout.trajectory.leaves()],
            }
        )
    )


def _leaf(leaf: Leaf, outcome: Outcome) -> dict[str, Any]:
    return {
        "tokens": leaf.tokens.tolist(),
        "loss_mask": leaf.loss_mask.astype(int).tolist(),
        "logprobs": leaf.logprobs.tolist(),
        "prompt_length": leaf.prompt_length,
        "turns": [turn.id for turn in leaf.turns],
        "trained_turns": [turn.id for turn in leaf.trained_turns],
        "spans": [attrs.asdict(span) for span in spans(leaf, outcome.tokenizer)],
    }


def json_result(outcome: Outcome) -> object:
    """What an agent in this process returned need not be JSON; then it is told as text."""
    # Nested as deep here as where it will stand, or deeper.
    nested = [[[[outcome.rollout.result]]]]
    try:
        # Read back, for a dict of the agent's own kind may say another thing each time.
        copy = json.loads(json.dumps(nested, allow_nan=False))
    except BaseException as error:
        if is_interrupt(error):
            raise
        return outcome.printed_result
    result: object = copy[0][0][0][0]
    # One limit, where every Python has another.
    if nesting_exceeds(result, MAX_NESTING):
        return outcome.printed_result
    return result
