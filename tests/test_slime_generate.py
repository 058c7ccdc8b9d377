"""The hooks driven by slime: training steps, their samples, and every token's whereabouts."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import slime_agents
from tests.slime_stack import (
    FORK,
    TURN,
    Stack,
    about,
    close_kept,
    flat,
    row,
    running_slime,
    train_data,
)
from turnleaf.adapters.slime import RolloutSamples
from turnleaf.core import BadResultError, ContractError

pytestmark = pytest.mark.slime


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    close_kept()


def step(stack: Stack, rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """One training step over the rows, as slime hands it to the trainer."""
    output = stack.rollout(stack.data_source(rows, folder))
    return train_data(stack.args, output)


def test_every_token_of_forking_rollouts_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(*FORK, reward=1.0), row("ask", reward=0.5), row("ask", "ask", reward=0.0)]
    script = [TURN, {"text": "cut", "finish": "length"}, {"text": "third"}]
    with running_slime(script, monkeypatch, rollout_batch_size=3, n_samples_per_prompt=2) as stack:
        data = step(stack, rows, tmp_path)
        counts = stack.check_ledger(data)
    assert counts["trained"] == counts["sampled"] > 0
    leaves_of = {rid: data["rollout_ids"].count(rid) for rid in data["rollout_ids"]}
    assert sorted(leaves_of.values()) == [1, 1, 1, 1, 2, 2]
    # Both rollouts of a row earned the same: nothing tells them apart.
    assert set(data["rewards"]) == {0.0}
    assert set(data["raw_reward"]) == {0.0, 0.5, 1.0}
    assert sum(data["truncated"]) == 2  # of the rollouts whose last turn was cut


def test_a_rollout_that_forks_counts_once_in_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One group of three rollouts; the agent's reward follows what its model said.
    scripts = {
        "train-0": [{"text": "win"}, {"text": "b"}],
        "train-1": [{"text": "lose"}],
        "train-2": [{"text": "lose"}],
    }
    rows = [row("ask", "fork_if_won", rewards={"win": 1.0, "lose": 0.0})]
    with running_slime(
        scripts,
        monkeypatch,
        rollout_batch_size=1,
        n_samples_per_prompt=3,
        grpo_std_normalization=False,
    ) as stack:
        data = step(stack, rows, tmp_path)
        stack.check_ledger(data)
    by_rollout = dict(zip(data["rollout_ids"], data["rewards"], strict=True))
    assert len(data["rewards"]) == 4
    assert by_rollout == pytest.approx({0: 2 / 3, 1: -1 / 3, 2: -1 / 3})


def test_fields_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = row(*FORK, reward=0.25)
    given["metadata"]["source_name"] = "somewhere"
    with running_slime([TURN], monkeypatch, rollout_batch_size=1) as stack:
        output = stack.rollout(stack.data_source([given], tmp_path))
    first, final = output.samples[0][0]
    assert isinstance(output.samples[0][0], RolloutSamples)
    for sample in (first, final):
        assert sample.prompt == "row 0"
        assert sample.group_index == 0
        assert sample.rollout_id == sample.index == 0
        assert sample.reward == 0.25
        assert sample.status.value == "completed"
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert sample.response_length < len(sample.tokens)
        assert sample.metadata["source_name"] == "somewhere"
        assert sample.metadata["payload"] == given["metadata"]["payload"]
        assert about(sample)["session_id"] == sample.session_id
        assert about(sample)["leaves"] == 2
        assert sample.prefix_cache_info.total_prompt_tokens > 0
        assert sample.non_generation_time >= 0
    assert [len(about(sample)["trained_turns"]) for sample in (first, final)] == [2, 1]
    assert first.weight_versions == ["default", "default"]
    assert first.response.count("an answer") == 2
    assert final.response.count("an answer") == 1


def test_what_goes_wrong_with_one_rollout_stays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row("ask"),
        row("ask", "fail"),
        row("fail"),
        row("ask", "hang"),
        {"metadata": {"note": "no payload"}},
        {},
        row(),
        row("ask", result={"error": "I gave up"}),
    ]
    with running_slime(
        [TURN], monkeypatch, rollout_batch_size=len(rows), max_rollout_time=2
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
        data = train_data(stack.args, output)
        stack.check_ledger(data)
    samples = flat(output)
    found = [(s.status.value, s.reward, s.remove_sample, about(s)["cause"]) for s in samples]
    assert found == [
        ("completed", 1.0, False, None),
        ("completed", 0.0, False, "agent"),
        ("aborted", 0.0, True, "agent"),
        ("completed", 0.0, False, "timeout"),
        ("aborted", 0.0, True, "trainer"),
        ("aborted", 0.0, True, "trainer"),
        ("aborted", 0.0, True, "agent"),
        ("completed", 0.0, False, "agent"),
    ]
    assert "the agent is broken" in about(samples[1])["error"]
    assert "metadata.payload" in about(samples[4])["error"]
    assert "without a model call" in about(samples[6])["error"]
    assert [sum(mask) > 0 for mask in data["loss_masks"]] == [
        not sample.remove_sample for sample in samples
    ]


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_an_abort_ends_everything_within_a_second(
    partial_rollout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first group finishes; the others wait for the engine, or hang in the agent.
    hanging = [TURN, {"text": "x y z", "hang": True}, TURN]
    scripts: dict[str, Any] = {"train-1": hanging, "train-2": hanging, "*": [TURN]}
    rows = [
        row("ask", "until_ready"),
        row("ask", "ask"),
        row("ask", "ask"),
        row("ask", "hang_once"),
    ]
    monkeypatch.setattr(slime_agents, "hung", False)
    timed = _time_aborts(monkeypatch)
    with running_slime(
        scripts,
        monkeypatch,
        rollout_batch_size=1,
        over_sampling_batch_size=4,
        partial_rollout=partial_rollout,
    ) as stack:
        monkeypatch.setattr(
            slime_agents, "ready", lambda: slime_agents.hung and len(stack.engine._running) == 2
        )
        source = stack.data_source(rows, tmp_path)
        output = stack.rollout(source)
        assert timed
        assert max(timed) < 1.0
        assert stack.engine._running == []
        data = train_data(stack.args, output)
        stack.check_ledger(data)
        assert [sample.index for sample in flat(output)] == [0]
        if not partial_rollout:
            return
        # What was put back starts anew, without stale tokens, and is trained.
        assert source.get_buffer_length() == 3
        stack.args.rollout_batch_size, stack.args.over_sampling_batch_size = 3, 3
        again = stack.rollout(source, 1)
        data = train_data(stack.args, again)
        counts = stack.check_ledger(data)
    assert [sample.index for sample in flat(again)] == [1, 2, 3]
    assert all(sample.status.value == "completed" for sample in flat(again))
    assert counts["trained"] > 0


def _time_aborts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds from slime's flag until its abort has seen every rollout end."""
    from slime.rollout import sglang_rollout

    timed: list[float] = []
    abort = sglang_rollout.abort

    async def timing(*args: Any) -> Any:
        began = time.monotonic()
        found = await abort(*args)
        timed.append(time.monotonic() - began)
        return found

    monkeypatch.setattr(sglang_rollout, "abort", timing)
    return timed


@pytest.mark.parametrize(
    "path",
    [
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "turnleaf.adapters.slime.filters.nonzero_std",
    ],
)
def test_dynamic_filters_see_rollouts(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"train-2": [{"text": "win"}], "*": [{"text": "lose"}]}
    always = row(*FORK, rewards={"win": 1.0, "lose": 1.0})
    differs = row(*FORK, rewards={"win": 1.0, "lose": 0.0})
    with running_slime(
        scripts,
        monkeypatch,
        n_samples_per_prompt=2,
        over_sampling_batch_size=2,
        dynamic_sampling_filter_path=path,
    ) as stack:
        output = stack.rollout(stack.data_source([always, differs], tmp_path))
        stack.check_ledger(train_data(stack.args, output))
    assert {sample.group_index for sample in flat(output)} == {1}
    assert output.metrics in ({}, {"rollout/dynamic_filter/drop_zero_std_1.0": 1})


def test_our_filter_leaves_removed_rollouts_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the first group one rollout has no turn: its reward 0 is no difference.
    scripts = {"train-2": [{"text": "win"}], "*": [{"text": "lose"}]}
    lonely = row("fail_if_first", "ask", reward=1.0)
    differs = row("ask", rewards={"win": 1.0, "lose": 0.0})
    monkeypatch.setattr(slime_agents, "hung", False)
    with running_slime(
        scripts,
        monkeypatch,
        n_samples_per_prompt=2,
        over_sampling_batch_size=2,
        dynamic_sampling_filter_path="turnleaf.adapters.slime.filters.nonzero_std",
    ) as stack:
        output = stack.rollout(stack.data_source([lonely, differs], tmp_path))
    assert {sample.group_index for sample in flat(output)} == {1}


def test_a_missing_reward_is_scored_once_by_slimes_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_agents, "scored", scored := [])
    rows = [row(*FORK, result={"note": "no reward"}), row("ask", reward=0.5)]
    with running_slime(
        [TURN],
        monkeypatch,
        rollout_batch_size=2,
        custom_rm_path="tests.slime_agents.length_of_response",
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
        train_data(stack.args, output)
    assert [sample.reward for sample in flat(output)] == [1.0, 1.0, 0.5]
    assert scored == [0]


def test_group_rm_scores_rollouts_not_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_agents, "scored", scored := [])
    rows = [row(*FORK, "fail_if_first")]
    monkeypatch.setattr(slime_agents, "hung", True)
    with running_slime(
        [TURN],
        monkeypatch,
        n_samples_per_prompt=3,
        group_rm=True,
        custom_rm_path="tests.slime_agents.first_of_group",
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
        data = train_data(stack.args, output)
    assert scored == [3]
    assert data["raw_reward"] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reward_model", "why"),
    [(None, "no reward model to ask"), ("tests.slime_agents.no_reward", "gave none either")],
)
def test_a_rollout_without_reward_or_reward_model_is_removed(
    reward_model: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"train-0": [{"text": "win"}], "train-1": [{"text": "lose"}], "*": [TURN]}
    rows = [row("ask", rewards={"win": 1.0, "lose": 0.0, "an answer": None})]
    with running_slime(
        scripts,
        monkeypatch,
        n_samples_per_prompt=3,
        grpo_std_normalization=False,
        custom_rm_path=reward_model,
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
        data = train_data(stack.args, output)
    assert data["rewards"] == [0.5, -0.5, 0.0]
    assert about(flat(output)[2])["removed"] == "no reward"
    assert why in about(flat(output)[2])["error"]
    assert not any(data["loss_masks"][2])


@pytest.mark.parametrize(
    "result", [{"reward": float("nan")}, {"reward": "1.0"}, {"reward": True}, "no dict"]
)
def test_a_bad_result_names_row_session_and_value(
    result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_agents, "odd_result", result)
    with running_slime([TURN], monkeypatch) as stack:
        source = stack.data_source([row("ask", odd=True)], tmp_path)
        with pytest.raises(BadResultError) as caught:
            stack.rollout(source)
    value = result if isinstance(result, str) else result["reward"]
    for part in ("row 0", "sample index 0", repr(value), "on_bad_result"):
        assert part in str(caught.value)
    # slime's own name for the session, as the local one has none.
    assert re.search(r"session [0-9a-f]{8}-[0-9a-f-]{27}\)", str(caught.value))


def test_a_bad_result_can_be_its_rollouts_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_agents, "odd_result", {"reward": float("inf")})
    rows = [row("ask", odd=True), row("ask")]
    with running_slime(
        [TURN],
        monkeypatch,
        rollout_batch_size=2,
        turnleaf={"on_bad_result": "fail_rollout"},
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
    bad, good = flat(output)
    assert (bad.reward, bad.remove_sample, bad.status.value) == (0.0, False, "completed")
    assert "inf" in about(bad)["error"]
    assert about(good)["error"] is None


def test_reward_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("ask", reward=0.25), row("fail")]
    with running_slime(
        [TURN], monkeypatch, rollout_batch_size=2, reward_key="score", eval_reward_key="score"
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
        data = train_data(stack.args, output)
    assert [sample.reward for sample in flat(output)] == [{"score": 0.25}, {"score": 0.0}]
    assert data["raw_reward"] == [0.25, 0.0]


def test_a_worker_that_dies_takes_only_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "turnleaf.adapters.slime._workers")

    def kill_worker() -> None:
        (pid,) = {int(r.args[0]) for r in caplog.records if "listens at" in r.msg}
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(slime_agents, "ready", lambda: kill_worker() or True)
    # A limit of its own, so that the service is new and says where its worker is.
    with running_slime([TURN], monkeypatch, max_rollout_time=61, ledger=False) as stack:
        source = stack.data_source([row("ask", "until_ready", "ask"), row("ask")], tmp_path)
        lost = flat(stack.rollout(source))
        kept = flat(stack.rollout(source, 1))
    assert [(s.status.value, about(s)["cause"]) for s in lost] == [("aborted", "infrastructure")]
    assert [(s.status.value, s.reward) for s in kept] == [("completed", 1.0)]


def test_first_calls_from_several_loops_share_one_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from slime.utils.types import Sample

    from turnleaf.adapters.slime import generate

    params = {"temperature": 1.0, "max_new_tokens": 16, "stop": None}
    barrier = threading.Barrier(4)
    caplog.set_level("INFO", "turnleaf.adapters.slime._workers")
    # A limit of its own, so that there is no service yet.
    with running_slime([TURN], monkeypatch, max_rollout_time=63) as stack:

        def call(number: int) -> Any:
            sample = Sample(index=number, group_index=0, prompt="p", **row("ask"))
            barrier.wait(20)
            hook = generate(stack.args, sample, params, evaluation=number == 3)
            return asyncio.run(hook)

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(call, range(4)))
        # Each worker that starts says where it is.
        assert len([r for r in caplog.records if "listens at" in r.msg]) == 1
        assert len(set(stack.collected.names.values())) == 4
    assert [type(result) is RolloutSamples for result in results] == [True, True, True, False]
    assert results[3].status.value == "completed"
    assert params == {"temperature": 1.0, "max_new_tokens": 16, "stop": None}


def test_a_run_in_which_nothing_succeeds_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_slime(
        [TURN], monkeypatch, rollout_batch_size=32, turnleaf={"failure_window": 0.01}
    ) as stack:
        source = stack.data_source([row("ask", "fail")] * 64, tmp_path)
        stack.rollout(source)
        with pytest.raises(ContractError, match=r"64 have failed.*the agent is broken"):
            stack.rollout(source)


def test_top_p_and_routing_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.utils.types import Sample

    from turnleaf.adapters.slime import generate

    rows = [row(*FORK), row("fail")]
    with running_slime(
        [TURN],
        monkeypatch,
        engine_options={"routed_experts_shape": (3, 2)},
        rollout_batch_size=2,
        rollout_top_p=0.9,
        use_rollout_routing_replay=True,
        num_layers=3,
        moe_router_topk=2,
    ) as stack:
        output = stack.rollout(stack.data_source(rows, tmp_path))
        data = train_data(stack.args, output)
        counts = stack.check_ledger(data)
        # slime asks for nothing to replay in an evaluation.
        sample = Sample(index=0, prompt="p", **row("ask"))
        evaluated = asyncio.run(generate(stack.args, sample, {"top_p": 0.7}, evaluation=True))
    assert (evaluated.reward, evaluated.rollout_top_p_token_ids) == (1.0, None)
    assert counts["trained"] > 0
    for position, tokens in enumerate(data["tokens"]):
        assert np.asarray(data["rollout_routed_experts"][position]).shape == (len(tokens) - 1, 3, 2)


def test_an_engine_without_replay_data_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_slime(
        [TURN], monkeypatch, engine_options={"knows_top_p_ids": False}, rollout_top_p=0.9
    ) as stack:
        source = stack.data_source([row("ask")], tmp_path)
        with pytest.raises(ContractError, match="sglang-top_p"):
            stack.rollout(source)
