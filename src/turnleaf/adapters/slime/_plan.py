"""From slime's arguments to what a rollout needs; every mistake that can be seen at start-up."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from turnleaf.adapters.slime._samples import Replays
from turnleaf.core import RolloutSession, Settings, SettingsError
from turnleaf.gateway import WorkerConfig
from turnleaf.sessions import session_factory

__all__ = ["Plan", "is_fully_async", "normalises", "sampling_for"]

NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""slime's advantage estimators for which rewards are normalised within their group."""
FULLY_ASYNC = "slime.rollout.fully_async_rollout."
OUR_FILTERS = "turnleaf.adapters.slime.filters."
NOT_FOR_ENGINE = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens")
"""What slime says of the text of a reply, which the gateway makes of its tokens itself."""


def is_fully_async(args: Any) -> bool:
    """Whether slime's fully asynchronous rollout calls, which takes exceptions for bad luck."""
    return str(_get(args, "rollout_function_path")).startswith(FULLY_ASYNC)


def normalises(args: Any) -> bool:
    """Whether slime is told to normalise rewards within their group."""
    return args.advantage_estimator in NORMALISED and bool(args.rewards_normalization)


def _get(args: Any, name: str) -> Any:
    """An argument that not every version or set-up of slime has."""
    return getattr(args, name, None)


@attrs.frozen(kw_only=True)
class Plan:
    """What all rollouts of a training run have in common.

    engine_url: of slime's router. model: the checkpoint's folder. model_id: what agents are told.
    max_context_tokens: None for the model's own limit. template_arguments: of the chat template.
    replays: which of the sampler's choices the trainer repeats. failures_before_stop: how many
    rollouts must have failed before a run without a success is stopped.
    """

    settings: Settings
    session: Callable[[], RolloutSession]
    engine_url: str
    model: str
    model_id: str
    max_context_tokens: int | None
    template_arguments: dict[str, Any]
    replays: Replays
    failures_before_stop: int

    @classmethod
    def of(cls, args: Any) -> Self:
        """Read slime's arguments; raises ContractError that says what to change."""
        settings = Settings.from_mapping(vars(args), ignore_unknown_top_level=True)
        _check_training(args)
        _check_list_type(args)
        _check_model(args)
        batch = args.rollout_batch_size * args.n_samples_per_prompt
        return cls(
            settings=settings,
            session=session_factory(settings.rollout_session_backend),
            engine_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            model=args.hf_checkpoint,
            model_id=settings.model_id or args.hf_checkpoint,
            max_context_tokens=_max_context_tokens(args, settings),
            template_arguments=dict(_get(args, "apply_chat_template_kwargs") or {}),
            replays=Replays(
                top_p=_get(args, "rollout_top_p") not in (None, 1.0),
                routed_experts=_routed_experts_shape(args),
            ),
            failures_before_stop=max(64, 2 * batch),
        )

    def worker_config(self) -> WorkerConfig:
        """The configuration of a gateway worker."""
        config = WorkerConfig.for_settings(
            self.settings,
            engine_url=self.engine_url,
            model=self.model,
            model_id=self.model_id,
            routed_experts_shape=self.replays.routed_experts,
            expect_top_p_ids=self.replays.top_p,
        )
        return attrs.evolve(
            config,
            max_context_tokens=self.max_context_tokens,
            template_arguments=self.template_arguments,
        )


def sampling_for(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """slime's sampling parameters as the gateway takes them; a copy, since slime shares them."""
    return {
        name: copy.deepcopy(value)
        for name, value in sampling_params.items()
        if value is not None and name not in NOT_FOR_ENGINE
    }


def _check_training(args: Any) -> None:
    if _get(args, "debug_rollout_only") or _get(args, "num_rollout") == 0:
        return
    if not _get(args, "use_dynamic_batch_size"):
        raise SettingsError(
            "--use-dynamic-batch-size is off, but a rollout that forks gives more than one sample, "
            "and slime can lay out a varying number of samples only with it: add "
            "--use-dynamic-batch-size and --max-tokens-per-gpu"
        )
    if _get(args, "log_passrate") and args.n_samples_per_prompt > 1:
        raise SettingsError(
            "--log-passrate is on, but in training slime takes every sample for a rollout of its "
            "own and stops at the first batch in which one forks: leave --log-passrate out"
        )
    if normalises(args) and not _get(args, "custom_reward_post_process_path"):
        raise SettingsError(
            f"--advantage-estimator {args.advantage_estimator} normalises rewards within their "
            "group, but slime's own normalisation takes the whole batch for one group as soon as a "
            "rollout forks: add --custom-reward-post-process-path "
            "turnleaf.adapters.slime.normalize_episode_rewards"
        )


def _check_list_type(args: Any) -> None:
    """Sample hooks turn a rollout's list into a plain one, which only some of slime can take."""
    if not _get(args, "rollout_sample_hook_path"):
        return
    dynamic_filter = _get(args, "dynamic_sampling_filter_path")
    needing = {
        "--group-rm": _get(args, "group_rm"),
        "--partial-rollout": _get(args, "partial_rollout"),
        f"--dynamic-sampling-filter-path {dynamic_filter}": dynamic_filter
        and not dynamic_filter.startswith(OUR_FILTERS),
        f"--rollout-function-path {_get(args, 'rollout_function_path')}": is_fully_async(args),
    }
    for flag, on in needing.items():
        if on:
            raise SettingsError(
                f"--rollout-sample-hook-path cannot be used with {flag}: slime hands a rollout's "
                "samples through the hook one by one and then no longer sees that they are one "
                "rollout; leave one of the two out (of the filters, "
                "turnleaf.adapters.slime.filters.nonzero_std works with sample hooks)"
            )


def _check_model(args: Any) -> None:
    if not args.hf_checkpoint or not Path(args.hf_checkpoint).is_dir():
        raise SettingsError(
            f"--hf-checkpoint {args.hf_checkpoint}: there is no such folder; the gateway needs the "
            "checkpoint's tokenizer and chat template (download the checkpoint first)"
        )


def _max_context_tokens(args: Any, settings: Settings) -> int | None:
    if settings.max_context_tokens is not None:
        return settings.max_context_tokens
    per_gpu = _get(args, "max_tokens_per_gpu") if _get(args, "use_dynamic_batch_size") else None
    limits = [
        _get(args, "rollout_max_context_len"),
        _get(args, "sglang_context_length"),
        None if per_gpu is None else per_gpu * (_get(args, "context_parallel_size") or 1),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _routed_experts_shape(args: Any) -> tuple[int, int] | None:
    if not _get(args, "use_rollout_routing_replay"):
        return None
    layers, top_k = _get(args, "num_layers"), _get(args, "moe_router_topk")
    if not layers or not top_k:
        raise SettingsError(
            "--use-rollout-routing-replay needs --num-layers and --moe-router-topk: the model's "
            "routing is recorded in that shape"
        )
    return layers, top_k
