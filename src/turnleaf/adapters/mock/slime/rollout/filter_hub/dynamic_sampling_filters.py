"""`slime.rollout.filter_hub.dynamic_sampling_filters`: the filters that come with slime."""

import math
from argparse import Namespace
from typing import Any

import numpy as np

from turnleaf.adapters.mock.slime.rollout.base_types import Group
from turnleaf.adapters.mock.slime.rollout.filter_hub.base_types import DynamicFilterOutput

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]


def check_reward_nonzero_std(args: Namespace, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ; it asks every member, a list too, for its reward."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    values = [0.0 + reward for reward in rewards]
    # Undefined for a single rollout, whose group is therefore dropped.
    deviation = np.std(values, ddof=1) if len(values) > 1 else math.nan
    keep = bool(deviation > 1e-6)
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: Group, **kwargs: Any
) -> DynamicFilterOutput:
    """The same, but no further groups are generated to replace those it would drop."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
