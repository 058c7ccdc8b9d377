"""All that is read of slime itself; the only module that imports it."""

from typing import Any

__all__ = ["aborted", "decoded", "filter_output", "loaded", "scored"]


def aborted() -> bool:
    """Whether slime is aborting the training rollouts under way."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.misc import SingletonMeta

    # Asked for, and not made: a rollout function of the user's own may have no such state.
    state = SingletonMeta._instances.get(GenerateState)
    return state is not None and bool(state.aborted)


def decoded(args: Any, token_ids: list[int]) -> str:
    """The text of token ids, as slime's own rollouts would have it."""
    from slime.rollout.sglang_rollout import GenerateState

    text: str = GenerateState(args).tokenizer.decode(
        token_ids, skip_special_tokens=bool(args.rollout_skip_special_tokens)
    )
    return text


async def scored(args: Any, sample: Any) -> Any:
    """What slime's reward hub gives a sample.

    Runs in slime's own event loop, to which the hub's HTTP client belongs.
    """
    from slime.rollout.rm_hub import async_rm

    return await async_rm(args, sample)


def filter_output(*, keep: bool, reason: str | None) -> Any:
    """What a dynamic sampling filter answers."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(keep=keep, reason=reason)


def loaded(path: str) -> Any:
    """The function that a dotted path names."""
    from slime.utils.misc import load_function

    return load_function(path)
