"""The user's `--custom-rm-path`, behind the function that slime calls in its place."""

from collections.abc import Sequence
from typing import Any

from turnleaf.adapters.slime import _host
from turnleaf.adapters.slime._rewards import REWARD_MODEL, USERS_PATH, number_in, reward_form
from turnleaf.adapters.slime._service import RolloutService
from turnleaf.core import AgentError, BadResultError, ContractError, RolloutError, excerpt

__all__ = ["by_users_model"]

_EXCERPT = 100


async def by_users_model(args: Any, samples: Any, **options: Any) -> Any:
    """What the user's function gives; see `turnleaf.adapters.slime.reward_model`."""
    if isinstance(samples, list) and not samples:
        return []
    path = getattr(args, USERS_PATH, None)
    if path is None:
        raise ContractError(
            f"--custom-rm-path {REWARD_MODEL} stands in for a reward model of your own: name yours"
        )
    rewards = await _host.loaded(path)(args, samples, **options)
    return _checked(args, samples, rewards) if isinstance(samples, list) else rewards


def _checked(args: Any, group: Sequence[Any], rewards: Any) -> list[Any]:
    """A group's rewards, in which a bad one is its rollout's failure or stops the run."""
    try:
        rewards = list(rewards)
    except TypeError:
        said = excerpt(rewards, length=_EXCERPT)
        raise BadResultError(f"--custom-rm-path gave a group {said}, no list of rewards") from None
    if len(rewards) != len(group):
        raise BadResultError(
            f"--custom-rm-path gave {len(rewards)} rewards for a group of {len(group)} rollouts"
        )
    return [_reward(args, member, reward) for member, reward in zip(group, rewards, strict=True)]


def _reward(args: Any, member: Any, reward: Any) -> Any:
    name = f"rollout {member.rollout_id} (sample index {member.index}, group {member.group_index})"
    if reward is None:
        error: RolloutError = AgentError(f"{name}: the group's reward model gave it no reward")
        _fail(args, member, error, removed="no reward")
        return reward_form(args, 0.0, evaluation=False)
    try:
        number = number_in(args, reward)
    except ValueError as problem:
        error = BadResultError(f"{name}: the group's reward model gave a reward that {problem}")
        if RolloutService.of(args).plan.settings.on_bad_result == "raise":
            raise error from None
        _fail(args, member, error, removed=None)
        return reward_form(args, 0.0, evaluation=False)
    return reward if isinstance(reward, dict) else reward_form(args, number, evaluation=False)


def _fail(args: Any, member: Any, error: RolloutError, *, removed: str | None) -> None:
    for sample in member if isinstance(member, list) else [member]:
        about = sample.metadata["turnleaf"]
        if about["error"] is None and about["removed"] is None:
            about.update(status="failed", error=str(error), cause=error.cause, removed=removed)
            sample.reward = reward_form(args, 0.0, evaluation=False)
            sample.remove_sample = removed is not None
