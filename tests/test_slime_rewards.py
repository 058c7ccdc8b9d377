"""Rewards: read, given a form, scored, normalised, filtered."""

import decimal
import fractions
import math
import sys
import types
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from tests.slime_host import evaluation_metrics, fresh_slime, metrics, rollout_manager, slime_args
from turnleaf.adapters.slime import RolloutSamples, normalize_episode_rewards, reward_model
from turnleaf.adapters.slime._rewards import (
    REWARD_MODEL,
    USERS_PATH,
    has_reward_model,
    number_in,
    reward_form,
    scored,
    take_over_reward_model,
)
from turnleaf.adapters.slime.filters import nonzero_std
from turnleaf.core import LARGEST_REWARD, BadResultError, ContractError, group_advantages

# isort: split
from slime.utils.types import Sample

pytestmark = [pytest.mark.slime, pytest.mark.anyio]

KEYS = [
    {},
    {"reward_key": "score"},
    {"eval_reward_key": "exact"},
    {"reward_key": "score", "eval_reward_key": "exact"},
    {"reward_key": "score", "eval_reward_key": "score"},
    {"reward_key": "score", "log_reward_category": "category"},
]


def sample(reward: Any = None, **fields: Any) -> Sample:
    return Sample(**{"index": 7, "group_index": 3, "rollout_id": 7, "reward": reward} | fields)


@pytest.fixture
def users_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """`path = users_model(function)`: importable under that path until the test ends."""
    fresh_slime()

    def importable(function: Any) -> str:
        module = types.ModuleType("users_reward_model")
        module.score = function  # type: ignore[attr-defined]  # a user's function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}.score"

    return importable


def answering(reward: Any) -> Callable[..., Awaitable[Any]]:
    async def score(args: Any, sample: Any, **_: Any) -> Any:
        if isinstance(reward, Exception):
            raise reward
        return reward

    return score


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("evaluation", [False, True])
def test_what_is_written_is_what_slime_reads(keys: dict[str, str], evaluation: bool) -> None:
    args = slime_args(**keys)
    form = reward_form(args, 0.25, evaluation=evaluation)
    assert number_in(args, form, evaluation=evaluation) == 0.25
    if evaluation:
        key = args.eval_reward_key or args.reward_key
        assert (form[key] if key else form) == 0.25
    else:
        assert sample(form).get_reward_value(args) == 0.25


@pytest.mark.parametrize("keys", KEYS)
def test_slimes_metrics_of_training_read_every_form(keys: dict[str, str]) -> None:
    args = slime_args(**keys)
    samples = [
        sample(
            reward_form(args, reward, evaluation=False),
            group_index=group,
            tokens=[1, 2],
            response_length=1,
            loss_mask=[1],
        )
        for group, reward in ((0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0))
    ]
    # All of a group's rewards being equal is counted by their value.
    assert metrics(args, samples)["zero_std/count_1.0"] == 1


@pytest.mark.parametrize("keys", [keys for keys in KEYS if [*keys] != ["eval_reward_key"]])
def test_slimes_metrics_of_an_evaluation_read_every_form(keys: dict[str, str]) -> None:
    args = slime_args(**keys)
    samples = [
        sample(reward_form(args, 1.0, evaluation=True), group_index=None, response_length=1)
        for _ in range(2)
    ]
    key = args.eval_reward_key or args.reward_key
    rewards = [one.reward[key] if key else one.reward for one in samples]
    results = {"rewards": rewards, "samples": samples, "truncated": [False, False]}
    assert evaluation_metrics(args, {"set": results})["eval/set"] == 1.0


@given(st.floats(-LARGEST_REWARD, LARGEST_REWARD) | st.integers(-(2**60), 2**60))
def test_numbers_of_every_kind_are_read(number: float) -> None:
    args = slime_args()
    for value in (number, np.float64(number), np.array(float(number)), np.longdouble(number)):
        read = number_in(args, value)
        assert type(read) is float
        assert read == float(number)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int8(-3), -3.0),
        (np.uint64(2**63), 2.0**63),
        (np.array(2), 2.0),
        (fractions.Fraction(1, 4), 0.25),
        (0, 0.0),
        (-0.0, 0.0),
        (LARGEST_REWARD, LARGEST_REWARD),
    ],
)
def test_numbers_of_other_types_are_read(value: Any, number: float) -> None:
    assert number_in(slime_args(), value) == number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (True, "True"),
        (False, "False"),
        (np.bool_(True), "True"),
        (np.array(True), "True"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (np.float32("nan"), "nan"),
        (np.float16("inf"), "inf"),
        (1e39, "1e\\+39"),
        (10**400, "1000"),
        pytest.param(10**5000, "int", id="an int too long to print"),
        (fractions.Fraction(10**400), "Fraction"),
        ("1.0", "'1.0'"),
        ("", "''"),
        (b"1", "b'1'"),
        (1 + 0j, "1\\+0j"),
        ([1.0], r"\[1.0\]"),
        ((1.0,), "1.0"),
        (np.zeros(1), "array"),
        (np.zeros((1, 1)), "array"),
        (decimal.Decimal(1), "Decimal"),
        (object(), "object"),
        ("x" * 1000, "'xxx"),
    ],
)
def test_all_else_is_refused_and_shown(value: Any, shown: str) -> None:
    for args in (slime_args(), slime_args(reward_key="score")):
        reward = {"score": value} if args.reward_key else value
        with pytest.raises(ValueError, match=f"is .*{shown}.*, which is no finite") as raised:
            number_in(args, reward)
        assert len(str(raised.value)) < 160


@given(strategies.bad_rewards)
def test_nothing_else_passes_for_a_number(value: Any) -> None:
    with pytest.raises(ValueError, match="no finite number"):
        number_in(slime_args(), value)


def test_a_number_that_cannot_be_made_one_is_refused() -> None:
    class Reluctant(fractions.Fraction):
        def __float__(self) -> float:
            raise RuntimeError("no")

        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(ValueError, match="Reluctant"):
        number_in(slime_args(), Reluctant(1))


@pytest.mark.parametrize(
    ("keys", "evaluation", "reward", "expected"),
    [
        ({"reward_key": "score"}, False, {"score": 1, "exact": 0}, 1.0),
        ({"reward_key": "score"}, True, {"score": 1, "exact": 0}, 1.0),
        ({"reward_key": "score", "eval_reward_key": "exact"}, False, {"score": 1, "exact": 0}, 1.0),
        ({"reward_key": "score", "eval_reward_key": "exact"}, True, {"score": 1, "exact": 0}, 0.0),
        ({"eval_reward_key": "exact"}, True, {"score": 1, "exact": 0}, 0.0),
        # slime fails on these in its own way; what was meant is plain.
        ({"reward_key": "score"}, False, 0.5, 0.5),
        ({"eval_reward_key": "exact"}, False, 0.5, 0.5),
    ],
)
def test_the_key_chooses_the_number(
    keys: dict[str, str], evaluation: bool, reward: Any, expected: float
) -> None:
    assert number_in(slime_args(**keys), reward, evaluation=evaluation) == expected


@pytest.mark.parametrize(
    ("keys", "evaluation", "reward", "problem"),
    [
        ({}, False, {"score": 1}, "name one of its keys with --reward-key"),
        ({"eval_reward_key": "exact"}, False, {"exact": 1}, "--reward-key"),
        ({"reward_key": "score"}, False, {"exact": 1, 5: 2}, r"no key 'score', but \['exact', 5\]"),
        ({"reward_key": "score"}, False, {}, "no key 'score'"),
        ({"reward_key": "score", "eval_reward_key": "exact"}, True, {"score": 1}, "'exact'"),
    ],
)
def test_a_dict_without_the_number_is_refused(
    keys: dict[str, str], evaluation: bool, reward: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        number_in(slime_args(**keys), reward, evaluation=evaluation)


@pytest.mark.parametrize(
    ("args", "fields", "expected"),
    [
        ({}, {}, False),
        ({"rm_type": ""}, {}, False),
        ({"rm_type": "  "}, {"metadata": None}, False),
        ({"rm_type": "math"}, {}, True),
        ({}, {"metadata": {"rm_type": "math"}}, True),
        ({}, {"metadata": {"rm_type": ""}}, False),
        ({}, {"custom_rm_path": "a.b"}, True),
        ({"custom_rm_path": "a.b"}, {"metadata": None}, True),
    ],
)
def test_whether_slime_can_score(
    args: dict[str, Any], fields: dict[str, Any], expected: bool
) -> None:
    assert has_reward_model(slime_args(**args), sample(**fields)) is expected


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_number_of_the_hub_is_put_into_slimes_form(
    keys: dict[str, str], evaluation: bool, users_model: Any
) -> None:
    args = slime_args(custom_rm_path=users_model(answering(np.float32(0.5))), **keys)
    reward = await scored(args, sample(), evaluation=evaluation)
    assert reward == reward_form(args, 0.5, evaluation=evaluation)


async def test_a_dict_of_the_hub_is_kept_whole(users_model: Any) -> None:
    given = {"score": 0.5, "category": "late", "other": "text"}
    args = slime_args(custom_rm_path=users_model(answering(given)), reward_key="score")
    assert await scored(args, sample(), evaluation=False) == given


async def test_a_hub_that_gives_no_reward_leaves_it_so(users_model: Any) -> None:
    args = slime_args(custom_rm_path=users_model(answering(None)), reward_key="score")
    assert await scored(args, sample(), evaluation=False) is None


@pytest.mark.parametrize("value", ["1.0", True, math.nan, {"score": None}, {}, 10**400])
async def test_what_the_hub_gives_must_be_a_number(value: Any, users_model: Any) -> None:
    args = slime_args(custom_rm_path=users_model(answering(value)), reward_key="score")
    with pytest.raises(BadResultError, match="the reward model's reward"):
        await scored(args, sample(), evaluation=False)


async def test_the_samples_own_reward_model_comes_first(users_model: Any) -> None:
    args = slime_args(rm_type="no such type")
    path = users_model(answering(0.5))
    assert await scored(args, sample(custom_rm_path=path), evaluation=True) == 0.5


async def test_a_reward_model_that_slime_does_not_have_is_a_mistake_of_the_set_up() -> None:
    with pytest.raises(ContractError, match=r"no such type.*--rm-type"):
        await scored(slime_args(rm_type="no such type"), sample(), evaluation=False)


async def test_errors_of_a_reward_model_are_its_own(users_model: Any) -> None:
    args = slime_args(custom_rm_path=users_model(answering(OSError("away"))))
    with pytest.raises(OSError, match="away"):
        await scored(args, sample(), evaluation=False)


async def test_ours_stands_in_for_the_users_and_takes_empty_lists(users_model: Any) -> None:
    from slime.rollout.rm_hub import async_rm, batched_async_rm

    seen = []

    async def score(args: Any, samples: Any, **options: Any) -> Any:
        seen.append((samples, options))
        return [2.0, 0.5] if isinstance(samples, list) else 1

    args = slime_args(custom_rm_path=users_model(score))
    path = args.custom_rm_path
    for _ in range(2):
        take_over_reward_model(args)
        assert args.custom_rm_path == REWARD_MODEL == f"{reward_model.__module__}.reward_model"
        assert getattr(args, USERS_PATH) == path
    # slime scores what of a list of samples has no reward: nothing.
    assert await batched_async_rm(args, []) == []
    assert seen == []
    one, members = sample(), [RolloutSamples([sample(), sample()]), RolloutSamples([sample()])]
    assert await async_rm(args, one, some="option") == 1
    assert await batched_async_rm(args, members) == [2.0, 0.5]
    assert seen == [(one, {"some": "option"}), (members, {})]


@pytest.mark.parametrize(("rewards", "said"), [([1.0], "1 rewards for a group of 2"), (3, "3, no")])
async def test_a_group_needs_a_reward_for_each(users_model: Any, rewards: Any, said: str) -> None:
    async def score(args: Any, samples: Any) -> Any:
        return rewards

    args = slime_args(custom_rm_path=users_model(score))
    take_over_reward_model(args)
    with pytest.raises(BadResultError, match=said):
        await reward_model(args, [sample(), sample()])


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_model_of_the_user_there_is_nothing_to_stand_in_for(path: Any) -> None:
    args = slime_args(custom_rm_path=path)
    take_over_reward_model(args)
    assert args.custom_rm_path == path
    assert not hasattr(args, USERS_PATH)


@pytest.mark.parametrize("path", ["no_such_module.score", "math.no_such_function", "plain"])
def test_a_model_that_cannot_be_loaded_is_found_at_the_start(path: str) -> None:
    args = slime_args(custom_rm_path=path)
    with pytest.raises(ContractError, match=f"--custom-rm-path {path} cannot be loaded"):
        take_over_reward_model(args)
    assert args.custom_rm_path == path


async def test_ours_alone_is_no_reward_model() -> None:
    args = slime_args(custom_rm_path=REWARD_MODEL)
    take_over_reward_model(args)
    with pytest.raises(ContractError, match="name yours"):
        await scored(args, sample(), evaluation=False)


def batch(*leaves: tuple[Any, Any, Any], **fields: Any) -> list[Sample]:
    """Samples of (group, rollout, reward), one for each leaf."""
    return [
        sample(reward, group_index=group, rollout_id=rollout, **fields)
        for group, rollout, reward in leaves
    ]


INTERLEAVED = [
    (0, 10, 1.0),
    (1, 12, 5.0),
    (0, 11, 0.0),
    (0, 10, 1.0),
    (1, 13, 5.0),
    (0, 10, 1.0),
    (1, 13, 5.0),
    (2, 14, 3.0),
]


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        (False, [0.5, 0, -0.5, 0.5, 0, 0.5, 0, 0]),
        (True, [0.7071, 0, -0.7071, 0.7071, 0, 0.7071, 0, 0]),
    ],
)
def test_a_rollout_votes_once_however_many_leaves_it_has(std: bool, expected: list[float]) -> None:
    args = slime_args(n_samples_per_prompt=2, grpo_std_normalization=std)
    raw, advantages = normalize_episode_rewards(args, batch(*INTERLEAVED))
    assert raw == [reward for _, _, reward in INTERLEAVED]
    assert advantages == pytest.approx(expected, abs=1e-4)
    assert {type(number) for number in [*raw, *advantages]} == {float}


def test_leaves_with_different_rewards_are_an_error() -> None:
    args = slime_args(n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="'10' has leaves with different rewards"):
        normalize_episode_rewards(args, batch((0, 10, 1.0), (0, 10, 0.5), (0, 11, 0.0)))


def removed(samples: list[Sample], *positions: int) -> list[Sample]:
    for position in positions:
        samples[position].remove_sample = True
    return samples


@pytest.mark.parametrize("unscored", [0.0, None, math.nan, "text", {}])
@pytest.mark.parametrize("std", [False, True])
def test_a_removed_rollout_does_not_vote_whatever_its_reward(unscored: Any, std: bool) -> None:
    args = slime_args(n_samples_per_prompt=3, grpo_std_normalization=std)
    samples = removed(batch((0, 1, 1.0), (0, 2, 0.0), (0, 3, unscored), (0, 3, unscored)), 2, 3)
    raw, advantages = normalize_episode_rewards(args, samples)
    apart = 0.7071 if std else 0.5
    assert raw == [1.0, 0.0, 0.0, 0.0]
    assert advantages == pytest.approx([apart, -apart, 0, 0], abs=1e-4)


def test_a_group_of_removed_rollouts_gets_nothing() -> None:
    samples = removed(batch((0, 1, None), (0, 2, None)), 0, 1)
    args = slime_args(n_samples_per_prompt=2)
    assert normalize_episode_rewards(args, samples) == ([0.0, 0.0], [0.0, 0.0])


def test_a_failed_rollout_votes_with_its_reward_of_0() -> None:
    args = slime_args(n_samples_per_prompt=3, grpo_std_normalization=False)
    _, advantages = normalize_episode_rewards(args, batch((0, 1, 1.0), (0, 2, 0.0), (0, 3, 0.0)))
    assert advantages == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_rollout_of_which_some_leaves_are_removed_votes() -> None:
    args = slime_args(n_samples_per_prompt=2, grpo_std_normalization=False)
    samples = removed(batch((0, 1, 1.0), (0, 1, 1.0), (0, 2, 0.0)), 0)
    assert normalize_episode_rewards(args, samples)[1] == [0.5, 0.5, -0.5]
    samples[0].reward = None
    with pytest.raises(ValueError, match="'1' has leaves with different rewards"):
        normalize_episode_rewards(args, samples)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, 1e39, "1.0", True, {"score": 1.0}])
@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_a_reward_that_is_no_number_names_the_rollout(reward: Any, estimator: str) -> None:
    args = slime_args(n_samples_per_prompt=2, advantage_estimator=estimator)
    samples = batch((0, 1, 1.0), (5, 12, reward))
    with pytest.raises(BadResultError, match=r"rollout 12 \(sample index 7, group 5\)"):
        normalize_episode_rewards(args, samples)


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "ppo"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "on_policy_distillation"},
        {"rewards_normalization": False},
    ],
)
def test_elsewhere_rewards_pass_through(changes: dict[str, Any]) -> None:
    args = slime_args(n_samples_per_prompt=2, **changes)
    samples = batch((0, 1, 1), (0, 1, 1), (None, 2, np.float32(0.5)), (None, None, 0.0))
    raw, rewards = normalize_episode_rewards(args, samples)
    assert raw == rewards == [1.0, 1.0, 0.5, 0.0]
    assert {type(number) for number in raw} == {float}


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("std", [False, True])
def test_without_forks_it_is_slimes_own(estimator: str, std: bool) -> None:
    args = slime_args(
        n_samples_per_prompt=4,
        rollout_batch_size=2,
        advantage_estimator=estimator,
        grpo_std_normalization=std,
    )
    rewards = [1.0, 0.0, 0.25, 1.0, -3.0, 0.5, 0.5, 7.0]
    samples = batch(*((i // 4, i, reward) for i, reward in enumerate(rewards)))
    raw, advantages = normalize_episode_rewards(args, samples)
    slimes_raw, slimes = rollout_manager(args)._post_process_rewards(samples)
    assert raw == slimes_raw
    assert advantages == pytest.approx(slimes, abs=1e-5)


@given(strategies.leaf_batches())
def test_it_is_the_cores_formula(
    leaves: tuple[list[float], list[Any], list[Any], list[bool]],
) -> None:
    args = slime_args(n_samples_per_prompt=2)
    samples = [
        sample(reward, group_index=group, rollout_id=rollout, remove_sample=gone)
        for reward, group, rollout, gone in zip(*leaves, strict=True)
    ]
    raw, advantages = normalize_episode_rewards(args, samples)
    expected = group_advantages(
        *leaves[:3], estimator="grpo", normalize_std=True, removed=leaves[3]
    )
    assert advantages == pytest.approx(expected.tolist(), abs=1e-9)
    assert np.isfinite(raw).all()
    assert len(raw) == len(samples)


@pytest.mark.parametrize("estimator", ["gspo", "reinforce_plus_plus_baseline"])
def test_the_estimator_and_the_std_are_slimes_settings(estimator: str) -> None:
    args = slime_args(n_samples_per_prompt=2, advantage_estimator=estimator)
    _, advantages = normalize_episode_rewards(args, batch((0, 1, 4.0), (0, 2, 0.0)))
    expected = 2.0 if estimator == "reinforce_plus_plus_baseline" else 0.7071
    assert advantages == pytest.approx([expected, -expected], abs=1e-4)


def test_the_reward_key_is_honoured() -> None:
    args = slime_args(n_samples_per_prompt=2, reward_key="score", grpo_std_normalization=False)
    samples = batch((0, 1, {"score": 1, "exact": 9}), (0, 2, {"score": 0.0, "exact": 9}))
    assert normalize_episode_rewards(args, samples) == ([1.0, 0.0], [0.5, -0.5])


def test_samples_without_a_rollout_id_are_rollouts_of_their_own() -> None:
    args = slime_args(n_samples_per_prompt=3, grpo_std_normalization=False)
    # slime numbers them later; the same index twice, and ids that look like theirs, must not meet.
    leaves = [(0, None, 1.0), (0, None, 0.0), (0, 7, 2.0), (0, 7, 2.0)]
    assert normalize_episode_rewards(args, batch(*leaves))[1] == [0.0, -1.0, 1.0, 1.0]


def test_samples_without_a_group_are_an_error() -> None:
    args = slime_args(n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="rollout 4 has no group_index"):
        normalize_episode_rewards(args, batch((0, 1, 1.0), (None, 4, 0.0)))


def test_no_samples_have_no_rewards() -> None:
    assert normalize_episode_rewards(slime_args(), []) == ([], [])


def member(reward: Any, *, leaves: int = 1, gone: bool = False) -> RolloutSamples:
    return RolloutSamples(sample(reward, remove_sample=gone) for _ in range(leaves))


@pytest.mark.parametrize(
    ("group", "keep", "reason"),
    [
        ([member(1.0), member(0.0)], True, None),
        ([member(1.0, leaves=3), member(1.0)], False, "zero_std_1.0"),
        ([member(0.0, leaves=3), member(1.0)], True, None),
        # Rewards whose binary forms differ in the last place.
        ([member(0.1 + 0.2), member(0.3)], False, "zero_std_0.3"),
        # All that earned something is equal; what was removed did not count.
        ([member(1.0), member(1.0), member(0.0, gone=True)], False, "zero_std_1.0"),
        ([member(1.0), member(0.0, gone=True)], False, "zero_std_1.0"),
        ([member(1.0), member(0.0), member(0.0, gone=True)], True, None),
        ([member(0.0, gone=True), member(None, gone=True)], False, "removed"),
        ([member(2.5)], False, "zero_std_2.5"),
        ([], False, "removed"),
    ],
)
@pytest.mark.parametrize("form", [RolloutSamples, list, lambda member: member[-1]])
def test_the_filter_keeps_what_can_be_learned_from(
    group: list[RolloutSamples], keep: bool, reason: str | None, form: Any
) -> None:
    output = nonzero_std(slime_args(), [form(member) for member in group])
    assert (output.keep, output.reason) == (keep, reason)
    assert type(output.keep) is bool


def test_the_filter_honours_the_reward_key_and_further_arguments() -> None:
    args = slime_args(reward_key="score")
    group = [member({"score": 1.0, "other": 1.0}), member({"score": 1.0, "other": 0.0})]
    assert not nonzero_std(args, group, evaluation=False).keep
    group[0][-1].reward["score"] = 0.0
    assert nonzero_std(args, group).keep


def test_the_filter_names_a_rollout_whose_reward_is_no_number() -> None:
    with pytest.raises(BadResultError, match=r"rollout 7 .* its reward is None"):
        nonzero_std(slime_args(), [member(1.0), member(None)])


def test_the_filter_agrees_with_slimes_own_where_nothing_is_removed() -> None:
    from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std

    args = Namespace(reward_key=None, eval_reward_key=None)
    for rewards in (
        [1.0, 0.0],
        [1.0, 1.0],
        [0.0, 1.7e-6],
        [0.0, 1.3e-6],
        [0.5, 0.5 + 1e-8, 0.5],
        [0.0, 0.0, 1e-3],
        [-1.0, -1.0],
    ):
        group = [member(reward, leaves=2) for reward in rewards]
        ours, slimes = nonzero_std(args, group), check_reward_nonzero_std(args, group)
        assert (ours.keep, ours.reason) == (bool(slimes.keep), slimes.reason)
