"""`slime.rollout.base_types`: what a rollout function hands back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Group", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn"]

Group = list[Any]
"""The `n_samples_per_prompt` rollouts of one prompt: each a Sample, or a list of them once the
generate function has returned one. slime reads a Sample's attributes of both."""


@dataclass
class RolloutFnTrainOutput:
    """`rollout_batch_size` groups, and metrics to be logged with them."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per data set: `rewards`, `truncated` and `samples`, three lists of the same length."""

    data: dict[str, dict[str, list[Any]]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    function: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> Any:
    """Call it; a bare list or dict, as older rollout functions return, is wrapped."""
    output = function(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    if evaluation:
        return RolloutFnEvalOutput(data=output)
    return RolloutFnTrainOutput(samples=output)
