"""One rollout and one group: `slime.rollout.sglang_rollout`, its first half."""

import asyncio
import inspect
import uuid
from argparse import Namespace
from typing import Any

from turnleaf.adapters.mock.slime._require import require
from turnleaf.adapters.mock.slime.rollout.base_types import Group
from turnleaf.adapters.mock.slime.rollout.rm_hub import async_rm, batched_async_rm
from turnleaf.adapters.mock.slime.rollout.sample_hooks import apply_rollout_sample_hooks
from turnleaf.adapters.mock.slime.utils.http_utils import get_rollout_num_engines, post
from turnleaf.adapters.mock.slime.utils.misc import SingletonMeta, load_function
from turnleaf.adapters.mock.slime.utils.processing_utils import load_tokenizer
from turnleaf.adapters.mock.slime.utils.trace_utils import trace_function, trace_span
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["GenerateState", "generate", "generate_and_rm", "generate_and_rm_group"]

_STATUS_BY_FINISH = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}
_TRACED = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "queue_time",
    "e2e_latency",
    "decode_throughput",
)


class GenerateState(metaclass=SingletonMeta):
    """What all rollouts of the process share.

    aborted: the batch is full; every rollout still running is to end. pendings: the groups under
    way. semaphore: how many rollouts run at a time, over all engines.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.semaphore = asyncio.Semaphore(
            args.sglang_server_concurrency * get_rollout_num_engines(args)
        )
        self.sampling_params: dict[str, Any] = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        if args.rollout_top_p != 1.0:
            self.sampling_params["custom_params"] = {"return_top_p_token_ids": True}
        if getattr(args, "sglang_enable_deterministic_inference", False):
            self.group_sampling_seeds = [
                args.rollout_seed + number for number in range(args.n_samples_per_prompt)
            ]
        self.reset()

    def reset(self) -> None:
        """As before a step."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Group]] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: list[Group]) -> None:
        """Start every group, each with a copy of the sampling parameters."""
        for group in samples:
            task = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(task))
        self.remaining_batch_size += len(samples)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One call of the engine, which goes on from `sample.tokens` if there are any.

    slime also asks for, and keeps, top-p token ids and routed experts.
    """
    state = GenerateState(args)
    generable = sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED)
    require(generable, f"a sample that is {sample.status} cannot be generated")
    limit = sampling_params["max_new_tokens"]
    require(limit >= 0, f"max_new_tokens: {limit}")
    tokens = sample.tokens or state.tokenizer.encode(str(sample.prompt))
    if limit == 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    sample.tokens = tokens
    payload = {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True}
    headers = None
    if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    with trace_span(sample, "sglang_generate") as attributes:
        output = await post(url, payload, headers=headers)
        meta_info = output["meta_info"]
        attributes |= {name: meta_info[name] for name in _TRACED if name in meta_info}
    _append(args, sample, output["text"], meta_info)
    return sample


def _append(args: Namespace, sample: Sample, text: str, meta_info: dict[str, Any]) -> None:
    """Lengthen a sample by what an engine has sampled."""
    sampled = meta_info.get("output_token_logprobs", [])
    sample.response += text
    sample.tokens += [token_id for _, token_id, *_ in sampled]
    kept_mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    sample.loss_mask = kept_mask + [1] * len(sampled)
    sample.rollout_log_probs = [
        *(sample.rollout_log_probs or []),
        *(logprob for logprob, *_ in sampled),
    ]
    sample.response_length += len(sampled)
    if getattr(args, "sglang_speculative_algorithm", None):
        sample.spec_info.add(meta_info)
    sample.prefix_cache_info.add(meta_info)
    sample.weight_versions.append(meta_info["weight_version"])
    sample.status = _STATUS_BY_FINISH[meta_info["finish_reason"]["type"]]


@trace_function("generate_and_rm")
async def generate_and_rm(
    args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """One rollout and its reward: a Sample, or the list that the generate function returned.

    A rollout that is COMPLETED or TRUNCATED already is left as it is, and one that has to wait
    until the abort becomes ABORTED without being generated. A list with an ABORTED sample gets no
    rewards. What the generate function raises is raised.
    """
    if (
        args.partial_rollout
        and args.mask_offpolicy_in_partial_rollout
        and sample.response_length > 0
    ):
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        rewarded = args.group_rm or sample.reward is not None
        require(rewarded, "a complete sample has no reward")
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        sample = await _generated(args, sample, sampling_params, evaluation)
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    if args.group_rm:
        return sample
    if isinstance(sample, list):
        await _reward_siblings(args, sample)
    elif sample.status != Sample.Status.ABORTED and sample.reward is None:
        with trace_span(sample, "reward_model"):
            sample.reward = await async_rm(args, sample)
    return sample


async def _generated(
    args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    path = getattr(sample, "generate_function_path", None) or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    function = load_function(path)
    if "evaluation" in inspect.signature(function).parameters:
        return await function(args, sample, sampling_params, evaluation=evaluation)
    return await function(args, sample, sampling_params)


async def _reward_siblings(args: Namespace, samples: list[Any]) -> None:
    """Reward the samples of one rollout, one by one; the reward model is asked even for none."""
    if any(sample.status == Sample.Status.ABORTED for sample in samples):
        return
    unrewarded = [sample for sample in samples if sample.reward is None]
    with trace_span(unrewarded, "reward_model"):
        rewards = await batched_async_rm(args, unrewarded)
    for sample, reward in zip(unrewarded, rewards, strict=False):
        sample.reward = reward


@trace_function("generate_and_rm_group")
async def generate_and_rm_group(
    args: Namespace, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """All rollouts of a prompt at once; after the abort: the group as it came.

    A member without a `session_id` is given one, and with deterministic inference its place's
    seed as `sampling_seed`. With `--group-rm`, `reward` is written to each
    member, a list too.
    """
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in group:
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
    tasks = []
    for place, sample in enumerate(group):
        current = sampling_params.copy()
        if getattr(args, "sglang_enable_deterministic_inference", False):
            current["sampling_seed"] = state.group_sampling_seeds[place]
        tasks.append(asyncio.create_task(generate_and_rm(args, sample, current, evaluation)))
    group = await asyncio.gather(*tasks)
    if args.group_rm and not state.aborted:
        with trace_span(group, "group_reward_model"):
            rewards = await batched_async_rm(args, group)
        for sample, reward in zip(group, rewards, strict=False):
            sample.reward = reward
    return group
