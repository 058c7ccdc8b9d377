"""The hooks in slime's other ways of running: fully asynchronous, evaluation, sample hooks."""

import asyncio
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import slime_agents, slime_host
from tests.slime_stack import (
    FORK,
    FULLY_ASYNC,
    TURN,
    Stack,
    about,
    close_kept,
    flat,
    fully_async,
    last_words,
    row,
    running_slime,
    train_data,
)
from turnleaf.adapters.slime import RolloutSamples, generate
from turnleaf.core import SettingsError

pytestmark = pytest.mark.slime

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "stop": None}


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    close_kept()


def test_fully_async_takes_forks_and_puts_back_what_had_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_agents, "hung", False)
    rows = [row("fail_if_first", *FORK), row("ask")]
    with running_slime(
        [TURN], monkeypatch, rollout_batch_size=2, rollout_function_path=FULLY_ASYNC
    ) as stack:
        source = stack.data_source(rows, tmp_path)
        # One at a time, so that the one that fails first is put back before the others.
        stack.args.sglang_server_concurrency = 1
        samples = fully_async(stack, source)
        slime_host.fresh_slime()
    assert all(sample.status.value == "completed" for sample in samples)
    retried = [sample for sample in samples if about(sample)["requeues"]]
    assert retried
    for sample in retried:
        assert (about(sample)["requeues"], about(sample)["leaves"]) == (1, 2)
        assert sample.reward == 1.0


def test_after_two_requeues_a_rollout_without_a_turn_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.utils.types import Sample

    with running_slime([TURN], monkeypatch) as stack:
        seen = []
        sample: Any = Sample(index=0, group_index=0, prompt="p", **row("fail"))
        for _ in range(3):
            sample = asyncio.run(generate(stack.args, sample, PARAMS))
            # As it would come out of a buffer that was saved.
            sample = pickle.loads(pickle.dumps(sample))
            seen.append((sample.status.value, about(sample)["requeues"], sample.remove_sample))
        assert len(sample) == 1
        sample[-1].metadata["payload"]["do"] = FORK
        sample = asyncio.run(generate(stack.args, sample, PARAMS))
    assert seen == [("aborted", 0, True), ("aborted", 1, True), ("failed", 2, True)]
    assert (sample.status.value, sample.reward, sample.remove_sample) == ("completed", 1.0, False)
    assert len(sample) == 2


def test_in_evaluation_a_rollout_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(*FORK, reward=1.0), row("ask", reward=0.0)]
    with running_slime(
        [TURN], monkeypatch, n_samples_per_eval_prompt=2, log_passrate=True
    ) as stack:
        data = evaluation(stack, rows, tmp_path, n_samples=2)
        logged = slime_host.evaluation_metrics(stack.args, data)
        stack.check_ledger()
    results = data["held-out"]
    assert results["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert logged["eval/held-out"] == 0.5
    assert logged["eval/held-out-pass@2"] == 0.5
    assert [about(sample)["leaves"] for sample in results["samples"]] == [2, 2, 1, 1]
    assert not any(isinstance(sample, list) for sample in results["samples"])


def test_evaluation_goes_on_while_training_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.types import Sample

    released = threading.Event()
    monkeypatch.setattr(slime_agents, "ready", released.is_set)
    with running_slime([TURN], monkeypatch) as stack:
        state = GenerateState(stack.args)

        async def run() -> tuple[Any, Any]:
            samples = [
                Sample(index=i, group_index=0, prompt="p", **row("ask", "until_ready", "ask"))
                for i in range(2)
            ]
            training = asyncio.create_task(generate(stack.args, samples[0], PARAMS))
            evaluating = asyncio.create_task(
                generate(stack.args, samples[1], PARAMS, evaluation=True)
            )
            while len(stack.engine.calls) < 2:  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.01)
            state.aborted = True
            aborted = await asyncio.wait_for(training, 1.0)
            released.set()
            return aborted, await evaluating

        aborted, evaluated = asyncio.run(run())
        stack.check_ledger()
    assert aborted.status.value == "aborted"
    assert (evaluated.status.value, evaluated.reward) == ("completed", 1.0)
    assert evaluated.response.count("an answer") == 2


def evaluation(
    stack: Stack, rows: list[dict[str, Any]], folder: Path, *, n_samples: int = 1, **dataset: Any
) -> dict[str, Any]:
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.eval_config import EvalDatasetConfig

    path = folder / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", **r}) + "\n" for r in rows))
    config = EvalDatasetConfig(
        name="held-out",
        path=str(path),
        input_key="prompt",
        metadata_key="metadata",
        n_samples_per_eval_prompt=n_samples,
        temperature=0.5,
        top_p=1.0,
        top_k=-1,
        max_response_len=64,
        **dataset,
    )
    stack.args.eval_datasets = [config]
    output = generate_rollout(stack.args, 0, None, evaluation=True)
    data: dict[str, Any] = output.data
    return data


def test_an_evaluations_own_reward_model_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row("ask", result={}), row("ask", reward=0.5)]
    with running_slime(
        [TURN], monkeypatch, custom_rm_path="tests.slime_agents.length_of_response"
    ) as stack:
        data = evaluation(stack, rows, tmp_path, custom_rm_path="tests.slime_agents.seven")
    assert data["held-out"]["rewards"] == [7.0, 0.5]


def test_sample_hooks_see_every_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_slime(
        [TURN],
        monkeypatch,
        rollout_sample_hook_path=["tests.slime_agents.note"],
        dynamic_sampling_filter_path="turnleaf.adapters.slime.filters.nonzero_std",
        n_samples_per_prompt=2,
    ) as stack:
        scripts = {"train-0": [{"text": "win"}], "*": [{"text": "lose"}]}
        stack.engine.play(scripts)
        rows = [row(*FORK, rewards={"win": 1.0, "lose": 0.0})]
        output = stack.rollout(stack.data_source(rows, tmp_path))
        data = train_data(stack.args, output)
        stack.check_ledger(data)
    assert len(flat(output)) == 4
    assert all(sample.metadata["noted"] for sample in flat(output))


def test_sample_hooks_are_refused_where_the_list_type_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_slime(
        [TURN],
        monkeypatch,
        rollout_sample_hook_path=["tests.slime_agents.note"],
        partial_rollout=True,
        gateway_port=1,  # other settings, so that no earlier service serves
    ) as stack:
        source = stack.data_source([row("ask")], tmp_path)
        with pytest.raises(SettingsError, match=r"--rollout-sample-hook-path.*--partial-rollout"):
            stack.rollout(source)


def test_partial_rollout_masks_what_an_older_policy_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a group of two one member is done when slime aborts; it comes back masked, leaf by leaf.
    from slime.rollout.sglang_rollout import generate_and_rm
    from slime.utils.types import Sample

    with running_slime(
        [TURN], monkeypatch, partial_rollout=True, mask_offpolicy_in_partial_rollout=True
    ) as stack:

        async def twice() -> Any:
            sample = Sample(index=0, group_index=0, prompt="p", **row(*FORK))
            done = await generate_and_rm(stack.args, sample, dict(PARAMS))
            return await generate_and_rm(stack.args, done, dict(PARAMS))

        again = asyncio.run(twice())
    assert isinstance(again, RolloutSamples)
    assert [len(sample.loss_mask) for sample in again] == [s.response_length for s in again]
    assert not any(sum(sample.loss_mask) for sample in again)


PROGRAM = """
import logging, sys
from pathlib import Path
import pytest
from tests import slime_stack
from tests.slime_stack import FULLY_ASYNC, TURN, fully_async, row

logging.basicConfig(level=logging.CRITICAL)
with slime_stack.running_slime(
    [TURN], pytest.MonkeyPatch(), rollout_function_path=FULLY_ASYNC, use_dynamic_batch_size=False
) as stack:
    fully_async(stack, stack.data_source([row("ask")], Path(sys.argv[1])))
"""


def test_fully_async_a_set_up_error_ends_the_process(tmp_path: Path) -> None:
    assert "--use-dynamic-batch-size" in last_words(PROGRAM, tmp_path, seconds=60)
