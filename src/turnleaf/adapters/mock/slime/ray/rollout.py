"""`slime.ray.rollout`: from a step's rollouts to what the trainer is given."""

import itertools
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from turnleaf.adapters.mock.slime._require import require
from turnleaf.adapters.mock.slime.ray._metrics import (
    _log_eval_rollout_data,
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
)
from turnleaf.adapters.mock.slime.rollout.base_types import call_rollout_fn
from turnleaf.adapters.mock.slime.utils.data import get_source
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = [
    "RolloutManager",
    "_log_eval_rollout_data",
    "_validate_rollout_id_annotated",
    "compute_metrics_from_samples",
    "compute_perf_metrics_from_samples",
]

_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_STD_NORMALISED = ("grpo", "gspo", "cispo")


class RolloutManager:
    """slime's conversion of rollouts; whoever makes one sets the attributes, as slime's engines,
    which its own initialiser starts, are not here."""

    args: Namespace
    data_source: Any
    generate_rollout: Callable[..., Any]
    eval_generate_rollout: Callable[..., Any]
    custom_reward_post_process_func: Callable[..., Any] | None
    custom_convert_samples_to_train_data_func: Callable[..., Any] | None

    def _get_rollout_data(self, rollout_id: int) -> tuple[list[Any], dict[str, Any] | None]:
        """A step's samples in one flat list, and metrics.

        The first element of each level stands for all: rollouts that are lists beside rollouts
        that are not end in a TypeError, or stay in the list.
        """
        output = call_rollout_fn(
            self.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False
        )
        data = output.samples
        _validate_rollout_id_annotated(data)
        while isinstance(data[0], list):
            data = list(itertools.chain.from_iterable(data))
        return data, output.metrics

    def _post_process_rewards(self, samples: list[Sample]) -> tuple[list[Any], list[Any]]:
        """Raw and normalised rewards: by `--custom-reward-post-process-path`, or by slime.

        slime takes every `n_samples_per_prompt` in a row for a group. When the number of samples is
        not that of rollouts, the whole batch is one group. Removed samples count.
        """
        if self.custom_reward_post_process_func is not None:
            custom: tuple[list[Any], list[Any]] = self.custom_reward_post_process_func(
                self.args, samples
            )
            return custom
        args = self.args
        raw = [sample.get_reward_value(args) for sample in samples]
        if args.advantage_estimator not in _NORMALISED or not args.rewards_normalization:
            return raw, raw
        size = args.n_samples_per_prompt
        if len(raw) != size * args.rollout_batch_size:
            size = len(raw)
        # Where numpy would take None and "1" for numbers, tensors do not.
        rewards = np.array([0.0 + reward for reward in raw], dtype=np.float32).reshape(-1, size)
        rewards = rewards - rewards.mean(axis=-1, keepdims=True)
        if args.advantage_estimator in _STD_NORMALISED and args.grpo_std_normalization:
            rewards = rewards / (rewards.std(axis=-1, ddof=1, keepdims=True) + np.float32(1e-6))
        return raw, rewards.reshape(-1).tolist()

    def _convert_samples_to_train_data(self, samples: list[Sample]) -> dict[str, list[Any]]:
        """Columns, one entry per sample. What the first sample has decides about several.

        Raises AssertionError or ValueError when a sample's lengths do not fit together.
        """
        if self.custom_convert_samples_to_train_data_func is not None:
            converted: dict[str, list[Any]] = self.custom_convert_samples_to_train_data_func(
                self.args, samples
            )
            return converted
        raw, rewards = self._post_process_rewards(samples)
        require(len(raw) == len(samples) == len(rewards), "not one reward per sample")
        rollout_ids = _filled_in([sample.rollout_id for sample in samples])
        loss_masks = [_loss_mask(sample) for sample in samples]
        trained: Counter[int] = Counter()
        for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
            trained[rollout_id] += sum(mask)
        data: dict[str, list[Any]] = {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rewards": rewards,
            "raw_reward": raw,
            "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
            "sample_indices": [sample.index for sample in samples],
            "rollout_ids": rollout_ids,
            "loss_masks": loss_masks,
            "rollout_mask_sums": [trained[rollout_id] for rollout_id in rollout_ids],
        }
        if any("raw_reward" in (sample.metadata or {}) for sample in samples):
            data["raw_reward"] = [
                (sample.metadata or {}).get("raw_reward", sample.reward) for sample in samples
            ]
        return {**data, **_optional_columns(self.args, samples)}


def _optional_columns(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    data: dict[str, list[Any]] = {}
    first = samples[0]
    if first.metadata and "round_number" in first.metadata:
        data["round_number"] = [sample.metadata["round_number"] for sample in samples]
    if first.rollout_log_probs is not None:
        data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        for sample in samples:
            _check_top_p(sample)
        data["rollout_top_p_token_ids"] = [sample.rollout_top_p_token_ids for sample in samples]
        data["rollout_top_p_token_offsets"] = [
            sample.rollout_top_p_token_offsets for sample in samples
        ]
    if first.rollout_routed_experts is not None:
        experts = [np.asarray(sample.rollout_routed_experts) for sample in samples]
        if getattr(args, "use_rollout_routing_replay", False):
            _validate_rollout_routed_experts_for_replay(experts, args)
        data["rollout_routed_experts"] = experts
    if first.train_metadata is not None:
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if first.teacher_log_probs is not None:
        data["teacher_log_probs"] = [sample.teacher_log_probs for sample in samples]
    if first.metadata is not None:
        data["source_names"] = [get_source(sample) for sample in samples]
    return data


def _filled_in(rollout_ids: list[int | None]) -> list[int]:
    """Each None becomes the lowest number that is not taken."""
    taken = {rollout_id for rollout_id in rollout_ids if rollout_id is not None}
    free = (number for number in itertools.count() if number not in taken)
    return [next(free) if rollout_id is None else rollout_id for rollout_id in rollout_ids]


def _loss_mask(sample: Sample) -> list[int]:
    """The sample's mask, set on it: all ones if it has none, all zeros if it is to be removed."""
    length = sample.response_length
    if sample.loss_mask is None:
        sample.loss_mask = [1] * length
    require(
        len(sample.loss_mask) == length,
        f"loss mask length {len(sample.loss_mask)} != response length {length}",
    )
    if sample.remove_sample:
        sample.loss_mask = [0] * length
    return sample.loss_mask


def _check_top_p(sample: Sample) -> None:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    require(ids is not None and offsets is not None, "no top-p token ids, or no offsets")
    require(len(offsets) == sample.response_length + 1, f"{len(offsets)} top-p offsets")
    require(int(offsets[-1]) == len(ids), f"top-p offsets end at {offsets[-1]}, not {len(ids)}")


def _validate_rollout_routed_experts_for_replay(experts: list[Any], args: Namespace) -> None:
    """Raise ValueError unless every sample has rows of [layers, top-k], and of no MoE layer only
    zeros, which slime takes for rows that an engine left out."""
    layers, topk = int(args.num_layers), int(args.moe_router_topk)
    frequency = getattr(args, "moe_layer_freq", None)
    if not isinstance(frequency, list | tuple):
        frequency = [1] * layers
    for number, rows in enumerate(experts):
        if rows.ndim != 3 or rows.shape[1:] != (layers, topk) or not len(rows):
            raise ValueError(f"routed experts of sample {number} have the shape {rows.shape}")
        for layer in range(layers):
            if topk > 1 and frequency[layer] and not rows[:, layer].any():
                raise ValueError(f"routed experts of sample {number}: layer {layer} is all zero")


def _validate_rollout_id_annotated(node: Any, depth: int = 0) -> None:
    """Raise AssertionError unless siblings, the samples of a list in a group, share a
    `rollout_id` that is not None. A list counts as siblings if its first element is a sample."""
    if isinstance(node, Sample):
        return
    require(isinstance(node, list), f"unexpected {type(node).__name__} in a rollout's output")
    if not node or not isinstance(node[0], Sample):
        for item in node:
            _validate_rollout_id_annotated(item, depth + 1)
    elif depth >= 2 and len(node) > 1:
        ids = [sample.rollout_id for sample in node]
        require(None not in ids, f"rollout_id is unset on some of {len(node)} siblings: {ids}")
        require(len(set(ids)) == 1, f"siblings must share rollout_id; got {ids}")
