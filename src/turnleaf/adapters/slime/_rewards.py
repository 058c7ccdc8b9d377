"""Rewards: as slime reads them, scored where the agent gave none, normalised by rollout."""

from collections.abc import Sequence
from typing import Any

from turnleaf.adapters.slime import _host
from turnleaf.adapters.slime._plan import normalises
from turnleaf.core import (
    BadResultError,
    ContractError,
    described,
    excerpt,
    group_advantages,
    is_interrupt,
    reward_number,
)

__all__ = [
    "REWARD_MODEL",
    "USERS_PATH",
    "has_reward_model",
    "normalised",
    "number_in",
    "reward_form",
    "reward_of",
    "scored",
    "take_over_reward_model",
]

REWARD_MODEL = "turnleaf.adapters.slime.reward_model"
USERS_PATH = "turnleaf_users_custom_rm_path"
"""Where slime's arguments keep the `--custom-rm-path` that ours stands in for."""
NO_CATEGORY = "none"
"""What `--log-reward-category` counts a rollout under whose agent gave the reward."""
_EXCERPT = 100


def reward_form(args: Any, reward: float, *, evaluation: bool) -> Any:
    """A reward as slime reads it: `{key: reward}` under `--reward-key`, else the number."""
    keys = [args.reward_key]
    if evaluation:
        # slime takes the evaluation's result from one and its other metrics from the other.
        keys.append(args.eval_reward_key)
    form: dict[str, Any] = dict.fromkeys([key for key in keys if key], reward)
    if not form:
        return reward
    category = args.log_reward_category
    return {category: NO_CATEGORY, **form} if category else form


def number_in(args: Any, reward: Any, *, evaluation: bool = False) -> float:
    """The number that slime will read in a reward; raises ValueError when there is none."""
    key = (args.eval_reward_key if evaluation else None) or args.reward_key
    if key and isinstance(reward, dict):
        if key not in reward:
            raise ValueError(f"has no key {key!r}, but {excerpt([*reward], length=_EXCERPT)}")
        reward = reward[key]
    # A tensor of one number is one; `item` also turns numpy's booleans into Python's.
    item = getattr(reward, "item", None)
    value = item() if callable(item) and getattr(reward, "ndim", None) == 0 else reward
    number = reward_number(value)
    if number is not None:
        return number
    hint = ": name one of its keys with --reward-key" if isinstance(reward, dict) else ""
    said = excerpt(value, length=_EXCERPT)
    raise ValueError(f"is {said}, which is no finite number{hint}")


def reward_of(args: Any, sample: Any) -> float:
    """The number in a training sample's reward; raises BadResultError that names the rollout."""
    try:
        return number_in(args, sample.reward)
    except ValueError as error:
        raise BadResultError(
            f"rollout {sample.rollout_id} (sample index {sample.index}, group "
            f"{sample.group_index}): its reward {error}"
        ) from None


def has_reward_model(args: Any, sample: Any) -> bool:
    """Whether slime's reward hub has something to score the sample with."""
    rm_type = (sample.metadata or {}).get("rm_type") or args.rm_type
    # What is no text is slime's to refuse.
    named = rm_type.strip() if isinstance(rm_type, str) else rm_type
    return bool(sample.custom_rm_path or args.custom_rm_path or named)


def take_over_reward_model(args: Any) -> None:
    """Have slime call our reward model where it would call the user's.

    After a rollout that gave a list, slime calls `--custom-rm-path` with those of the list that
    have no reward: none. The user's function, written for one sample, would break on it.

    Raises ContractError when there is no such function.
    """
    path = args.custom_rm_path
    if not path or path == REWARD_MODEL:
        return
    try:
        _host.loaded(path)
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ContractError(
            f"--custom-rm-path {path} cannot be loaded: {described(error)}"
        ) from error
    setattr(args, USERS_PATH, path)
    args.custom_rm_path = REWARD_MODEL


async def scored(args: Any, sample: Any, *, evaluation: bool) -> Any:
    """What the reward hub gives a sample, in the form that slime reads; None when it gives none.

    Raises ContractError when the hub has no such reward model, BadResultError when what it gave is
    no finite number, and whatever the reward model raises.
    """
    try:
        reward = await _host.scored(args, sample)
    except NotImplementedError as error:
        if sample.custom_rm_path or args.custom_rm_path or (sample.metadata or {}).get("rm_type"):
            raise  # the model's, or the row's
        raise ContractError(f"slime's reward hub: {error} (--rm-type, --custom-rm-path)") from error
    if reward is None:
        return None
    try:
        number = number_in(args, reward, evaluation=evaluation)
    except ValueError as error:
        raise BadResultError(f"the reward model's reward {error}") from None
    return reward if isinstance(reward, dict) else reward_form(args, number, evaluation=evaluation)


def normalised(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards and advantages, one for each sample; see `normalize_episode_rewards`."""
    raw = [_raw(args, sample) for sample in samples]
    if not normalises(args):
        return raw, raw
    # Where slime left the rollout id to be filled in, the sample is a rollout of its own.
    rollouts = [
        f"{sample.index} (sample {position})" if sample.rollout_id is None else sample.rollout_id
        for position, sample in enumerate(samples)
    ]
    for sample in samples:
        if sample.group_index is None:
            raise ValueError(f"rollout {sample.rollout_id} has no group_index: the data source's")
    advantages = group_advantages(
        raw,
        [sample.group_index for sample in samples],
        [f"{rollout}" for rollout in rollouts],
        estimator=args.advantage_estimator,
        normalize_std=bool(args.grpo_std_normalization),
        removed=[bool(sample.remove_sample) for sample in samples],
    )
    return raw, advantages.tolist()


def _raw(args: Any, sample: Any) -> float:
    try:
        return reward_of(args, sample)
    except BadResultError:
        if sample.remove_sample:
            return 0.0
        raise
