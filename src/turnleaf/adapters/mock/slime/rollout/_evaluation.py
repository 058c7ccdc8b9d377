"""Evaluation: `slime.rollout.sglang_rollout`, its second half."""

import asyncio
import copy
from argparse import Namespace
from typing import Any

from turnleaf.adapters.mock.slime._require import require
from turnleaf.adapters.mock.slime.rollout._generation import generate_and_rm
from turnleaf.adapters.mock.slime.rollout.base_types import RolloutFnEvalOutput
from turnleaf.adapters.mock.slime.utils.data import Dataset
from turnleaf.adapters.mock.slime.utils.eval_config import EvalDatasetConfig
from turnleaf.adapters.mock.slime.utils.processing_utils import load_tokenizer
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["EVAL_PROMPT_DATASET", "eval_rollout"]

EVAL_PROMPT_DATASET: dict[Any, Dataset] = {}
"""Data sets read once per process."""


async def eval_rollout(
    args: Namespace, rollout_id: int
) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Every data set of `eval_datasets`, all at once; AssertionError with `--group-rm`."""
    require(not args.group_rm, "evaluation knows no group rewards")
    datasets = getattr(args, "eval_datasets", None) or []
    results = await asyncio.gather(*(_evaluate(args, dataset) for dataset in datasets))
    names = [dataset.name for dataset in datasets]
    return RolloutFnEvalOutput(data=dict(zip(names, results, strict=True))), []


async def _evaluate(args: Namespace, config: EvalDatasetConfig) -> dict[str, list[Any]]:
    """One data set.

    Its rollouts have no `group_index`, count `index` from 0, and share one dict of sampling
    parameters, unless each has a seed. Of a list, every sample counts.
    """
    sampling_params = _sampling_params(args, config)
    tasks: list[asyncio.Task[Any]] = []
    for row in _dataset(args, config).samples:
        for place in range(config.n_samples_per_eval_prompt or 0):
            sample = copy.deepcopy(row)
            sample.index = len(tasks)
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = config.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path
            current = sampling_params
            if getattr(args, "sglang_enable_deterministic_inference", False):
                current = {**sampling_params, "sampling_seed": args.rollout_seed + place}
            evaluated = generate_and_rm(args, sample, current, evaluation=True)
            tasks.append(asyncio.create_task(evaluated))
    samples: list[Any] = []
    for task in asyncio.as_completed(tasks):
        sample = await task
        samples += sample if isinstance(sample, list) else [sample]
    samples.sort(key=lambda sample: sample.index)
    key = args.eval_reward_key or args.reward_key
    return {
        "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
        "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }


def _dataset(args: Namespace, config: EvalDatasetConfig) -> Dataset:
    key = *config.cache_key, args.hf_checkpoint
    if key not in EVAL_PROMPT_DATASET:
        templated = config.apply_chat_template
        EVAL_PROMPT_DATASET[key] = Dataset(
            config.path,
            tokenizer=load_tokenizer(args.hf_checkpoint),
            max_length=args.eval_max_prompt_len,
            prompt_key=config.input_key or "text",
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key or "metadata",
            apply_chat_template=args.apply_chat_template if templated is None else templated,
        )
    return EVAL_PROMPT_DATASET[key]


def _sampling_params(args: Namespace, config: EvalDatasetConfig) -> dict[str, Any]:
    skip, no_trim = config.skip_special_tokens, config.no_stop_trim
    penalty = config.repetition_penalty
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens if skip is None else skip,
        "no_stop_trim": True if no_trim is None else no_trim,
        "spaces_between_special_tokens": False,
        **({} if penalty is None else {"repetition_penalty": penalty}),
    }
