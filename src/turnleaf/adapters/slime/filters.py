"""Dynamic sampling filters, for slime's `--dynamic-sampling-filter-path`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnleaf.adapters.slime import _host
from turnleaf.adapters.slime._rewards import reward_of

__all__ = ["nonzero_std"]

_LEAST_STD = 1e-6


def nonzero_std(args: Any, group: Sequence[Any], **_: Any) -> Any:
    """Keep a group whose rollouts have different rewards, removed rollouts left out.

    As slime's own `check_reward_nonzero_std`, which counts the reward 0 of a rollout that was
    removed and so keeps groups in which nothing can be learned. A group in which fewer than two
    rollouts count is dropped.
    """
    # Sample hooks make plain lists of rollouts, whose leaves share one reward.
    finals = [member[-1] if isinstance(member, list) else member for member in group]
    rewards = [reward_of(args, sample) for sample in finals if not sample.remove_sample]
    keep = len(rewards) > 1 and float(np.std(rewards, ddof=1)) > _LEAST_STD
    reason = None
    if not keep:
        reason = f"zero_std_{round(rewards[0], 1)}" if rewards else "removed"
    return _host.filter_output(keep=keep, reason=reason)
