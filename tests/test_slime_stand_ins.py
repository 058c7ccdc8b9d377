"""How slime treats what a generate function returns; the stand-ins and the real one alike.

Each test shows a behaviour that the hooks have to live with. What the generate functions here do
for a sample is in its row's metadata.
"""

import asyncio
import copy
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.slime_host import (
    eval_datasets,
    evaluation_metrics,
    fresh_slime,
    metrics,
    perf_metrics,
    rollout_manager,
    slime_args,
    validate_rollout_ids,
)
from tests.waiting import until
from turnleaf.adapters.mock import ScriptedEngine, serve_engine, serve_router

# isort: split
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.rollout.sglang_rollout import (
    GenerateState,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
)
from slime.utils.async_utils import run
from slime.utils.types import Sample

pytestmark = pytest.mark.slime

FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
NONZERO_STD = f"{FILTERS}.check_reward_nonzero_std"
HERE = __name__

MakeArgs = Callable[..., Namespace]


# What slime is given: generate functions, reward models, filters


def finished(sample: Any, reward: Any = 1.0, **fields: Any) -> Any:
    """The sample as after a rollout: two prompt ids, three of a reply."""
    sample.tokens = [1, 2, 3, 4, 5]
    sample.response, sample.response_length = "345", 3
    sample.loss_mask, sample.rollout_log_probs = [1, 1, 1], [-0.1, -0.2, -0.3]
    sample.status, sample.reward = Sample.Status.COMPLETED, reward
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


async def single(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """One sample; `reward`, `status` and `raise` are the row's."""
    if "raise" in sample.metadata:
        raise RuntimeError(sample.metadata["raise"])
    status = Sample.Status(sample.metadata.get("status", "completed"))
    return finished(sample, sample.metadata.get("reward", 1.0), status=status)


async def forked(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """One sample per entry of the row's `rewards`, in a plain list."""
    statuses = sample.metadata.get("statuses", ["completed"] * 9)
    return [
        finished(
            copy.deepcopy(sample), reward, rollout_id=sample.index, status=Sample.Status(status)
        )
        for reward, status in zip(sample.metadata["rewards"], statuses, strict=False)
    ]


async def mixed(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A list if the row has `rewards`, else a sample."""
    return await (forked if "rewards" in sample.metadata else single)(args, sample, sampling_params)


async def reported(
    args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    """Note what slime passed."""
    args.passed.append((sampling_params, evaluation))
    return finished(sample)


async def held(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """The first of each batch at once; the others when the abort has come."""
    args.begun.append(sample.index)
    if sample.index < args.rollout_batch_size:
        await until(lambda: len(args.begun) == args.over_sampling_batch_size)
        return finished(sample)
    state = GenerateState(args)
    await until(lambda: state.aborted)
    args.ended.append(sample.index)
    return finished(sample, reward=0.0, status=Sample.Status.ABORTED)


async def rewarding(args: Namespace, samples: Any, **kwargs: Any) -> Any:
    """1.0, for one or for each, and a note of what was asked."""
    args.asked.append(samples)
    return [1.0] * len(samples) if isinstance(samples, list) else 1.0


async def own_rewarding(args: Namespace, sample: Any, **kwargs: Any) -> float:
    return 0.5


def hooking(args: Namespace, sample: Any, evaluation: bool) -> None:
    sample.metadata["hooked"] = evaluation


async def replacing(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    return Sample(index=sample.index, metadata=kwargs)


def misbehaving(args: Namespace, sample: Any) -> Any:
    return [sample]


class Rollout(list[Any]):
    """A list of a type of its own."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fresh_slime()
    yield
    fresh_slime()


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def router(portal: BlockingPortal) -> Iterator[dict[str, Any]]:
    """Where the router of an engine is that always answers 5, 6."""
    with routed(portal, [{"ids": [5, 6]}]) as (address, _):
        yield address


@contextmanager
def routed(portal: BlockingPortal, *scripts: Any) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Serve engines, each repeating its script, and their router: its address, and their URLs."""
    with ExitStack() as resources:

        def serve(served: AbstractAsyncContextManager[str]) -> str:
            return resources.enter_context(portal.wrap_async_context_manager(served))

        engines = [ScriptedEngine({"*": script}, repeat=True) for script in scripts]
        urls = [serve(serve_engine(engine)) for engine in engines]
        host, port = serve(serve_router(urls)).removeprefix("http://").split(":")
        yield {"sglang_router_ip": host, "sglang_router_port": int(port)}, urls


@pytest.fixture
def args_for(router: dict[str, Any], tmp_path: Path) -> MakeArgs:
    """`args_for(generate, *metadata, **arguments)`: arguments with a row for each metadata."""

    def make(generate: Any, *metadata: dict[str, Any], **arguments: Any) -> Namespace:
        path = tmp_path / "rows.jsonl"
        rows = [{"prompt": f"row {n}", "metadata": row} for n, row in enumerate(metadata)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        generate_path = None if generate is None else f"{HERE}.{generate.__name__}"
        return slime_args(
            **{
                "custom_generate_function_path": generate_path,
                "prompt_data": str(path),
                "rollout_batch_size": max(len(rows), 1),
                **router,
                **arguments,
            }
        )

    return make


def step(args: Namespace) -> Any:
    """A step's groups."""
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def train_data(args: Namespace, output: Any = None) -> dict[str, Any]:
    """What slime makes of a step's groups, or of those given."""
    manager = rollout_manager(args, output)
    samples, _ = manager._get_rollout_data(0)
    data: dict[str, Any] = manager._convert_samples_to_train_data(samples)
    return data


def converted(samples: list[Any], **arguments: Any) -> dict[str, Any]:
    """What slime makes of these samples, one group."""
    args = slime_args(n_samples_per_prompt=len(samples), **arguments)
    data: dict[str, Any] = rollout_manager(args, object())._convert_samples_to_train_data(samples)
    return data


def some(number: int, **fields: Any) -> list[Any]:
    """Finished samples."""
    return [finished(Sample(index=index, group_index=0), **fields) for index in range(number)]


def numbers(values: Any) -> list[float]:
    return [float(value) for value in values]


# Calls


def test_evaluation_is_passed_to_those_who_name_it(args_for: MakeArgs) -> None:
    args = args_for(reported, passed=[])
    run(generate_and_rm(args, Sample(index=0), {}, evaluation=True))
    assert args.passed == [({}, True)]
    args = args_for(single)
    sample = run(generate_and_rm(args, Sample(index=0), {}, evaluation=True))
    assert sample.reward == 1.0


def test_in_training_each_rollout_has_its_own_sampling_parameters(args_for: MakeArgs) -> None:
    args = args_for(reported, {}, {}, n_samples_per_prompt=2, passed=[], rollout_temperature=0.7)
    step(args)
    parameters = [params for params, _ in args.passed]
    assert len({id(each) for each in parameters}) == 4
    assert parameters[0] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 512,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_top_p_asks_for_the_kept_ids_and_determinism_for_a_seed_per_place(
    args_for: MakeArgs,
) -> None:
    arguments = {"rollout_top_p": 0.9, "sglang_enable_deterministic_inference": True}
    args = args_for(reported, {}, n_samples_per_prompt=2, passed=[], **arguments)
    step(args)
    for place, (params, _) in enumerate(args.passed):
        assert params["custom_params"] == {"return_top_p_token_ids": True}
        assert params["sampling_seed"] == 42 + place


def test_what_generate_raises_ends_the_step(args_for: MakeArgs) -> None:
    args = args_for(single, {}, {"raise": "no sandbox"})
    with pytest.raises(RuntimeError, match="no sandbox"):
        step(args)


def test_fully_async_drops_the_group_of_what_generate_raises(
    args_for: MakeArgs, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"raise": "no sandbox"}, {}, {}]
    args = args_for(single, *rows, rollout_batch_size=2, sglang_server_concurrency=3)
    groups = generate_rollout_fully_async(args, 0, RolloutDataSourceWithBuffer(args))
    assert [group[0].prompt for group in groups] == ["row 1", "row 2"]
    assert any("process task raised" in record.getMessage() for record in caplog.records)


def test_lists_and_samples_in_one_batch_crash(args_for: MakeArgs) -> None:
    list_first = args_for(mixed, {"rewards": [1, 0]}, {})
    with pytest.raises(TypeError, match="not iterable"):
        train_data(list_first, step(list_first))
    fresh_slime()
    sample_first = args_for(mixed, {}, {"rewards": [1, 0]})
    with pytest.raises(AttributeError, match="get_reward_value"):
        train_data(sample_first, step(sample_first))


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_list_loses_the_rollout(args_for: MakeArgs, empty: int) -> None:
    args = args_for(emptied, {}, n_samples_per_prompt=2, grpo_std_normalization=False)
    args.empty = empty
    if empty == 1:
        assert train_data(args, step(args))["rollout_ids"] == [0]
    else:
        with pytest.raises(IndexError):
            step(args)


async def emptied(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return [] if sample.index == args.empty else [finished(sample)]


@pytest.mark.parametrize("ids", [[None, None], [3, None], [3, 4]])
def test_siblings_must_share_their_rollout_id(ids: list[int | None]) -> None:
    siblings = [Sample(index=0, rollout_id=rollout_id) for rollout_id in ids]
    with pytest.raises(AssertionError):
        validate_rollout_ids([[siblings]])


def test_siblings_with_one_rollout_id_and_lone_samples_pass() -> None:
    validate_rollout_ids([[[Sample(rollout_id=3), Sample(rollout_id=3)], [Sample()]]])
    validate_rollout_ids([[Sample(), Sample()], [Sample(), Sample()]])


def test_a_lone_samples_rollout_id_is_filled_in() -> None:
    samples = some(3)
    samples[0].rollout_id = 1
    assert converted(samples)["rollout_ids"] == [1, 0, 2]


def test_the_loss_is_a_mean_over_all_tokens_of_a_rollout() -> None:
    samples = some(3)
    samples[0].rollout_id = samples[2].rollout_id = 7
    samples[2].loss_mask = [0, 1, 0]
    assert converted(samples)["rollout_mask_sums"] == [4, 3, 4]


def post_processing_none(args: Namespace, samples: list[Any]) -> tuple[list[float], list[float]]:
    return [], []


def converting(args: Namespace, samples: list[Any]) -> dict[str, int]:
    return {"samples": len(samples)}


def test_conversion_may_be_the_users_own() -> None:
    path = f"{HERE}.converting"
    assert converted(some(2), custom_convert_samples_to_train_data_path=path) == {"samples": 2}


def test_post_processing_hands_back_a_value_per_sample() -> None:
    with pytest.raises(AssertionError):
        converted(some(2), custom_reward_post_process_path=f"{HERE}.post_processing_none")


# Fields


def test_no_mask_trains_all_and_a_removed_sample_is_masked() -> None:
    samples = some(2, reward=0.0)
    samples[0].loss_mask = None
    samples[1].remove_sample, samples[1].reward = True, 1.0
    data = converted(samples)
    assert data["loss_masks"] == [[1, 1, 1], [0, 0, 0]]
    # The removed sample's reward is in the baseline all the same.
    assert data["rewards"][0] == pytest.approx(-(0.5**0.5), abs=1e-4)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="loss mask length"):
        converted(some(1, loss_mask=[1]))


def test_the_first_sample_decides_about_logprobs() -> None:
    samples = some(2)
    samples[1].rollout_log_probs = None
    assert converted(samples)["rollout_log_probs"] == [[-0.1, -0.2, -0.3], None]
    assert "rollout_log_probs" not in converted(samples[::-1])


@pytest.mark.parametrize(
    ("field", "value", "column"),
    [
        ("teacher_log_probs", [0.0] * 3, "teacher_log_probs"),
        ("train_metadata", {"loss": "sft"}, "metadata"),
        ("rollout_routed_experts", np.ones((4, 2, 2), dtype=np.int32), "rollout_routed_experts"),
        ("metadata", {"round_number": 3}, "round_number"),
    ],
)
def test_the_first_sample_decides_about_the_rest(field: str, value: Any, column: str) -> None:
    samples = some(2)
    setattr(samples[1], field, value)
    assert column not in converted(samples)
    setattr(samples[0], field, value)
    assert len(converted(samples)[column]) == 2


def test_a_round_number_of_the_first_is_read_of_all() -> None:
    samples = some(2)
    samples[0].metadata = {"round_number": 1}
    with pytest.raises(KeyError):
        converted(samples)


def test_metadata_overrides_the_logged_reward_only() -> None:
    samples = some(2, reward=0.0)
    samples[1].metadata = {"raw_reward": 9.0, "source_name": "code"}
    data = converted(samples)
    assert data["raw_reward"] == [0.0, 9.0]
    assert data["rewards"] == [0.0, 0.0]
    assert data["source_names"] == ["unknown", "code"]


def test_a_reward_key_is_read_of_every_sample() -> None:
    samples = some(2, reward={"score": 1.0})
    assert converted(samples, reward_key="score")["raw_reward"] == [1.0, 1.0]
    samples[1].reward = 0.0
    with pytest.raises(TypeError):
        converted(samples, reward_key="score")


def test_a_reward_of_none_is_an_error() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        converted(some(2, reward=None))


def test_top_p_replay_asks_for_ids_and_offsets_of_every_sample() -> None:
    top_p = {"rollout_top_p": 0.9}
    ids, offsets = np.array([7, 8, 9], dtype=np.int32), np.array([0, 1, 1, 3], dtype=np.int32)
    good = some(1, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=offsets)
    data = converted(good, **top_p)
    assert data["rollout_top_p_token_offsets"][0] is offsets
    good[0]._validate_response_metadata_lengths()
    for wrong in (None, offsets[1:], np.array([0, 1, 1, 2], dtype=np.int32)):
        bad = some(1, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=wrong)
        with pytest.raises(AssertionError):
            converted(bad, **top_p)
        with pytest.raises(ValueError, match=r"top.p"):
            bad[0]._validate_response_metadata_lengths()


@pytest.mark.parametrize(
    "experts", [np.ones((4, 1, 2)), np.ones((0, 2, 2)), np.array([[[1, 1], [0, 0]]])]
)
def test_routing_replay_refuses_other_shapes_and_layers_of_zeros(experts: Any) -> None:
    replay = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2}
    converted(some(1, rollout_routed_experts=np.ones((4, 2, 2), dtype=np.int32)), **replay)
    with pytest.raises(ValueError, match="experts"):
        converted(some(1, rollout_routed_experts=experts), **replay)


def test_an_aborted_list_skips_the_reward_model(args_for: MakeArgs) -> None:
    row = {"rewards": [None, None], "statuses": ["completed", "aborted"]}
    args = args_for(forked, custom_rm_path=f"{HERE}.rewarding", asked=[])
    samples = run(generate_and_rm(args, Sample(index=0, metadata=row), {}))
    assert [sample.reward for sample in samples] == [None, None]
    assert args.asked == []


@pytest.mark.parametrize("status", [Sample.Status.COMPLETED, Sample.Status.TRUNCATED])
def test_a_complete_sample_is_not_generated_again(args_for: MakeArgs, status: Any) -> None:
    args = args_for(single)
    sample = Sample(index=0, status=status, reward=0.25)
    assert run(generate_and_rm(args, sample, {})) is sample
    assert sample.reward == 0.25
    with pytest.raises(AssertionError):
        run(generate_and_rm(args, Sample(index=0, status=status), {}))


@pytest.mark.parametrize("status", [Sample.Status.ABORTED, Sample.Status.FAILED])
def test_an_aborted_or_failed_sample_is_generated_again(args_for: MakeArgs, status: Any) -> None:
    args = args_for(single)
    assert run(generate_and_rm(args, Sample(index=0, status=status), {})).reward == 1.0


def test_a_samples_own_generate_function_comes_first(args_for: MakeArgs) -> None:
    args = args_for(forked, passed=[])
    sample = Sample(index=0, generate_function_path=f"{HERE}.reported")
    run(generate_and_rm(args, sample, {}))
    assert len(args.passed) == 1


def test_metrics_are_over_samples() -> None:
    samples = some(3)
    samples[0].status = Sample.Status.TRUNCATED
    samples[1].prefix_cache_info.add({"cached_tokens": 3, "prompt_tokens": 4})
    samples[2].non_generation_time = 2.0
    samples[2].loss_mask = [0, 1, 0]
    spec = {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2}
    samples[0].spec_info.add({**spec, "completion_tokens": 5})
    logged = metrics(slime_args(sglang_speculative_algorithm="EAGLE"), samples)
    expected = {
        "truncated_ratio": 1 / 3,
        "prefix_cache_hit_rate": 0.75,
        "avg_cached_tokens_per_sample": 1.0,
        "response_len/min": 1.0,
        "zero_std/count_1.0": 1,
        "spec_accept_rate": 0.25,
        "spec_accept_length": 2.5 / 3,
        "repetition_frac": 0.0,
    }
    assert {name: logged[name] for name in expected} == pytest.approx(expected)
    speed = perf_metrics(slime_args(), samples, 10.0)
    assert speed["non_generation_time/max"] == 2.0
    assert speed["effective_tokens_per_gpu_per_sec"] == pytest.approx(0.7)
    assert speed["longest_sample_non_generation_time"] == pytest.approx(2 / 3)


def test_kept_ids_are_counted_over_trained_tokens() -> None:
    ids, offsets = list(range(5)), [0, 1, 3, 5]
    sample = some(1, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=offsets)[0]
    sample.loss_mask = [0, 1, 1]
    assert metrics(slime_args(), [sample])["top_p_kept_vocab_per_token"] == 2.0


def test_calls_are_counted_from_the_trace_of_every_sample() -> None:
    event = {"type": "span_end", "name": "sglang_generate", "attrs": {"e2e_latency": 2.0}}
    first, second = some(2)
    first.trace = {"events": [event]}
    speed = perf_metrics(slime_args(), [first, second], 10.0)
    assert speed["request/e2e_latency/mean"] == 2.0


def test_slime_writes_a_trace_to_the_incoming_sample(args_for: MakeArgs) -> None:
    sample = Sample(index=0)
    run(generate_and_rm(args_for(single), sample, {}))
    names = [(event["type"], event["name"]) for event in sample.trace["events"]]
    assert names == [("span_start", "generate_and_rm"), ("span_end", "generate_and_rm")]


def test_to_dict_keeps_attributes_that_are_no_fields() -> None:
    sample = finished(Sample(index=3, status=Sample.Status.ABORTED), 0.5, trace={"events": []})
    sample.prefix_cache_info.add({"cached_tokens": 3, "prompt_tokens": 4})
    data = sample.to_dict()
    assert data["status"] == "completed"
    json.dumps(data)
    again = Sample.from_dict({**data, "unknown": 1})
    assert again.unknown == 1
    assert again.trace == {"events": []}
    assert again.prefix_cache_info.prefix_cache_hit_rate == 0.75
    assert again.to_dict() == {**data, "unknown": 1}


# Lists of samples


def test_the_built_in_filter_crashes_on_lists(args_for: MakeArgs) -> None:
    args = args_for(forked, {"rewards": [1, 0]}, dynamic_sampling_filter_path=NONZERO_STD)
    with pytest.raises(AttributeError, match="get_reward_value"):
        step(args)


def test_partial_rollout_crashes_on_lists(args_for: MakeArgs) -> None:
    # The second group is not needed any more, and is finished while the engines are aborted.
    args = args_for(
        forked, {"rewards": [1]}, {"rewards": [1]}, partial_rollout=True, rollout_batch_size=1
    )
    args.over_sampling_batch_size = 3
    args.custom_generate_function_path = f"{HERE}.held_forks"
    args.begun, args.ended = [], []
    with pytest.raises(AttributeError, match="response"):
        step(args)


async def held_forks(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return [await held(args, sample, sampling_params)]


def test_group_rewards_crash_on_lists(args_for: MakeArgs) -> None:
    args = args_for(forked, {"rewards": [None]}, group_rm=True, rm_type="math")
    with pytest.raises(AttributeError, match="custom_rm_path"):
        step(args)


def test_putting_lists_back_crashes(args_for: MakeArgs) -> None:
    args = args_for(single)
    with pytest.raises(AttributeError, match="session_id"):
        run(generate_and_rm_group(args, [[Sample(index=0)]], {}))
    with pytest.raises(AttributeError, match="status"):
        run(generate_and_rm(args, [Sample(index=0)], {}))


def test_fully_async_crashes_on_lists_when_it_sorts(args_for: MakeArgs) -> None:
    args = args_for(forked, {"rewards": [1]}, sglang_server_concurrency=1)
    with pytest.raises(TypeError, match="int"):
        generate_rollout_fully_async(args, 0, RolloutDataSourceWithBuffer(args))


class Indexed(list[Any]):
    """A list that fully_async can sort, and no more."""

    @property
    def index(self) -> int:  # type: ignore[override]  # a list's method
        return 0


async def aborted_list(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return Indexed([finished(sample, status=Sample.Status.ABORTED)])


def test_fully_async_does_not_see_that_a_list_is_aborted(args_for: MakeArgs) -> None:
    args = args_for(aborted_list, {}, sglang_server_concurrency=1)
    [group] = generate_rollout_fully_async(args, 0, RolloutDataSourceWithBuffer(args))
    assert group[0][0].status == Sample.Status.ABORTED


async def aborted_once(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.tries.append(sample.index)
    again = args.tries.count(sample.index) > 1
    return finished(sample, status=Sample.Status.COMPLETED if again else Sample.Status.ABORTED)


def test_fully_async_puts_an_aborted_group_back(args_for: MakeArgs) -> None:
    args = args_for(aborted_once, {}, sglang_server_concurrency=1, tries=[])
    groups = generate_rollout_fully_async(args, 0, RolloutDataSourceWithBuffer(args))
    assert [group[0].index for group in groups] == [0]
    assert args.tries[:2] == [0, 0]


def test_fully_async_knows_no_evaluation(args_for: MakeArgs) -> None:
    with pytest.raises(ValueError, match="evaluation"):
        generate_rollout_fully_async(args_for(single), 0, None, evaluation=True)


def test_uneven_numbers_of_samples_make_the_batch_one_group(args_for: MakeArgs) -> None:
    rows = [{"rewards": [1, 1]}, {"rewards": [0]}]
    args = args_for(forked, *rows, n_samples_per_prompt=2, grpo_std_normalization=False)
    # Within their groups all rewards are equal, and would be 0.
    assert train_data(args, step(args))["rewards"] == pytest.approx([1 / 3] * 4 + [-2 / 3] * 2)


def test_even_numbers_of_samples_are_normalised_by_position(args_for: MakeArgs) -> None:
    args = args_for(
        single, {"reward": 1}, {"reward": 0}, n_samples_per_prompt=2, rewards_normalization=True
    )
    assert train_data(args, step(args))["rewards"] == pytest.approx([0.0] * 4)
    assert converted(some(2), rewards_normalization=False)["rewards"] == [1.0, 1.0]
    assert converted(some(2), advantage_estimator="ppo")["rewards"] == [1.0, 1.0]


def test_sample_hooks_turn_any_list_into_a_plain_one(args_for: MakeArgs) -> None:
    args = slime_args(rollout_sample_hook_path=[f"{HERE}.hooking"])
    samples = Rollout([Sample(index=0), Sample(index=1)])
    hooked = run(apply_rollout_sample_hooks(args, samples, evaluation=True))
    assert type(hooked) is list
    assert [sample.metadata["hooked"] for sample in hooked] == [True, True]
    assert run(apply_rollout_sample_hooks(slime_args(), samples)) is samples


def test_sample_hooks_may_replace_samples_by_samples() -> None:
    args = slime_args(rollout_sample_hook_path=[f"{HERE}.replacing", f"{HERE}.hooking"])
    set_current_rollout_id(5)
    hooked = run(apply_rollout_sample_hooks(args, Sample(index=3), evaluation=False))
    assert hooked.index == 3
    assert hooked.metadata == {"rollout_id": 5, "evaluation": False, "hooked": False}
    args.rollout_sample_hook_path = [f"{HERE}.misbehaving"]
    for value in (Sample(), "no sample"):
        with pytest.raises(TypeError):
            run(apply_rollout_sample_hooks(args, value))


# Evaluation


def evaluated(args: Namespace, **config: Any) -> Any:
    """The results of one data set, the rows of `args`."""
    args.eval_datasets = eval_datasets(
        args, {"name": "held-out", "path": args.prompt_data, **config}
    )
    return generate_rollout(args, 0, None, evaluation=True).data


async def forking_first(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.metadata["rewards"] = [1, 1] if sample.index == 0 else [0]
    return await forked(args, sample, sampling_params)


def test_evaluation_counts_every_sample_of_a_list(args_for: MakeArgs) -> None:
    args = args_for(forking_first, {}, n_samples_per_eval_prompt=2)
    data = evaluated(args)
    assert evaluation_metrics(args, data)["eval/held-out"] == pytest.approx(2 / 3)
    args.log_passrate = True
    with pytest.raises(AssertionError):
        evaluation_metrics(args, data)


def test_evaluation_logs_pass_rates_of_whole_groups(args_for: MakeArgs) -> None:
    rows = [{}, {"same": True}]
    args = args_for(by_place, *rows, n_samples_per_eval_prompt=2, log_passrate=True)
    logged = evaluation_metrics(args, evaluated(args))
    assert logged["eval/held-out-pass@1"] == 0.25
    assert logged["eval/held-out-pass@2"] == 0.5
    assert logged["eval/held-out-truncated_ratio"] == 0.0
    assert logged["eval/held-out/truncated_ratio"] == 0.0


def test_evaluation_shares_one_dict_of_sampling_parameters(args_for: MakeArgs) -> None:
    args = args_for(reported, {}, {}, passed=[])
    evaluated(args, n_samples_per_eval_prompt=2, temperature=0.5, max_response_len=64)
    assert {id(params) for params, _ in args.passed} == {id(args.passed[0][0])}
    assert {evaluation for _, evaluation in args.passed} == {True}
    assert args.passed[0][0]["temperature"] == 0.5
    assert args.passed[0][0]["max_new_tokens"] == 64


def test_evaluation_takes_its_parameters_from_where_slime_does(args_for: MakeArgs) -> None:
    args = args_for(reported, {}, passed=[], eval_temperature=0.1, rollout_top_k=7)
    args.n_samples_per_prompt, args.n_samples_per_eval_prompt = 3, 2
    evaluated(args)
    assert len(args.passed) == 2
    params, _ = args.passed[0]
    assert (params["temperature"], params["top_k"], params["max_new_tokens"]) == (0.1, 7, 512)


def test_evaluations_samples_have_the_reward_model_of_the_start_as_their_own(
    args_for: MakeArgs,
) -> None:
    args = args_for(single, {"reward": None}, custom_rm_path=f"{HERE}.own_rewarding")
    args.eval_datasets = eval_datasets(args, {"name": "held-out", "path": args.prompt_data})
    args.custom_rm_path = f"{HERE}.rewarding"
    data = generate_rollout(args, 0, None, evaluation=True).data
    assert data["held-out"]["rewards"] == [0.5]


def test_evaluations_samples_belong_to_no_group(args_for: MakeArgs) -> None:
    args = args_for(single, {"a": 1}, {"a": 2})
    config = {"rm_type": "math", "metadata_overrides": {"b": 3}, "n_samples_per_eval_prompt": 2}
    results = evaluated(args, **config)["held-out"]
    assert [sample.index for sample in results["samples"]] == [0, 1, 2, 3]
    assert {sample.group_index for sample in results["samples"]} == {None}
    assert results["samples"][3].metadata == {"a": 2, "b": 3, "rm_type": "math"}
    assert results["rewards"] == [1.0] * 4


def test_evaluation_knows_no_group_rewards(args_for: MakeArgs) -> None:
    with pytest.raises(AssertionError):
        evaluated(args_for(single, {}, group_rm=True))


def test_evaluation_has_its_own_generate_function_and_reward_model(args_for: MakeArgs) -> None:
    args = args_for(forked, {"reward": None})
    own = {"custom_generate_function_path": f"{HERE}.single"}
    results = evaluated(args, custom_rm_path=f"{HERE}.own_rewarding", **own)["held-out"]
    assert results["rewards"] == [0.5]


# Rewards


def test_the_reward_model_is_asked_after_a_list_even_for_no_samples(args_for: MakeArgs) -> None:
    args = args_for(forked, custom_rm_path=f"{HERE}.rewarding", asked=[])
    run(generate_and_rm(args, Sample(index=0, metadata={"rewards": [1.0, 0.0]}), {}))
    assert args.asked == [[]]


def test_a_missing_reward_comes_from_the_reward_model(args_for: MakeArgs) -> None:
    path = f"{HERE}.rewarding"
    args = args_for(mixed, custom_rm_path=path, asked=[])
    sample = run(generate_and_rm(args, Sample(index=0, metadata={"reward": None}), {}))
    assert (sample.reward, args.asked) == (1.0, [sample])
    samples = run(generate_and_rm(args, Sample(index=0, metadata={"rewards": [0.5, None]}), {}))
    assert [each.reward for each in samples] == [0.5, 1.0]


def test_a_samples_own_reward_model_is_asked_unless_in_a_batch() -> None:
    args = slime_args(custom_rm_path=f"{HERE}.rewarding", asked=[])
    own = Sample(custom_rm_path=f"{HERE}.own_rewarding")
    assert run(async_rm(args, own)) == 0.5
    assert run(batched_async_rm(args, [own])) == [1.0]
    assert run(batched_async_rm(slime_args(), [own])) == [0.5]


def test_rule_based_rewards() -> None:
    right = Sample(response=r"so it is \boxed{12}", label="12")
    wrong = Sample(response=r"so it is \boxed{13}", label="12", metadata={"rm_type": "math"})
    assert run(async_rm(slime_args(rm_type="math"), right)) == 1
    assert run(async_rm(slime_args(), wrong)) == 0
    for rm_type in (None, "thumbs"):
        with pytest.raises(NotImplementedError):
            run(async_rm(slime_args(rm_type=rm_type), right))


def test_group_rewards_are_asked_for_the_whole_group(args_for: MakeArgs) -> None:
    args = args_for(
        single,
        {"reward": None},
        n_samples_per_prompt=2,
        group_rm=True,
        custom_rm_path=f"{HERE}.rewarding",
        asked=[],
    )
    [group] = step(args).samples
    assert [len(each) for each in args.asked] == [2]
    assert [sample.reward for sample in group] == [1.0, 1.0]


# Steps


def test_groups_without_variance_are_dropped_and_replaced(args_for: MakeArgs) -> None:
    args = args_for(by_place, {"same": True}, {}, n_samples_per_prompt=2, rollout_batch_size=1)
    args.dynamic_sampling_filter_path = NONZERO_STD
    output = step(args)
    assert [group[0].prompt for group in output.samples] == ["row 1"]
    assert output.metrics == {"rollout/dynamic_filter/drop_zero_std_0.0": 1}
    fresh_slime()
    args.dynamic_sampling_filter_path += "_with_fallback"
    assert [group[0].prompt for group in step(args).samples] == ["row 0"]


async def by_place(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    same = sample.metadata.get("same", False)
    return finished(sample, reward=0.0 if same else float(sample.index % 2))


def keeping_all(args: Namespace, samples: list[Any], **kwargs: Any) -> bool:
    args.filtered.append(len(samples))
    return True


def filtering(args: Namespace, data: list[Any]) -> None:
    args.batches.append(len(data))


def processing(args: Namespace, samples: list[Any], data_source: Any) -> None:
    args.batches.append([group[0].index for group in samples])


def test_a_steps_filters_are_called(args_for: MakeArgs) -> None:
    args = args_for(single, {}, {}, filtered=[], batches=[])
    args.dynamic_sampling_filter_path = f"{HERE}.keeping_all"
    args.rollout_sample_filter_path = f"{HERE}.filtering"
    args.rollout_all_samples_process_path = f"{HERE}.processing"
    step(args)
    assert (args.filtered, args.batches) == ([1, 1], [2, [0, 1]])


@pytest.mark.parametrize("partial", [False, True])
def test_a_full_batch_aborts_the_rest_and_waits_for_it(args_for: MakeArgs, partial: bool) -> None:
    args = args_for(held, {}, {}, rollout_batch_size=1, over_sampling_batch_size=3)
    args.begun, args.ended, args.partial_rollout = [], [], partial
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 7, source)
    assert [group[0].index for group in output.samples] == [0]
    assert sorted(args.ended) == [1, 2]
    assert GenerateState(args).aborted is False
    assert source.get_buffer_length() == (2 if partial else 0)
    if partial:
        requeued = source.get_samples(2)
        assert {sample.metadata["start_rollout_id"] for [sample] in requeued} == {7}
        assert {sample.status for [sample] in requeued} == {Sample.Status.ABORTED}


def test_what_waits_when_the_abort_comes_is_not_generated(args_for: MakeArgs) -> None:
    args = args_for(held, begun=[], ended=[])
    state = GenerateState(args)
    state.aborted = True
    sample = run(generate_and_rm(args, Sample(index=0), {}))
    assert (sample.status, args.begun) == (Sample.Status.ABORTED, [])
    group = [Sample(index=0)]
    assert run(generate_and_rm_group(args, group, {})) is group
    assert (group[0].status, group[0].session_id) == (Sample.Status.PENDING, None)


def test_what_was_sampled_in_an_earlier_step_is_masked_if_wished(args_for: MakeArgs) -> None:
    args = args_for(single, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    done = finished(Sample(index=0))
    assert run(generate_and_rm(args, done, {})).loss_mask == [0, 0, 0]


def test_every_rollout_gets_a_session_id(args_for: MakeArgs) -> None:
    args = args_for(single, {}, n_samples_per_prompt=2)
    [group] = step(args).samples
    assert len({sample.session_id for sample in group}) == 2
    kept = Sample(index=0, session_id="mine")
    run(generate_and_rm_group(args, [kept], {}))
    assert kept.session_id == "mine"


def test_as_many_rollouts_run_as_the_engines_take(args_for: MakeArgs) -> None:
    rows = [{}] * 6
    args = args_for(overlapping, *rows, sglang_server_concurrency=2, running=[], most=[0])
    step(args)
    assert args.most == [2]
    fresh_slime()
    args.rollout_num_engines, args.most = 2, [0]
    step(args)
    assert args.most == [4]


async def overlapping(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.running.append(sample.index)
    args.most[0] = max(args.most[0], len(args.running))
    for _ in range(20):
        await asyncio.sleep(0)
    args.running.remove(sample.index)
    return finished(sample)


def test_the_state_is_made_once(args_for: MakeArgs) -> None:
    state = GenerateState(args_for(single))
    assert GenerateState(slime_args(rollout_temperature=0.1)) is state
    assert state.sampling_params["temperature"] == 1.0
    ids = state.tokenizer.encode("four tokens of text<|im_end|>")
    assert state.tokenizer.decode(ids, skip_special_tokens=True) == "four tokens of text"
    assert state.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_end|>")


# slime's own generation, and the abort of engines


def test_slimes_own_generation(args_for: MakeArgs) -> None:
    args = args_for(None, {}, custom_rm_path=f"{HERE}.rewarding", asked=[])
    [[sample]] = step(args).samples
    assert sample.tokens[-2:] == [5, 6]
    assert (sample.response_length, len(sample.rollout_log_probs)) == (2, 2)
    assert sample.status == Sample.Status.COMPLETED
    assert sample.prefix_cache_info.total_prompt_tokens == len(sample.tokens) - 2
    assert sample.weight_versions == ["default"]
    assert sample.reward == 1.0
    sample._validate_response_metadata_lengths()


def test_every_engine_of_the_router_is_aborted(args_for: MakeArgs, portal: BlockingPortal) -> None:
    script = [{"ids": [5, 6, 7, 8], "hang": True}]
    with routed(portal, script, script) as (address, urls):
        args = args_for(asking_an_engine, {}, {}, {}, rollout_batch_size=1, **address)
        args.over_sampling_batch_size, args.partial_rollout, args.engines = 3, True, urls
        source = RolloutDataSourceWithBuffer(args)
        [[kept]] = generate_rollout(args, 0, source).samples
        assert kept.index == 0
        requeued = source.get_samples(2)
        assert {sample.status for [sample] in requeued} == {Sample.Status.ABORTED}


async def asking_an_engine(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """All but the first ask the engines in turn, which hang until they are aborted."""
    from slime.utils.http_utils import get, post

    if sample.index == 0:
        for url in args.engines:
            while (await get(f"{url}/v1/loads"))["loads"][0]["num_running_reqs"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return finished(sample)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}, "return_logprob": True}
    reply = await post(f"{args.engines[sample.index - 1]}/generate", body)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    return finished(sample, reward=0.0, status=Sample.Status.ABORTED)


# Data


def test_rows_become_groups(args_for: MakeArgs) -> None:
    args = args_for(single, {"a": 1}, {"a": 2}, {"a": 3}, n_samples_per_prompt=2)
    with Path(args.prompt_data).open("a") as file:
        file.write('{"prompt": "bare", "metadata": null}\nno json\n\n')
    source = RolloutDataSourceWithBuffer(args)
    assert len(source) == 4
    groups = source.get_samples(3) + source.get_samples(3)
    prompts = ["row 0", "row 1", "row 2", "bare", "row 0", "row 1"]
    assert [group[0].prompt for group in groups] == prompts
    assert [sample.index for group in groups for sample in group] == list(range(12))
    assert [group[1].group_index for group in groups] == list(range(6))
    assert groups[3][0].metadata == {}
    assert {sample.rollout_id for group in groups for sample in group} == {None}
    groups[0][0].metadata["a"] = "changed"
    assert groups[0][1].metadata == groups[4][0].metadata == {"a": 1}


def test_groups_put_back_come_first_and_in_full(args_for: MakeArgs) -> None:
    args = args_for(single, {}, n_samples_per_prompt=2)
    source = RolloutDataSourceWithBuffer(args)
    back = [Sample(index=90), Sample(index=91)]
    source.add_samples([back])
    groups = source.get_samples(2)
    assert groups[0] is back
    assert groups[1][0].index == 0
    with pytest.raises(AssertionError):
        source.add_samples([[Sample()]])
    with pytest.raises(RuntimeError):
        RolloutDataSource(args).add_samples([back])


def test_prompts_that_are_too_long_and_labels(args_for: MakeArgs, tmp_path: Path) -> None:
    path = tmp_path / "labelled.jsonl"
    rows = [{"prompt": "short", "answer": "1"}, {"prompt": "long " * 50, "answer": "2"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    args = args_for(single, prompt_data=str(path), label_key="answer", rollout_max_prompt_len=20)
    source = RolloutDataSource(args)
    assert len(source) == 1
    assert source.get_samples(1)[0][0].label == "1"


def test_shuffling_is_by_seed_and_epoch(args_for: MakeArgs) -> None:
    def prompts(seed: int) -> list[str]:
        args = args_for(single, *[{}] * 8, rollout_shuffle=True, rollout_seed=seed)
        return [group[0].prompt for group in RolloutDataSource(args).get_samples(16)]

    drawn = prompts(1)
    assert drawn == prompts(1) != prompts(2)
    assert sorted(drawn[:8]) == sorted(drawn[8:])
    assert drawn[:8] != drawn[8:]


def test_a_step_that_is_given_is_flattened() -> None:
    args = slime_args(n_samples_per_prompt=2)
    output = RolloutFnTrainOutput(samples=[some(2)], metrics={"a": 1})
    samples, logged = rollout_manager(args, output)._get_rollout_data(0)
    assert [sample.index for sample in samples] == [0, 1]
    assert logged == {"a": 1}


# Installing


@pytest.mark.parametrize("imported", [True, False])
def test_the_stand_ins_do_not_hide_another_slime(tmp_path: Path, imported: bool) -> None:
    (tmp_path / "slime.py").write_text("")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
{"import slime" if imported else ""}
from turnleaf.adapters.mock.slime import install
try:
    install()
except ImportError as error:
    print("refused:", error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("refused: another package called slime")
