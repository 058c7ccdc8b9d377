"""What slime logs of a step's samples: `slime.ray.rollout`, its second half."""

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from turnleaf.adapters.mock.slime.utils.metric_utils import (
    compute_pass_rate,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
from turnleaf.adapters.mock.slime.utils.misc import group_by
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = [
    "_log_eval_rollout_data",
    "compute_metrics_from_samples",
    "compute_perf_metrics_from_samples",
]

_REQUEST_METRICS = {
    "request/e2e_latency": "e2e_latency",
    "request/queue_time": "queue_time",
    "decode/throughput": "decode_throughput",
}


def _log_eval_rollout_data(
    rollout_id: int,
    args: Namespace,
    data: dict[str, dict[str, list[Any]]],
    extra_metrics: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What an evaluation logs. With `--log-passrate` rewards must fill whole groups."""
    logged = dict(extra_metrics or {})
    for name, results in data.items():
        rewards = results["rewards"]
        logged[f"eval/{name}"] = sum(rewards) / len(rewards)
        metrics = compute_metrics_from_samples(args, results["samples"])
        logged |= dict_add_prefix(metrics, f"eval/{name}/")
        logged[f"eval/{name}-truncated_ratio"] = sum(results["truncated"]) / len(rewards)
        if args.log_passrate:
            rates = compute_pass_rate(rewards, args.n_samples_per_eval_prompt)
            logged |= dict_add_prefix(rates, f"eval/{name}-")
    return {**logged, "eval/step": rollout_id}


def compute_metrics_from_samples(args: Namespace, samples: list[Sample]) -> dict[str, Any]:
    """Lengths, agreement of rewards within groups, caches and endings, over all samples."""
    number = len(samples)
    lengths = [sample.effective_response_length for sample in samples]
    prompt = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
    metrics = {
        **dict_add_prefix(compute_statistics(lengths), "response_len/"),
        **_zero_std(args, samples),
        "prefix_cache_hit_rate": cached / prompt if prompt > 0 else 0.0,
        "avg_cached_tokens_per_sample": cached / number,
        **_kept_by_top_p(samples),
        "repetition_frac": sum(has_repetition(sample.response) for sample in samples) / number,
        "truncated_ratio": sum(truncated) / number,
    }
    if getattr(args, "sglang_speculative_algorithm", None) is not None:
        for name in ("spec_accept_rate", "spec_accept_length"):
            metrics[name] = sum(getattr(sample.spec_info, name) for sample in samples) / number
    if args.log_reward_category is not None:
        categories = group_by(samples, lambda sample: sample.reward[args.log_reward_category])  # type: ignore[index]  # a mapping, where categories are logged
        metrics |= {f"error_cat/{name}": len(of) / number for name, of in categories.items()}
    return metrics


def compute_perf_metrics_from_samples(
    args: Namespace, samples: list[Sample], rollout_time: float
) -> dict[str, Any]:
    """Tokens per second, and the time spent outside generation.

    rollout_time: seconds of the whole step.
    """
    outside = [sample.non_generation_time for sample in samples]
    metrics: dict[str, Any] = {"rollout_time": rollout_time}
    if max(outside) > 0:
        metrics |= dict_add_prefix(compute_statistics(outside), "non_generation_time/")
    for key, lengths in (
        ("", [sample.response_length for sample in samples]),
        ("effective_", [sample.effective_response_length for sample in samples]),
    ):
        longest = max(lengths)
        if args.rollout_num_gpus:
            rate = sum(lengths) / rollout_time / args.rollout_num_gpus
            metrics[f"{key}tokens_per_gpu_per_sec"] = rate
        metrics[f"longest_{key}sample_tokens_per_sec"] = longest / rollout_time
        if max(outside) > 0:
            pairs = zip(outside, lengths, strict=True)
            of_longest = [seconds for seconds, length in pairs if length == longest]
            mean = sum(of_longest) / len(of_longest)
            metrics[f"longest_{key}sample_non_generation_time"] = mean
            rate = longest / (rollout_time - mean)
            metrics[f"longest_{key}sample_tokens_per_sec_without_non_generation"] = rate
    for name, source in _REQUEST_METRICS.items():
        values: list[Any] = [attributes.get(source) for attributes in _calls(samples)]
        numbers = [float(value) for value in values if _is_number(value)]
        if numbers:
            metrics |= dict_add_prefix(compute_statistics(numbers), f"{name}/")
    return metrics


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _calls(samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """Attributes of every engine call that the samples' traces tell of, once per sample."""
    for sample in samples:
        for event in (getattr(sample, "trace", None) or {}).get("events", ()):
            if (event["type"], event["name"]) == ("span_end", "sglang_generate"):
                yield event.get("attrs") or {}


def _zero_std(args: Namespace, samples: list[Sample]) -> dict[str, int]:
    """Number of groups in which all samples have the same reward, by that reward."""
    if args.advantage_estimator == "ppo":
        return {}
    groups = group_by(samples, lambda sample: sample.group_index).values()
    rewards = [[sample.get_reward_value(args) for sample in group] for group in groups]
    agreed = [str(round(group[0], 1)) for group in rewards if all(r == group[0] for r in group)]
    return {f"zero_std/count_{reward}": len(of) for reward, of in group_by(agreed).items()}


def _kept_by_top_p(samples: list[Sample]) -> dict[str, float]:
    """Mean number of ids that top-p sampling chose among, over the tokens trained on."""
    counts: list[Any] = []
    for sample in samples:
        if sample.rollout_top_p_token_offsets is None or sample.response_length == 0:
            continue
        spans = np.diff(np.asarray(sample.rollout_top_p_token_offsets))
        if len(spans) != sample.response_length:
            raise AssertionError(f"{len(spans)} top-p spans for {sample.response_length} tokens")
        if sample.remove_sample:
            continue
        mask = [1] * len(spans) if sample.loss_mask is None else sample.loss_mask
        counts += spans[np.asarray(mask, dtype=bool)].tolist()
    return {"top_p_kept_vocab_per_token": sum(counts) / len(counts)} if counts else {}
