"""The samples of one rollout, as a list that slime can also treat as one sample."""

import copy
from collections.abc import Iterable
from typing import Any

__all__ = ["RolloutSamples"]


class RolloutSamples(list[Any]):
    """One sample for each leaf of a rollout, in the leaves' order; never empty.

    slime's own filters, `--partial-rollout`, `--group-rm` and `fully_async_rollout` read and write
    the members of a group as if each were one sample. So an attribute is read from the final
    leaf's sample, the last one, and written to all of them. A `loss_mask` written so takes the
    length of each; a `reward` is not taken by a rollout that failed or was removed. Where slime
    looks for a list it finds one, and flattens it.

    Has no state besides the samples; survives pickling and copying.
    """

    def __init__(self, samples: Iterable[Any] = ()) -> None:
        super().__init__(samples)

    @property
    def index(self) -> Any:
        """The rollout's index in the data source."""
        return self.__getattr__("index")

    def __getattr__(self, name: str) -> Any:
        # What the interpreter and its libraries look for is a list's own, or nothing.
        if name.startswith("__") or not self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self[-1], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self:
            raise AttributeError(f"{name!r} cannot be written: the rollout has no samples")
        if name == "loss_mask" and value is not None:
            self._write_loss_mask(value)
        elif name != "reward" or not self._has_its_reward():
            for sample in self[:-1]:
                # Leaves do not share what one of them may change.
                setattr(sample, name, copy.copy(value))
            setattr(self[-1], name, value)

    def _has_its_reward(self) -> bool:
        about = (self[-1].metadata or {}).get("turnleaf", {})
        return about.get("error") is not None or about.get("removed") is not None

    def _write_loss_mask(self, mask: Any) -> None:
        """The final leaf's mask as it is; the others' only where it says one thing throughout."""
        values = set(mask)
        if len(mask) != self[-1].response_length or (len(values) > 1 and len(self) > 1):
            raise ValueError(
                f"a loss mask of {len(mask)} tokens was written to a rollout of {len(self)} "
                f"leaves, the final one of {self[-1].response_length} tokens: write to each leaf "
                "its own, the rollout is a list of them"
            )
        for sample in self[:-1]:
            sample.loss_mask = [*values] * sample.response_length
        self[-1].loss_mask = mask
