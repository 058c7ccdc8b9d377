"""`slime.rollout.filter_hub.base_types`: verdicts of dynamic filters, and their counts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DynamicFilterOutput",
    "MetricGatherer",
    "call_dynamic_filter",
    "should_drop_dynamic_filter_output",
]


@dataclass
class DynamicFilterOutput:
    """keep_when_insufficient: keep the group all the same when the batch could not be filled."""

    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group is left out; its place is then taken by another one."""
    needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not needed


def call_dynamic_filter(
    function: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> DynamicFilterOutput:
    """The verdict; a filter may also return a bare truth value."""
    if function is None:
        return DynamicFilterOutput(keep=True)
    output = function(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)


class MetricGatherer:
    """Counts dropped groups by reason; those without a reason are not counted."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """The counts, by the metrics' names."""
        return {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in self._dropped.items()}
