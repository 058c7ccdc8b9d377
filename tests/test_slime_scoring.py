"""Rewards that slime's hub gives: what they may do, and what may happen meanwhile."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import slime_agents
from tests.slime_stack import (
    FORK,
    TURN,
    about,
    close_kept,
    flat,
    row,
    running_slime,
    train_data,
)
from turnleaf.core import BadResultError

pytestmark = pytest.mark.slime

MODEL = "tests.slime_agents.reward_model"


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    close_kept()


def scored_by(
    function: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, **arguments: Any
) -> list[Any]:
    """The samples of a forked rollout whose agent leaves the reward to a reward model."""
    monkeypatch.setattr(slime_agents, "scoring", function)
    with running_slime([TURN], monkeypatch, custom_rm_path=MODEL, **arguments) as stack:
        output = stack.rollout(stack.data_source([row(*FORK, result={})], folder))
        train_data(stack.args, output)
    return flat(output)


def test_what_a_reward_model_writes_holds_for_every_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(args: Any, sample: Any) -> float:
        sample.metadata["raw_reward"] = 0.75
        sample.train_metadata = {"loss": "of its own"}
        return 0.5

    samples = scored_by(score, monkeypatch, tmp_path)
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert [sample.metadata["raw_reward"] for sample in samples] == [0.75, 0.75]
    assert [sample.train_metadata for sample in samples] == [{"loss": "of its own"}] * 2
    assert samples[0].train_metadata is not samples[1].train_metadata
    assert [about(sample)["leaf"] for sample in samples] == [0, 1]


def test_a_reward_model_may_remove_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(args: Any, sample: Any) -> float:
        sample.remove_sample = True
        return 1.0

    samples = scored_by(score, monkeypatch, tmp_path)
    assert [(s.remove_sample, about(s)["removed"]) for s in samples] == [(True, "reward model")] * 2
    assert not any(sum(sample.loss_mask) for sample in samples)


@pytest.mark.parametrize("error", [RuntimeError("the judge is away"), asyncio.CancelledError()])
def test_a_reward_model_that_fails_removes_the_rollout(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(args: Any, sample: Any) -> float:
        raise error

    samples = scored_by(score, monkeypatch, tmp_path)
    for sample in samples:
        assert (sample.status.value, sample.reward, sample.remove_sample) == ("completed", 0, True)
        assert about(sample)["removed"] == "no reward"
        assert "the reward model" in about(sample)["error"]


def test_a_reward_model_that_is_not_there_is_no_ones_fault_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(args: Any, sample: Any) -> float:
        raise NotImplementedError("one day")

    samples = scored_by(score, monkeypatch, tmp_path)
    assert {about(sample)["removed"] for sample in samples} == {"no reward"}


@pytest.mark.parametrize("ends", ["with a reward", "with an error", "never"])
def test_an_abort_while_a_rollout_is_scored_counts(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.types import Sample

    from turnleaf.adapters.slime import generate

    async def score(args: Any, sample: Any) -> float:
        # As when the judge asks slime's own engines, whose calls are aborted first.
        GenerateState(args).aborted = True
        if ends == "with an error":
            raise RuntimeError("my call was aborted")
        if ends == "never":
            await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(slime_agents, "scoring", score)
    with running_slime([TURN], monkeypatch, custom_rm_path=MODEL) as stack:

        async def run() -> Any:
            sample = Sample(index=0, group_index=0, prompt="p", **row("ask", result={}))
            hook = generate(stack.args, sample, {"temperature": 1.0, "max_new_tokens": 8})
            return await asyncio.wait_for(hook, 20)

        samples = asyncio.run(run())
    assert (samples.status.value, samples.remove_sample) == ("aborted", True)
    assert about(samples[-1])["removed"] == "aborted"


BAD = [float("nan"), "good", None]
GROUP: dict[str, Any] = {"n_samples_per_prompt": 3, "group_rm": True, "custom_rm_path": MODEL}


def score_the_second(bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(args: Any, samples: Any) -> list[Any]:
        return [1.0, bad, 0.0]

    monkeypatch.setattr(slime_agents, "scoring", score)


@pytest.mark.parametrize("bad", BAD)
def test_a_groups_bad_reward(bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score_the_second(bad, monkeypatch)
    with running_slime([TURN], monkeypatch, **GROUP) as stack:
        source = stack.data_source([row(*FORK)] * 2, tmp_path)
        if bad is not None:
            with pytest.raises(BadResultError, match=r"sample index 1, group 0.*no finite number"):
                stack.rollout(source)
        else:
            samples = flat(stack.rollout(source))
            assert [about(s)["removed"] for s in samples[2:4]] == ["no reward"] * 2


@pytest.mark.parametrize("bad", BAD)
def test_a_groups_bad_reward_can_be_its_rollouts_failure(
    bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_the_second(bad, monkeypatch)
    lenient = {"on_bad_result": "fail_rollout"}
    with running_slime([TURN], monkeypatch, turnleaf=lenient, **GROUP) as stack:
        output = stack.rollout(stack.data_source([row(*FORK)], tmp_path))
        data = train_data(stack.args, output)
    assert data["raw_reward"] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    failed = flat(output)[2:4]
    assert all(about(sample)["error"] for sample in failed)
    assert [sample.remove_sample for sample in failed] == [bad is None] * 2
