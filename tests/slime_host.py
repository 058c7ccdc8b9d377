"""Which slime the tests meet: a real checkout, or the stand-ins. Import this before `slime`.

TURNLEAF_SLIME_DIR names a checkout of slime; without it turnleaf's stand-ins are `slime`.
"""

import copy
import importlib
import os
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from typing import Any

from turnleaf.adapters.mock import cached_checkpoint

SLIME_DIR = os.environ.get("TURNLEAF_SLIME_DIR")

if SLIME_DIR:
    from tests.slime_real import prepare, rollout_manager_class

    prepare(SLIME_DIR)
else:
    from turnleaf.adapters.mock.slime import install

    install()

    def rollout_manager_class() -> Any:
        from slime.ray.rollout import RolloutManager

        return RolloutManager


def slime_args(**overrides: Any) -> Namespace:
    """Arguments as slime's parser leaves them: its defaults, overridden, and what it derives.

    Unlike slime's are: one rollout per step, at most 512 tokens long; rows whose prompt is under
    "prompt"; dynamic batch sizes, without which no rollout may have more than one sample.
    """
    values = {
        **copy.deepcopy(_DEFAULTS),
        "hf_checkpoint": str(cached_checkpoint("qwen3")),
        **overrides,
    }
    args = Namespace(**values)
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    if args.global_batch_size is None:
        args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt
    if args.rollout_max_prompt_len is None and args.rollout_max_context_len is not None:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    for name, source in _FALLBACKS.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, source))
    args.use_routing_replay = args.use_rollout_routing_replay
    return args


def eval_datasets(args: Namespace, *datasets: dict[str, Any]) -> list[Any]:
    """What slime makes of the data sets of an `--eval-config`, which have a name and a path."""
    from slime.utils.eval_config import build_eval_dataset_configs

    configs: list[Any] = build_eval_dataset_configs(args, datasets, {})
    return configs


def rollout_manager(args: Namespace, output: Any = None) -> Any:
    """slime's rollout manager without Ray, engines or metrics' upload.

    output: what the rollout function hands back, instead of calling `--rollout-function-path`.
    """
    from slime.utils.misc import load_function

    def load(path: str | None) -> Any:
        return None if path is None else load_function(path)

    kind = rollout_manager_class()
    manager = kind.__new__(kind)
    manager.args = args
    if output is None:
        manager.data_source = load(args.data_source_path)(args)
        manager.generate_rollout = load(args.rollout_function_path)
    else:
        manager.data_source = None
        manager.generate_rollout = lambda *_, **__: output
    manager.eval_generate_rollout = load(args.eval_function_path)
    manager.custom_reward_post_process_func = load(args.custom_reward_post_process_path)
    manager.custom_convert_samples_to_train_data_func = load(
        args.custom_convert_samples_to_train_data_path
    )
    return manager


def fresh_slime() -> None:
    """Forget what slime keeps for the process: its state, its worker, its data sets, functions."""
    from slime.rollout import fully_async_rollout, sglang_rollout
    from slime.utils.misc import SingletonMeta, load_function

    fully_async_rollout._stop_global_worker()
    SingletonMeta._instances.clear()
    sglang_rollout.EVAL_PROMPT_DATASET.clear()
    load_function.cache_clear()


def validate_rollout_ids(data: Any) -> None:
    """slime's check of a step's nested rollouts; raises AssertionError."""
    _either("_validate_rollout_id_annotated", "rollout_data_utils")(data)


def metrics(args: Namespace, samples: list[Any]) -> dict[str, Any]:
    """What slime logs of samples."""
    logged: dict[str, Any] = _either("compute_metrics_from_samples", "rollout_metrics")(
        args, samples
    )
    return logged


def perf_metrics(args: Namespace, samples: list[Any], seconds: float) -> dict[str, Any]:
    """What slime logs of their speed."""
    compute = _either("compute_perf_metrics_from_samples", "rollout_metrics")
    logged: dict[str, Any] = compute(args, samples, seconds)
    return logged


def evaluation_metrics(args: Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """What slime logs of an evaluation's results."""
    log = _either("_log_eval_rollout_data", "rollout_metrics")
    logged: dict[str, Any] = log(0, args, data, None)
    return logged


def _either(name: str, module: str) -> Callable[..., Any]:
    """slime's function; later commits have it in `slime.observability`, under a public name."""
    pinned = importlib.import_module("slime.ray.rollout")
    if hasattr(pinned, name):
        found: Callable[..., Any] = getattr(pinned, name)
    else:
        later = importlib.import_module(f"slime.observability.{module}")
        found = getattr(later, name.removeprefix("_"))
    return found


_FALLBACKS = {
    "eval_function_path": "rollout_function_path",
    "eval_max_context_len": "rollout_max_context_len",
    "eval_reward_key": "reward_key",
    "over_sampling_batch_size": "rollout_batch_size",
}

_DEFAULTS = {
    "advantage_estimator": "grpo",
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "buffer_filter_path": None,
    "ci_test": False,
    "context_parallel_size": 1,
    "custom_config_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "custom_eval_rollout_log_function_path": None,
    "custom_generate_function_path": None,
    "custom_reward_post_process_path": None,
    "custom_rm_path": None,
    "custom_rollout_log_function_path": None,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "debug_rollout_only": False,
    "debug_train_only": False,
    "dump_details": None,
    "dynamic_sampling_filter_path": None,
    "eval_datasets": [],
    "eval_function_path": None,
    "eval_max_context_len": None,
    "eval_max_prompt_len": None,
    "eval_max_response_len": None,
    "eval_min_new_tokens": None,
    "eval_reward_key": None,
    "eval_temperature": None,
    "eval_top_k": None,
    "eval_top_p": None,
    "global_batch_size": None,
    "group_rm": False,
    "grpo_std_normalization": True,
    "input_key": "prompt",
    "label_key": None,
    "load": None,
    "load_debug_rollout_data": None,
    "load_debug_rollout_data_subsample": None,
    "log_passrate": False,
    "log_reward_category": None,
    "mask_offpolicy_in_partial_rollout": False,
    "max_tokens_per_gpu": None,
    "metadata_key": "metadata",
    "micro_batch_size": 1,
    "moe_router_topk": None,
    "multimodal_keys": None,
    "n_samples_per_eval_prompt": 1,
    "n_samples_per_prompt": 1,
    "num_gpus_per_node": 8,
    "num_layers": None,
    "over_sampling_batch_size": None,
    "partial_rollout": False,
    "prompt_data": None,
    "reward_key": None,
    "rewards_normalization": True,
    "rm_type": None,
    "rm_url": None,
    "rollout_all_samples_process_path": None,
    "rollout_batch_size": 1,
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "rollout_global_dataset": True,
    "rollout_max_context_len": None,
    "rollout_max_prompt_len": None,
    "rollout_max_response_len": 512,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_sample_filter_path": None,
    "rollout_sample_hook_path": [],
    "rollout_seed": 42,
    "rollout_shuffle": False,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "router_policy": "cache_aware",
    "save": None,
    "save_debug_rollout_data": None,
    "sglang_context_length": None,
    "sglang_dp_size": 1,
    "sglang_enable_deterministic_inference": False,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": None,
    "sglang_server_concurrency": 512,
    "sglang_speculative_algorithm": None,
    "tool_key": "tools",
    "use_distributed_post": False,
    "use_dynamic_batch_size": True,
    "use_rollout_routing_replay": False,
    "use_tensorboard": False,
    "use_wandb": False,
    "wandb_always_use_train_step": False,
}


def _connect() -> None:
    """Make slime's HTTP client, which in a run comes up with the engines."""
    from slime.utils.http_utils import init_http_client

    init_http_client(slime_args())


def _keep_tokenizers() -> None:
    """Let slime read each checkpoint once: every fresh state would take seconds."""
    from slime.utils import processing_utils

    for name in ("load_tokenizer", "load_processor"):
        setattr(processing_utils, name, cache(getattr(processing_utils, name)))


_connect()
if SLIME_DIR:
    _keep_tokenizers()
