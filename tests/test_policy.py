"""The numpy policy: its gradients, its samples, and that both are about the same probabilities."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from turnleaf.adapters.mock._blas import use_one_blas_thread
from turnleaf.adapters.mock._policy import Policy, Shape
from turnleaf.adapters.mock._policy_sampling import Generation, Sampler
from turnleaf.adapters.mock._policy_training import (
    Learner,
    TrainingSample,
    loss_and_gradient,
    sequence_logprobs,
)
from turnleaf.core import ContractError

VOCABULARY = range(100, 112)
SMALL = Shape(VOCABULARY, width=8, heads=2, hidden=12, positions=24)
UNKNOWN = 7


def policy_of(seed: int = 0, shape: Shape = SMALL, dtype: npt.DTypeLike = np.float32) -> Policy:
    """Random weights, larger than usual, so that probabilities differ widely."""
    policy = Policy.random(shape, seed, dtype)
    policy.vector *= 4
    return policy


def sample_of(rng: np.random.Generator, length: int) -> TrainingSample:
    tokens = rng.choice([UNKNOWN, *VOCABULARY], length)
    mask = (rng.random(length) < 0.5) & (tokens != UNKNOWN)
    mask[0] = False
    logprobs = -rng.exponential(2.0, length)
    return TrainingSample(tokens, mask, logprobs, float(rng.normal()))


def sampled(
    policy: Policy, prompts: list[list[int]], tokens: int = 6, **options: Any
) -> list[Generation]:
    sampler = Sampler(policy, 0)
    generations = [Generation(policy.rows(prompt), **options) for prompt in prompts]
    for generation in generations:
        sampler.join(generation)
    for _ in range(tokens):
        sampler.step()
    return generations


def ids_of(generation: Generation) -> list[int]:
    return [VOCABULARY[row] if row < len(VOCABULARY) else UNKNOWN for row in generation.rows]


def prompts_of(rng: np.random.Generator, count: int) -> list[list[int]]:
    lengths = rng.integers(1, 15, count)
    return [rng.choice([UNKNOWN, *VOCABULARY], length).tolist() for length in lengths]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradients_are_those_of_finite_differences(clip: float | None) -> None:
    policy = policy_of(dtype=np.float64)
    rng = np.random.default_rng(1)
    samples = [sample_of(rng, int(length)) for length in rng.integers(1, 20, 18)]

    def loss() -> float:
        return loss_and_gradient(policy, samples, temperature=0.7, clip=clip)[1].loss

    gradient, report = loss_and_gradient(policy, samples, temperature=0.7, clip=clip)
    assert report.gradient_norm == pytest.approx(np.linalg.norm(gradient))
    assert report.tokens == sum(sample.loss_mask.sum() for sample in samples)
    assert (report.clipped > 0) == (clip is not None)
    named = policy.views(gradient)
    for name, parameter in policy.parameters.items():
        flat, along = parameter.reshape(-1), named[name].reshape(-1)
        for index in rng.choice(len(flat), min(len(flat), 12), replace=False):
            value, step = flat[index], 1e-6
            flat[index] = value + step
            above = loss()
            flat[index] = value - step
            slope = (above - loss()) / (2 * step)
            flat[index] = value
            assert along[index] == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def test_both_losses_have_one_gradient_where_the_samples_come_from() -> None:
    policy = policy_of(dtype=np.float64)
    rng = np.random.default_rng(2)
    samples = []
    for _ in range(5):
        sample = sample_of(rng, 12)
        (logprobs,) = sequence_logprobs(policy, [sample.tokens])
        samples.append(attrs.evolve(sample, logprobs=np.where(sample.loss_mask, logprobs, 0)))
    plain, _ = loss_and_gradient(policy, samples)
    clipped, report = loss_and_gradient(policy, samples, clip=0.2)
    np.testing.assert_allclose(plain, clipped, rtol=1e-9, atol=1e-12)
    assert report.max_logprob_difference < 1e-12
    assert report.clipped == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_is_sampled_has_the_probability_that_is_recomputed(temperature: float) -> None:
    policy = policy_of()
    prompts = prompts_of(np.random.default_rng(3), 17)
    generations = sampled(policy, prompts, temperature=temperature)
    scores = sequence_logprobs(policy, [ids_of(each) for each in generations], temperature)
    for prompt, generation, score in zip(prompts, generations, scores, strict=True):
        np.testing.assert_allclose(generation.logprobs, score[len(prompt) :], atol=1e-5)
        assert len(generation.logprobs) == 6


def test_temperature_divides_the_logits() -> None:
    policy = policy_of(dtype=np.float64)
    every = [[100, token] for token in VOCABULARY]
    at = {
        temperature: np.array([row[1] for row in sequence_logprobs(policy, every, temperature)])
        for temperature in (1.0, 0.5)
    }
    squared = np.exp(2 * at[1.0])
    np.testing.assert_allclose(np.exp(at[0.5]), squared / squared.sum(), rtol=1e-9)


def test_samples_are_as_frequent_as_their_probabilities_say() -> None:
    policy = policy_of()
    count = 8000
    generations = sampled(policy, [[103, 101]] * count, 1, temperature=1.5)
    every = [[103, 101, token] for token in VOCABULARY]
    logprobs = [score[2] for score in sequence_logprobs(policy, every, 1.5)]
    expected = count * np.exp(np.array(logprobs, dtype=np.float64))
    observed = np.bincount([each.rows[-1] for each in generations], minlength=len(VOCABULARY))
    assert expected.sum() == pytest.approx(count)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 11 degrees of freedom: exceeded once in a thousand seeds


def test_a_generation_does_not_depend_on_its_neighbours() -> None:
    """Alone, or among others that come and go."""
    policy = policy_of()
    prompts = prompts_of(np.random.default_rng(4), 17)
    (alone,) = sampled(policy, prompts[:1], 8, seed=5)
    sampler = Sampler(policy, 1)
    others = [Generation(policy.rows(prompt)) for prompt in prompts[1:]]
    for other in others[:9]:
        sampler.join(other)
    sampler.step()
    here = Generation(policy.rows(prompts[0]), seed=5)
    sampler.join(here)
    for step in range(7):
        sampler.join(others[9 + step])
        sampler.step()
        sampler.leave(others[step])
    sampler.step()
    assert here.rows == alone.rows
    np.testing.assert_allclose(here.logprobs, alone.logprobs, atol=1e-5)
    assert [len(other.logprobs) for other in others] == [
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        9,
        *range(8, 1, -1),
    ]


def test_a_seed_belongs_to_a_place_in_the_sequence() -> None:
    policy = policy_of()
    (whole,) = sampled(policy, [[100, 101]], 8, seed=5)
    (begun,) = sampled(policy, [[100, 101]], 3, seed=5)
    (continued,) = sampled(policy, [ids_of(begun)], 5, seed=5)
    assert continued.rows == whole.rows
    (other,) = sampled(policy, [[100, 101]], 8, seed=6)
    assert other.rows != whole.rows


def test_without_temperature_the_likeliest_is_taken() -> None:
    policy = policy_of()
    (greedy,) = sampled(policy, [[100, 101]], 5, temperature=0.0)
    tokens = ids_of(greedy)
    for position in range(2, 7):
        candidates = [[*tokens[:position], token] for token in VOCABULARY]
        logprobs = [score[-1] for score in sequence_logprobs(policy, candidates)]
        assert VOCABULARY[int(np.argmax(logprobs))] == tokens[position]
        assert greedy.logprobs[position - 2] == pytest.approx(max(logprobs), abs=1e-5)


def test_new_weights_score_the_whole_sequence_anew() -> None:
    old, new = policy_of(0), policy_of(1)
    sampler = Sampler(old, 0)
    prompts = prompts_of(np.random.default_rng(5), 5)
    generations = [Generation(old.rows(prompt)) for prompt in prompts]
    for generation in generations[:4]:
        sampler.join(generation)
    for policy in (old, new):
        sampler.replace(policy)
        for _ in range(3):
            sampler.step()
        if policy is old:
            sampler.join(generations[4])
    for prompt, generation in zip(prompts[:4], generations[:4], strict=True):
        for policy, span in ((old, slice(0, 3)), (new, slice(3, 6))):
            (scores,) = sequence_logprobs(policy, [ids_of(generation)])
            expected = scores[len(prompt) :][span]
            np.testing.assert_allclose(generation.logprobs[span], expected, atol=1e-5)
    (scores,) = sequence_logprobs(new, [ids_of(generations[4])])
    np.testing.assert_allclose(generations[4].logprobs, scores[len(prompts[4]) :], atol=1e-5)
    with pytest.raises(ValueError, match="another shape"):
        sampler.replace(policy_of(shape=attrs.evolve(SMALL, positions=25)))


def test_unknown_ids_are_read_but_cannot_be_said() -> None:
    policy = policy_of()
    (scores,) = sequence_logprobs(policy, [[100, UNKNOWN, 101]])
    assert np.isnan(scores[0])
    assert scores[1] == -np.inf
    assert scores[2] < 0
    (others,) = sequence_logprobs(policy, [[100, UNKNOWN + 1, 101]])
    assert others[2] == scores[2]


@pytest.mark.parametrize(
    ("tokens", "trained", "complaint"),
    [
        ([100, UNKNOWN], 1, "cannot say"),
        ([100, 101], 0, "its first token"),
        ([], None, "from 0 to 0 tokens"),
        ([100] * 25, 3, "takes from 1 to 24"),
    ],
)
def test_what_cannot_be_learned_is_refused(
    tokens: list[int], trained: int | None, complaint: str
) -> None:
    mask = np.zeros(len(tokens), dtype=np.bool_)
    if trained is not None:
        mask[trained] = True
    sample = TrainingSample(np.array(tokens, dtype=int), mask, np.zeros(len(tokens)), 1.0)
    with pytest.raises(ValueError, match=complaint):
        loss_and_gradient(policy_of(), [sample])


def test_weights_in_a_file(tmp_path: Path) -> None:
    policy = policy_of()
    path = tmp_path / "weights.npz"
    policy.save(path)
    loaded = Policy.load(path)
    assert loaded.shape == policy.shape
    assert loaded.vector.dtype == np.float32
    np.testing.assert_array_equal(loaded.vector, policy.vector)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.npz"]


@pytest.mark.parametrize("damage", ["absent", "cut", "text", "short", "nan", "format"])
def test_damaged_weights_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "weights.npz"
    policy = policy_of()
    policy.save(path)
    with np.load(path) as stored:
        arrays = dict(stored)
    match damage:
        case "absent":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "text":
            path.write_text("no weights")
        case "short":
            np.savez(path, **{**arrays, "vector": policy.vector[:-1]})
        case "nan":
            np.savez(path, **{**arrays, "vector": policy.vector * np.float32(np.nan)})
        case "format":
            np.savez(path, **{**arrays, "format": 99})
    with pytest.raises(ContractError, match=r"weights\.npz cannot be read"):
        Policy.load(path)


@pytest.mark.parametrize(
    "fields", [{"vocabulary": []}, {"vocabulary": [1, 1]}, {"vocabulary": [1], "heads": 3}]
)
def test_an_impossible_shape_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"vocabulary|heads"):
        Shape(**fields)


def test_rewarded_samples_become_likelier_until_the_clip() -> None:
    tokens = np.array([100, 101, 102])
    mask = np.array([False, False, True])
    moved = {}
    for clip in (None, 0.2):
        policy = policy_of()
        (before,) = sequence_logprobs(policy, [tokens])
        sample = TrainingSample(tokens, mask, before, 1.0)
        learner = Learner(policy, learning_rate=1e-4, clip=clip)
        reports = [learner.update([sample]) for _ in range(100)]
        moved[clip] = float((sequence_logprobs(policy, [tokens])[0] - before)[2])
        assert reports[0].clipped == 0
        assert reports[-1].clipped == (0 if clip is None else 1)
    assert np.log(1.2) < moved[0.2] < moved[None]
    policy = policy_of()
    Learner(policy, learning_rate=1e-4).update([attrs.evolve(sample, weight=-1.0)])
    assert sequence_logprobs(policy, [tokens])[0][2] < before[2]


def test_a_copy_has_parameters_of_its_own() -> None:
    policy = policy_of()
    copy = policy.copy()
    copy.vector += 1
    assert (copy.vector != policy.vector).all()
    assert (copy.parameters["head"] != policy.parameters["head"]).all()


def test_numpys_own_blas_can_be_told_to_use_one_thread() -> None:
    if "openblas" not in str(np.show_config(mode="dicts")):
        pytest.skip("this numpy multiplies by another library")
    assert use_one_blas_thread()
