"""`slime.rollout.sample_hooks`: `--rollout-sample-hook-path`, between generation and reward."""

import inspect
from argparse import Namespace
from typing import Any

from turnleaf.adapters.mock.slime.utils.misc import load_function
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["apply_rollout_sample_hooks", "set_current_rollout_id"]

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """The step that hooks are told."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(args: Namespace, value: Any, **kwargs: Any) -> Any:
    """Call every hook on every sample of the value; of a list, whatever its type, a plain list
    comes back.

    Raises TypeError when the value is neither, or when a hook returns neither sample nor None.
    """
    paths = getattr(args, "rollout_sample_hook_path", None) or []
    if not paths:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    if not isinstance(value, Sample):
        raise TypeError(f"rollout sample hooks take samples or lists, not {type(value).__name__}")
    arguments = {"rollout_id": _current_rollout_id, **kwargs}
    sample = value
    for path in paths:
        sample = await _hooked(path, args, sample, arguments)
    return sample


async def _hooked(path: str, args: Namespace, sample: Sample, arguments: dict[str, Any]) -> Sample:
    hook = load_function(path)
    parameters = inspect.signature(hook).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = {name: value for name, value in arguments.items() if takes_all or name in parameters}
    result = hook(args, sample, **known)
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        return sample
    if not isinstance(result, Sample):
        raise TypeError(f"rollout sample hook {path} returned {type(result).__name__}")
    return result
