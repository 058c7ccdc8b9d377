"""Group-relative advantages in which every rollout counts once, however many leaves it has."""

import difflib
from typing import Any

import numpy as np
import numpy.typing as npt

from turnleaf.core._errors import SettingsError
from turnleaf.core._rewards import LARGEST_REWARD

__all__ = ["ESTIMATORS", "group_advantages"]

_SCALABLE = ("grpo", "gspo", "cispo")
"""Estimators whose advantages are divided by the group's standard deviation on request."""

ESTIMATORS = (*_SCALABLE, "reinforce_plus_plus_baseline", "dr_grpo", "rloo")
"""Advantage estimators that compare a rollout with the other rollouts of its group."""

_EPSILON = 1e-6


def group_advantages(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    rollout_ids: npt.ArrayLike,
    *,
    estimator: str,
    normalize_std: bool,
    removed: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """Advantage of each leaf: its rollout's reward compared with the rollouts of its group.

    One entry per leaf, in any order; every leaf of a rollout gets the same advantage. A rollout
    votes once in its group's statistics. With r its reward, and the mean and the unbiased std
    (n - 1) over the n rollouts of its group that vote, the advantage is

        grpo, gspo, cispo                       r - mean, / (std + 1e-6) with `normalize_std`
        reinforce_plus_plus_baseline, dr_grpo   r - mean
        rloo                                    n / (n - 1) * (r - mean)

    and 0 where fewer than two vote, or where it would be divided by a std below 1e-6.

    rewards: numbers[n]; None or nan where a removed rollout has none.
    group_ids, rollout_ids: integers[n] or strings[n]; a rollout id belongs to one group.
    estimator: one of ESTIMATORS.
    removed: bool[n], default none. A rollout is removed when all its leaves are: it does not
        vote, its advantage is 0, and its rewards are not looked at.

    Returns float64[n].

    Raises SettingsError for an unknown estimator. Raises ValueError, naming the rollout, when a
    rollout that is not removed has a reward that is not a finite float32, or leaves with
    different rewards, and when a rollout is in two groups; naming the argument when one is not
    of the kind or the length described here.

    The first formula is slime's `--advantage-estimator grpo` on groups that never fork.
    """
    if estimator not in ESTIMATORS:
        nearest = difflib.get_close_matches(str(estimator), ESTIMATORS, n=1, cutoff=0.0)
        raise SettingsError(
            f"the advantage estimator {estimator!r} is unknown; did you mean {nearest[0]!r}? "
            f"Valid are {', '.join(ESTIMATORS)}."
        )
    leaf_reward = _rewards(rewards)
    leaf_group = _entries("group_ids", group_ids, "iuU", "integers or strings", leaf_reward.shape)
    leaf_id = _entries("rollout_ids", rollout_ids, "iuU", "integers or strings", leaf_reward.shape)
    if removed is None:
        leaf_counts = np.ones(leaf_reward.shape, dtype=np.bool_)
    else:
        leaf_counts = ~_entries("removed", removed, "b", "booleans", leaf_reward.shape)

    ids, rollout = np.unique(leaf_id, return_inverse=True)
    votes = np.zeros(len(ids), dtype=np.bool_)
    votes[rollout[leaf_counts]] = True
    some_leaf = np.empty(len(ids), dtype=np.intp)
    some_leaf[rollout] = np.arange(len(rollout))
    reward, group_id = leaf_reward[some_leaf], leaf_group[some_leaf]

    def refuse(wrong: npt.NDArray[np.bool_], reason: str, remedy: str) -> None:
        if wrong.any():
            leaf = int(wrong.argmax())
            raise ValueError(
                f"rollout {leaf_id[leaf].item()!r} {reason} (entry {leaf} of the leaves); {remedy}"
            )

    read = votes[rollout]
    refuse(
        read & ~(np.abs(leaf_reward) <= LARGEST_REWARD),
        "has a reward that is not a finite number",
        "give it a reward, or mark all its leaves as removed",
    )
    refuse(
        read & (leaf_reward != reward[rollout]),
        "has leaves with different rewards",
        "score a rollout once and give every leaf that reward",
    )
    refuse(
        leaf_group != group_id[rollout],
        "is in two groups",
        "rollout ids must be unique across groups",
    )
    return _of_rollouts(reward, group_id, votes, estimator, normalize_std)[rollout]


def _of_rollouts(
    reward: npt.NDArray[np.float64],
    group_id: npt.NDArray[Any],
    votes: npt.NDArray[np.bool_],
    estimator: str,
    normalize_std: bool,
) -> npt.NDArray[np.float64]:
    """The advantage of each rollout: one entry per rollout in every array."""
    advantage = np.zeros(len(reward), dtype=np.float64)
    if not votes.any():
        return advantage
    reward = reward[votes]
    _, group = np.unique(group_id[votes], return_inverse=True)
    voters = np.bincount(group)
    # Measured from one of the group's rewards, equal rewards are 0 apart: exactly, not nearly.
    origin = np.empty(len(voters), dtype=np.float64)
    origin[group] = reward
    apart = reward - origin[group]
    centred = apart - (np.bincount(group, weights=apart) / voters)[group]

    # A rollout that votes alone is 0 from its own mean, so that any scale leaves it at 0.
    others = np.maximum(voters - 1, 1)
    scale = np.ones(len(voters), dtype=np.float64)
    if estimator == "rloo":
        scale = voters / others
    elif normalize_std and estimator in _SCALABLE:
        std = np.sqrt(np.bincount(group, weights=centred**2) / others)
        scale = np.where(std < _EPSILON, 0.0, 1.0 / (std + _EPSILON))
    advantage[votes] = centred * scale[group]
    return advantage


def _rewards(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(rewards)
    if array.dtype.kind == "O":
        array = np.asarray([np.nan if reward is None else reward for reward in array.tolist()])
    return _entries("rewards", array, "iuf", "numbers", array.shape[:1]).astype(np.float64)


def _entries(
    name: str, values: npt.ArrayLike, kinds: str, meaning: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1 or array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, but must have one entry for each of the leaves"
        )
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{name} must be {meaning}, not {array.dtype}")
    return array.astype(np.bool_) if kinds == "b" else array
