"""`slime.utils.metric_utils`: what is logged of rewards and lengths."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnleaf.adapters.mock.slime._require import require

__all__ = ["compute_pass_rate", "compute_statistics", "dict_add_prefix", "has_repetition"]


def dict_add_prefix(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The same values, under longer names."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and extremes."""
    array = np.array(values)
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "max": float(array.max()),
        "min": float(array.min()),
    }


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, … `group_size`, by the unbiased estimate 1 − C(n−c, k) / C(n, k).

    Rewards come group by group, and count as passed when they are 1. Raises AssertionError when
    the groups are not all of `group_size`.
    """
    if group_size == 1:
        return {}
    groups = len(flat_rewards) // group_size if num_groups is None else num_groups
    require(
        len(flat_rewards) == groups * group_size,
        f"{len(flat_rewards)} rewards are not {groups} groups of {group_size}",
    )
    passed = [
        sum(reward == 1 for reward in flat_rewards[start : start + group_size])
        for start in range(0, groups * group_size, group_size)
    ]
    sizes = [2**power for power in range(int(math.log2(group_size)) + 1)]
    return {
        f"pass@{k}": sum(
            1 - math.comb(group_size - count, k) / math.comb(group_size, k) for count in passed
        )
        / groups
        for k in sizes
    }


def has_repetition(text: str) -> bool:
    """Whether the last 10,000 of more characters compress by more than ten times."""
    tail = text[-10_000:].encode()
    return len(text) > 10_000 and len(tail) / len(zlib.compress(tail, 9)) > 10
