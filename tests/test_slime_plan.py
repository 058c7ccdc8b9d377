"""From slime's arguments to a plan, and every mistake that shows at the start."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.slime_host import slime_args
from turnleaf.adapters.slime._plan import (
    NORMALISED,
    Plan,
    is_fully_async,
    normalises,
    sampling_for,
)
from turnleaf.adapters.slime._samples import Replays
from turnleaf.core import ContractError, SettingsError
from turnleaf.gateway import WorkerConfig
from turnleaf.sessions import HttpSession

pytestmark = pytest.mark.slime

BACKEND = {"backend": "turnleaf.sessions.HttpSession", "url": "http://agent:8080"}
OURS = {"custom_reward_post_process_path": "turnleaf.adapters.slime.normalize_episode_rewards"}
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
SLIMES_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def arguments(**changes: Any) -> Any:
    return slime_args(
        **{"rollout_session_backend": BACKEND, "sglang_router_port": 30000, **OURS, **changes}
    )


def refusal(kind: type[ContractError] = SettingsError, **changes: Any) -> str:
    with pytest.raises(kind) as raised:
        Plan.of(arguments(**changes))
    return str(raised.value)


def test_slimes_arguments_say_it_all() -> None:
    args = arguments()
    plan = Plan.of(args)
    assert plan.engine_url == "http://127.0.0.1:30000"
    assert plan.model == plan.model_id == args.hf_checkpoint
    assert plan.template_arguments == {}
    assert plan.max_context_tokens is None
    assert plan.replays == Replays(top_p=False, routed_experts=None)
    assert plan.settings.rollout_session_backend == BACKEND
    session = plan.session()
    assert isinstance(session, HttpSession)
    assert session is not plan.session()


def test_reading_them_changes_none() -> None:
    args = arguments(turnleaf={"failure_window": 5}, apply_chat_template_kwargs={"a": [1]})
    before = copy.deepcopy(vars(args))
    plan = Plan.of(args)
    plan.template_arguments["b"] = 2
    plan.worker_config()
    assert vars(args) == before


def test_settings_are_read_beside_them() -> None:
    plan = Plan.of(
        arguments(
            model_id="my-model",
            max_rollout_time=12.5,
            gateway_port=0,
            turnleaf={
                "max_context_tokens": 77,
                "on_bad_result": "fail_rollout",
                "failure_window": 5,
            },
        )
    )
    assert (plan.model_id, plan.max_context_tokens) == ("my-model", 77)
    assert plan.settings.max_rollout_time == 12.5
    assert plan.settings.on_bad_result == "fail_rollout"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"turnleaf": {"failure_windw": 5}}, "turnleaf.failure_window"),
        ({"turnleaf": {"on_bad_result": "ignore"}}, "turnleaf.on_bad_result"),
        ({"max_rollout_time": "1e3"}, "max_rollout_time"),
        ({"rollout_session_backend": {"backend": "turnleaf.sessions.HttpSession"}}, "'url'"),
        ({"rollout_session_backend": {**BACKEND, "uri": 1}}, "'uri'"),
        ({"rollout_session_backend": None}, "rollout_session_backend"),
    ],
)
def test_mistakes_in_the_settings_show_at_the_start(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(**changes)


def test_without_a_backend_nothing_can_run() -> None:
    args = arguments()
    del args.rollout_session_backend
    with pytest.raises(SettingsError, match="rollout_session_backend is missing"):
        Plan.of(args)


@pytest.mark.parametrize(
    ("batch", "per_prompt", "expected"), [(1, 1, 64), (4, 8, 64), (4, 9, 72), (32, 8, 512)]
)
def test_a_run_is_stopped_after_64_failures_or_two_batches(
    batch: int, per_prompt: int, expected: int
) -> None:
    plan = Plan.of(arguments(rollout_batch_size=batch, n_samples_per_prompt=per_prompt))
    assert plan.failures_before_stop == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"rollout_max_context_len": 9000}, 9000),
        ({"sglang_context_length": 8000}, 8000),
        ({"max_tokens_per_gpu": 4096}, 4096),
        ({"max_tokens_per_gpu": 4096, "context_parallel_size": 2}, 8192),
        ({"max_tokens_per_gpu": 4096, "context_parallel_size": None}, 4096),
        (
            {
                "rollout_max_context_len": 9000,
                "sglang_context_length": 8000,
                "max_tokens_per_gpu": 4096,
                "context_parallel_size": 2,
            },
            8000,
        ),
        ({"rollout_max_context_len": 9000, "max_tokens_per_gpu": 4096}, 4096),
        # Without dynamic batches nothing is laid out by tokens.
        (
            {
                "rollout_max_context_len": 9000,
                "max_tokens_per_gpu": 4096,
                "use_dynamic_batch_size": False,
                "debug_rollout_only": True,
            },
            9000,
        ),
        ({"rollout_max_context_len": 9000, "turnleaf": {"max_context_tokens": 100}}, 100),
        ({"rollout_max_context_len": 9000, "turnleaf": {"max_context_tokens": None}}, 9000),
        ({"rollout_max_context_len": 9000, "turnleaf": None}, 9000),
    ],
)
def test_the_context_is_the_least_of_the_limits(
    changes: dict[str, Any], expected: int | None
) -> None:
    plan = Plan.of(arguments(**changes))
    assert plan.max_context_tokens == expected
    # None leaves it to the worker, which knows the model's own limit, and keeps to it anyway.
    assert plan.worker_config().max_context_tokens == expected


def test_arguments_that_a_version_of_slime_lacks_count_as_not_given() -> None:
    args = arguments()
    for name in (
        "rollout_max_context_len",
        "sglang_context_length",
        "max_tokens_per_gpu",
        "context_parallel_size",
        "rollout_sample_hook_path",
        "use_rollout_routing_replay",
        "apply_chat_template_kwargs",
        "debug_rollout_only",
        "rollout_top_p",
    ):
        delattr(args, name)
    plan = Plan.of(args)
    assert plan.max_context_tokens is None
    assert plan.replays == Replays(top_p=False, routed_experts=None)


def test_the_worker_is_told_what_the_plan_says() -> None:
    plan = Plan.of(
        arguments(
            gateway_host="127.0.0.1",
            gateway_port=0,
            rollout_max_context_len=9000,
            apply_chat_template_kwargs={"enable_thinking": False},
            rollout_top_p=0.9,
            use_rollout_routing_replay=True,
            num_layers=2,
            moe_router_topk=8,
            turnleaf={
                "history": {"client_reasoning": "as_sent", "thinking_retention": "all"},
                "tool_call_parser": "qwen25",
            },
        )
    )
    config = plan.worker_config()
    assert (config.engine_url, config.model) == (plan.engine_url, plan.model)
    assert (config.host, config.port) == ("127.0.0.1", 0)
    assert config.max_context_tokens == 9000
    assert config.template_arguments == {"enable_thinking": False}
    assert (config.routed_experts_shape, config.expect_top_p_ids) == ((2, 8), True)
    assert (config.client_reasoning, config.thinking_retention) == ("as_sent", "all")
    assert config.tool_call_parser == "qwen25"
    assert config.model_id == plan.model_id
    assert WorkerConfig.from_mapping(config.to_mapping()) == config
    # The control token is a secret: every worker has its own.
    assert plan.worker_config().control_token != config.control_token


@pytest.mark.parametrize(("top_p", "expected"), [(1.0, False), (1, False), (0.999, True)])
def test_top_p_is_replayed_where_it_cuts(top_p: float, expected: bool) -> None:
    assert Plan.of(arguments(rollout_top_p=top_p)).replays.top_p is expected


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_layers": 2},
        {"moe_router_topk": 8},
        {"num_layers": 2, "moe_router_topk": None},
        {"num_layers": 0, "moe_router_topk": 8},
    ],
)
def test_routing_replay_needs_the_models_shape(shape: dict[str, Any]) -> None:
    said = refusal(use_rollout_routing_replay=True, **shape)
    assert "--num-layers" in said
    assert "--moe-router-topk" in said


def test_forks_need_dynamic_batches() -> None:
    said = refusal(use_dynamic_batch_size=False)
    assert "add --use-dynamic-batch-size and --max-tokens-per-gpu" in said


@pytest.mark.parametrize("estimator", NORMALISED)
def test_slimes_own_normalisation_is_refused(estimator: str) -> None:
    changes: dict[str, Any] = {
        "advantage_estimator": estimator,
        "custom_reward_post_process_path": None,
    }
    said = refusal(**changes)
    assert estimator in said
    assert OURS["custom_reward_post_process_path"] in said
    # The user's own, or none at all, is the user's affair.
    Plan.of(arguments(advantage_estimator=estimator, custom_reward_post_process_path="a.b"))
    Plan.of(arguments(**changes, rewards_normalization=False))


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "on_policy_distillation"])
def test_estimators_without_groups_need_no_post_process(estimator: str) -> None:
    args = arguments(advantage_estimator=estimator, custom_reward_post_process_path=None)
    Plan.of(args)
    assert not normalises(args)


def test_without_training_nothing_is_asked_of_it() -> None:
    Plan.of(
        arguments(
            debug_rollout_only=True,
            use_dynamic_batch_size=False,
            custom_reward_post_process_path=None,
        )
    )


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"group_rm": True}, "--group-rm"),
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"dynamic_sampling_filter_path": SLIMES_FILTER}, SLIMES_FILTER),
        ({"dynamic_sampling_filter_path": "my.own_filter"}, "my.own_filter"),
        ({"rollout_function_path": FULLY_ASYNC}, FULLY_ASYNC),
    ],
)
def test_sample_hooks_are_refused_with_what_needs_whole_rollouts(
    changes: dict[str, Any], flag: str
) -> None:
    for hooks in (["my.hook"], ["my.hook", "my.other"]):
        said = refusal(rollout_sample_hook_path=hooks, **changes)
        assert said.startswith("--rollout-sample-hook-path cannot be used with ")
        assert flag in said
        assert "turnleaf.adapters.slime.filters.nonzero_std" in said
    Plan.of(arguments(rollout_sample_hook_path=None, **changes))
    Plan.of(arguments(rollout_sample_hook_path=[], **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"dynamic_sampling_filter_path": "turnleaf.adapters.slime.filters.nonzero_std"}],
)
def test_sample_hooks_work_with_the_rest(changes: dict[str, Any]) -> None:
    Plan.of(arguments(rollout_sample_hook_path=["my.hook"], **changes))


@pytest.mark.parametrize("checkpoint", ["Qwen/Qwen3-0.6B", "/no/such/folder", None, ""])
def test_the_checkpoint_must_be_a_folder(checkpoint: Any) -> None:
    assert f"--hf-checkpoint {checkpoint}" in refusal(hf_checkpoint=checkpoint)


def test_the_checkpoint_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    assert "--hf-checkpoint" in refusal(hf_checkpoint=str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (FULLY_ASYNC, True),
        ("slime.rollout.sglang_rollout.generate_rollout", False),
        ("slime.rollout.fully_async_rollout_of_mine.f", False),
        (None, False),
    ],
)
def test_fully_asynchronous_is_what_slime_calls_so(path: str | None, expected: bool) -> None:
    assert is_fully_async(arguments(rollout_function_path=path)) is expected


def test_the_engine_gets_the_trainers_parameters() -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 512,
        "stop": ["END"],
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "custom_params": {"return_top_p_token_ids": True},
        "sampling_seed": 42,
        "repetition_penalty": 1.1,
        "min_new_tokens": 0,
    }
    before = copy.deepcopy(given)
    assert sampling_for(given) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 512,
        "stop": ["END"],
        "custom_params": {"return_top_p_token_ids": True},
        "sampling_seed": 42,
        "repetition_penalty": 1.1,
        "min_new_tokens": 0,
    }
    assert given == before


@given(
    st.dictionaries(
        st.sampled_from(
            ["temperature", "max_new_tokens", "stop", "no_stop_trim", "custom_params", "top_k"]
        ),
        st.one_of(
            st.none(),
            st.integers(),
            st.lists(st.text(max_size=2), max_size=2),
            st.dictionaries(st.text(max_size=2), st.booleans(), max_size=2),
        ),
    )
)
def test_slimes_shared_parameters_are_never_changed(given: dict[str, Any]) -> None:
    before = copy.deepcopy(given)
    taken = sampling_for(given)
    taken["max_new_tokens"] = 1
    for value in taken.values():
        if isinstance(value, list):
            value.append("changed")
        elif isinstance(value, dict):
            value["changed"] = True
    assert given == before
