"""What is trained of rollouts, and with which weight; and a policy's way into the engine."""

from collections import defaultdict
from pathlib import Path

import attrs
import httpx
import numpy as np
import pytest

from turnleaf.adapters.mock import (
    Policy,
    PolicyEngine,
    Recipe,
    Request,
    Trainer,
    samples_of,
    sequence_logprobs,
    serve_engine,
    training_samples,
)
from turnleaf.core import AgentError, EngineError, Rollout, Trajectory, Turn, WeightSpan

VOCABULARY = range(100, 120)
RECIPE = Recipe(width=16, heads=2, hidden=16, positions=32, epochs=2)


def request(rollout: int, group: int) -> Request:
    return Request(f"train-{rollout}", group, rollout, payload={}, sampling={})


def turn(
    index: int, prompt: list[int], output: list[int], *, parent: int | None = None, keep: int = 0
) -> Turn:
    return Turn(
        id=f"turn-{index}",
        index=index,
        parent=None if parent is None else f"turn-{parent}",
        keep=keep,
        prompt=prompt,
        output=output,
        logprobs=[-0.1 * (index + 1)] * len(output),
        finish_reason="stop",
        weight_versions=[WeightSpan(f"step-{index // 2}", len(output))],
    )


def rollout(reward: float | None, *turns: Turn) -> Rollout:
    error = None if reward is not None else AgentError("no luck")
    status = "failed" if error else "completed"
    trajectory = Trajectory(turns)
    return Rollout(name="train", trajectory=trajectory, status=status, reward=reward, error=error)


LONG = rollout(
    1.0,
    turn(0, [100, 101], [110, 111]),
    turn(1, [102], [112], parent=0, keep=4),
    turn(2, [103], [113, 114, 115], parent=1, keep=6),
)
FORKED = rollout(0.5, turn(0, [100, 101], [110, 111]), turn(1, [104, 105], [112], parent=0, keep=1))
FAILED = rollout(None, turn(0, [100, 101], [116]))
SILENT = rollout(None)
RIGHT = rollout(1.0, turn(0, [106], [117]))

REQUESTS = [request(7, 0), request(8, 0), request(9, 0), request(10, 0), request(11, 1)]
ROLLOUTS = [LONG, FORKED, FAILED, SILENT, RIGHT]


def test_a_rollout_votes_once_and_one_without_leaves_not_at_all() -> None:
    samples = samples_of(REQUESTS, ROLLOUTS)
    assert [(s.group, s.rollout, s.number, s.reward) for s in samples] == [
        (0, 7, 0, 1.0),
        (0, 8, 0, 0.5),
        (0, 8, 1, 0.5),
        (0, 9, 0, 0.0),
        (1, 11, 0, 1.0),
    ]
    # Of the group's four rollouts three vote, the failed one with 0; who is alone learns nothing.
    assert [s.advantage for s in samples] == pytest.approx([0.5, 0.0, 0.0, -0.5, 0.0])


def test_the_loss_is_a_mean_over_rollouts_of_their_tokens() -> None:
    samples = samples_of(REQUESTS, ROLLOUTS)
    weighted = training_samples(samples)
    masses: dict[int, float] = defaultdict(float)
    for sample, training in zip(samples, weighted, strict=True):
        assert training.tokens is sample.leaf.tokens
        assert training.loss_mask is sample.leaf.loss_mask
        assert training.logprobs is sample.leaf.logprobs
        masses[sample.rollout] += training.weight * np.count_nonzero(training.loss_mask)
    assert masses == pytest.approx({7: 0.5 / 4, 8: 0.0, 9: -0.5 / 4, 11: 0.0})
    assert weighted[0].weight == pytest.approx(0.5 / 6 / 4)


def test_a_forked_rollout_weighs_as_much_as_any_other() -> None:
    samples = samples_of([request(0, 0), request(1, 0)], [FORKED, FAILED])
    first, second, failed = training_samples(samples)
    assert (first.weight, second.weight) == pytest.approx((0.25 / 3 / 2,) * 2)
    assert failed.weight == pytest.approx(-0.25 / 1 / 2)


def test_a_sample_is_written_with_the_weights_that_sampled_it() -> None:
    written = samples_of(REQUESTS, ROLLOUTS)[0].to_mapping()
    logprobs = written.pop("logprobs")
    assert written == {
        "group": 0,
        "rollout": 7,
        "leaf": 0,
        "reward": 1.0,
        "advantage": pytest.approx(0.5),
        "turns": ["turn-0", "turn-1", "turn-2"],
        "trained_turns": ["turn-0", "turn-1", "turn-2"],
        "tokens": [100, 101, 110, 111, 102, 112, 103, 113, 114, 115],
        "loss_mask": [0, 0, 1, 1, 0, 1, 0, 1, 1, 1],
        "prompt_length": 2,
        "weight_versions": [["step-0", 3], ["step-1", 3]],
    }
    expected = [0, 0, -0.1, -0.1, 0, -0.2, 0, -0.3, -0.3, -0.3]
    assert logprobs == pytest.approx(expected)


def trainer(
    *, engine: httpx.AsyncClient | None = None, folder: Path = Path("unused"), **recipe: float
) -> Trainer:
    chosen = attrs.evolve(RECIPE, **recipe)
    policy = Policy.random(chosen.shape(VOCABULARY), 0)
    return Trainer(policy, chosen, engine=engine or httpx.AsyncClient(verify=False), folder=folder)


def test_learning_makes_what_earned_more_likelier_and_what_earned_less_unlikelier() -> None:
    learning = trainer()
    tokens = [LONG.trajectory.leaves()[0].tokens, FAILED.trajectory.leaves()[0].tokens]
    before = [float(np.nansum(scores)) for scores in sequence_logprobs(learning.policy, tokens)]
    learning.learn(samples_of(REQUESTS, ROLLOUTS))
    after = [float(np.nansum(scores)) for scores in sequence_logprobs(learning.policy, tokens)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_a_learning_rate_of_0_changes_nothing() -> None:
    learning = trainer(learning_rate=0.0)
    before = learning.policy.vector.copy()
    learning.learn(samples_of(REQUESTS, ROLLOUTS))
    np.testing.assert_array_equal(learning.policy.vector, before)


def test_log_probabilities_are_compared_where_tokens_are_trained() -> None:
    learning = trainer()
    samples = samples_of(REQUESTS, ROLLOUTS)
    computed = sequence_logprobs(learning.policy, [sample.leaf.tokens for sample in samples])
    largest = max(
        abs(own[at] - sample.leaf.logprobs[at])
        for sample, own in zip(samples, computed, strict=True)
        for at in np.flatnonzero(sample.leaf.loss_mask)
    )
    assert learning.logprob_difference(samples) == pytest.approx(largest)
    assert learning.logprob_difference([]) == 0.0


@pytest.mark.anyio
async def test_an_engine_gets_the_weights_by_their_version(tmp_path: Path) -> None:
    shape = RECIPE.shape(VOCABULARY)
    engine = PolicyEngine(Policy.random(shape, 1), stop_token_id=101)
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        async with engine.sampling(), serve_engine(engine) as client.base_url:
            publishing = trainer(engine=client, folder=tmp_path)
            await publishing.publish("step-3")
            assert engine.weight_version == "step-3"
            assert engine.model_path == f"{tmp_path}/step-3.npz"
            stored = Policy.load(tmp_path / "step-3.npz")
            np.testing.assert_array_equal(stored.vector, publishing.policy.vector)
            with pytest.raises(EngineError, match=r"refused the weights .*step-4\.npz: .* shape"):
                await trainer(engine=client, folder=tmp_path, width=32).publish("step-4")
        with pytest.raises(EngineError, match="took no weights: ConnectError"):
            await publishing.publish("step-5")
