"""`slime.rollout.rm_hub`: where a sample without a reward gets one."""

import asyncio
import re
from argparse import Namespace
from typing import Any

from turnleaf.adapters.mock.slime.utils.misc import load_function

__all__ = ["async_rm", "batched_async_rm"]


async def async_rm(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    """The reward by the sample's own `custom_rm_path`, else `--custom-rm-path`, else the metadata's
    `rm_type`, else `--rm-type`.

    Of slime's types there is only "math", as the equality of texts. Raises NotImplementedError for
    another type, and for none.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return await load_function(path)(args, sample, **kwargs)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or args.rm_type or "").strip()
    if rm_type == "math":
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", sample.response)
        return int(boxed[-1:] == [str(sample.label)])
    if rm_type:
        raise NotImplementedError(f"Rule-based RM for {rm_type} is not implemented.")
    raise NotImplementedError("Rule-based RM type is not specified.")


async def batched_async_rm(args: Namespace, samples: list[Any], **kwargs: Any) -> list[Any]:
    """Rewards in the samples' order.

    `--custom-rm-path` gets the whole list in one call, an empty one too, and then no sample's own
    `custom_rm_path` is asked.
    """
    if args.custom_rm_path is not None:
        rewards: list[Any] = await load_function(args.custom_rm_path)(args, samples, **kwargs)
        return rewards
    return await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples))
