"""`slime.utils.types`: the sample, which every part of slime reads and writes."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

import numpy as np

__all__ = ["Sample"]


class _Counts:
    """To and from a dict of its fields; what a dict lacks is 0."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        counts = cls()
        for name in vars(counts):
            setattr(counts, name, data.get(name, 0))
        return counts


@dataclass
class Sample:
    """One sample, with slime's fields and defaults.

    Prompts, replies and everything in between are in `tokens`; `loss_mask`, `rollout_log_probs` and
    (one entry more) `rollout_top_p_token_offsets` cover its last `response_length` ids. Where slime
    also takes tensors, numpy arrays do here.
    """

    class Status(Enum):
        """FAILED samples are trained on as they are; only ABORTED ones are generated again."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo(_Counts):
        """Speculative decoding, summed over calls."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        @property
        def spec_accept_rate(self) -> float:
            """Accepted drafted tokens / drafted tokens."""
            drafted = self.spec_draft_token_num
            return self.spec_accept_token_num / drafted if drafted > 0 else 0.0

        @property
        def spec_accept_length(self) -> float:
            """Tokens per verification."""
            return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

        def add(self, meta_info: dict[str, Any]) -> None:
            """Add one call."""
            self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
            self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
            self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
            self.completion_token_num += meta_info.get("completion_tokens", 0)

    @dataclass
    class PrefixCacheInfo(_Counts):
        """Prompt tokens, and those found in the engine's cache, summed over calls."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            """Cached tokens / prompt tokens."""
            total = self.total_prompt_tokens
            return self.cached_tokens / total if total > 0 else 0.0

        def add(self, meta_info: dict[str, Any]) -> None:
            """Add one call."""
            self.cached_tokens += meta_info.get("cached_tokens", 0)
            self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """Every attribute, those that are no fields (`trace`) included."""
        return {
            **vars(self),
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Sample":
        """The sample of `to_dict`."""
        values = {
            **data,
            "status": Sample.Status(data["status"]),
            "spec_info": Sample.SpecInfo.from_dict(data.get("spec_info", {})),
            "prefix_cache_info": Sample.PrefixCacheInfo.from_dict(
                data.get("prefix_cache_info", {})
            ),
        }
        sample = Sample()
        for name, value in values.items():
            setattr(sample, name, value)
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry under `--reward-key`."""
        if not args.reward_key:
            return self.reward
        return self.reward[args.reward_key]  # type: ignore[index]  # slime fails here, too

    @property
    def effective_response_length(self) -> int:
        """Number of tokens trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def _validate_response_metadata_lengths(self) -> None:
        """Raise ValueError unless all that is counted per response token fits `response_length`."""
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries, not {self.response_length}")
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if ids is None and offsets is None:
            return
        if ids is None or offsets is None:
            raise ValueError("top-p token ids and offsets come together")
        spans = np.asarray(offsets).reshape(-1)
        if len(spans) != self.response_length + 1 or spans[-1] != np.asarray(ids).size:
            raise ValueError(
                f"{len(spans)} top-p offsets up to {spans[-1:]} do not fit {np.asarray(ids).size} "
                f"ids and {self.response_length} tokens"
            )
