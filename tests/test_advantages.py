from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import leaf_batches
from tests.timing import quickest
from turnleaf.core import ESTIMATORS, SettingsError, group_advantages

SCALED = ("grpo", "gspo", "cispo")
estimators = st.sampled_from(ESTIMATORS)

FORKED: dict[str, Any] = {
    "rewards": [1, 5, 0, 1, 5, 1, 5, 3],
    "group_ids": [0, 1, 0, 0, 1, 0, 1, 2],
    "rollout_ids": list("acbadade"),
}


def advantages(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    rollout_ids: npt.ArrayLike,
    *,
    estimator: str = "grpo",
    normalize_std: bool = False,
    removed: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    return group_advantages(
        rewards,
        group_ids,
        rollout_ids,
        estimator=estimator,
        normalize_std=normalize_std,
        removed=removed,
    )


def test_a_forked_rollout_weighs_once_in_its_group() -> None:
    """Case B24: uneven groups, interleaved, one of a single rollout."""
    plain = advantages(**FORKED)
    assert plain.dtype == np.float64
    assert plain.tolist() == [0.5, 0, -0.5, 0.5, 0, 0.5, 0, 0]
    a, b = 0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)
    assert a == pytest.approx(0.7071, abs=1e-4)
    assert advantages(**FORKED, normalize_std=True).tolist() == pytest.approx(
        [a, 0, b, a, 0, a, 0, 0], abs=1e-12
    )


def test_leaves_of_one_rollout_with_different_rewards_are_refused() -> None:
    rewards = [1, 5, 0, 1, 5, 0.999, 5, 3]
    with pytest.raises(ValueError, match=r"rollout 'a' has leaves with different rewards"):
        advantages(**{**FORKED, "rewards": rewards})


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_removed_rollout_does_not_vote(missing: float | None) -> None:
    """Case B25: a rollout without a score is no rollout with a score of 0."""
    group: dict[str, Any] = {
        "rewards": [1.0, 0.0, missing],
        "group_ids": [7, 7, 7],
        "rollout_ids": [10, 11, 12],
        "removed": [False, False, True],
    }
    assert advantages(**group).tolist() == [0.5, -0.5, 0]
    assert advantages(**group, normalize_std=True).tolist() == pytest.approx(
        [0.7071, -0.7071, 0], abs=1e-4
    )


def test_a_group_of_removed_rollouts_is_all_zero() -> None:
    for normalize_std in (False, True):
        result = advantages(
            [None, None], [0, 0], [1, 2], removed=[True, True], normalize_std=normalize_std
        )
        assert result.tolist() == [0, 0]


def test_a_rollout_is_removed_only_when_all_its_leaves_are() -> None:
    result = advantages(
        [1, 1, 0, 5, 5],
        [0, 0, 0, 0, 0],
        ["a", "a", "b", "c", "c"],
        removed=[True, False, False, True, True],
    )
    assert result.tolist() == [0.5, 0.5, -0.5, 0, 0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e39, None])
@pytest.mark.parametrize("removed", [None, [False, True, False]])
def test_a_reward_that_is_not_finite_names_its_rollout(
    reward: float | None, removed: list[bool] | None
) -> None:
    with pytest.raises(ValueError, match=r"rollout 'b{}' has a reward that is not a finite number"):
        advantages([1.0, reward, reward], [0, 0, 0], ["a", "b{}", "b{}"], removed=removed)
    with pytest.raises(ValueError, match="rollout 31 has"):
        advantages([1.0, reward, reward], [0, 0, 0], [30, 31, 31], removed=removed)


def test_a_rollout_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout 5 is in two groups"):
        advantages([1, 1, 1], [0, 1, 0], [5, 5, 6])


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("grop", "grpo"), ("gspo ", "gspo"), ("reinforce_plus_plus", "reinforce_plus_plus_baseline")],
)
def test_an_unknown_estimator_is_answered_with_the_nearest(asked: str, nearest: str) -> None:
    message = f"estimator '{asked}' is unknown; did you mean '{nearest}'.*grpo, gspo, cispo"
    with pytest.raises(SettingsError, match=message):
        advantages([1], [0], [0], estimator=asked)


@pytest.mark.parametrize("asked", ["", "☃", None])
def test_an_estimator_like_none_of_ours_is_refused_too(asked: Any) -> None:
    with pytest.raises(SettingsError, match="is unknown; did you mean"):
        advantages([1], [0], [0], estimator=asked)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rewards": [1, 2]}, r"group_ids has shape \(3,\)"),
        ({"rewards": 1.0}, r"rewards has shape \(\)"),
        ({"rewards": [[1], [2], [3]]}, r"rewards has shape \(3, 1\)"),
        ({"rewards": ["1", "2", "3"]}, "rewards must be numbers"),
        ({"rewards": [True, False, True]}, "rewards must be numbers, not bool"),
        ({"rewards": [None, "1", "2"]}, "rewards must be numbers"),
        ({"rewards": [{}, 1, 2]}, "rewards must be numbers, not object"),
        ({"group_ids": [0, 1]}, r"group_ids has shape \(2,\)"),
        ({"group_ids": [0.0, 1.0, 2.0]}, "group_ids must be integers or strings, not float64"),
        ({"group_ids": [None, 1, 2]}, "group_ids must be integers or strings, not object"),
        ({"rollout_ids": [0, 1, 2, 3]}, r"rollout_ids has shape \(4,\)"),
        ({"rollout_ids": [[0], [1], [2]]}, r"rollout_ids has shape \(3, 1\)"),
        ({"rollout_ids": [True, False, True]}, "rollout_ids must be integers or strings"),
        ({"removed": [False]}, r"removed has shape \(1,\)"),
        ({"removed": [0, 0, 1]}, "removed must be booleans, not int64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(wrong: dict[str, Any], message: str) -> None:
    fitting = {"rewards": [1, 2, 3], "group_ids": [0, 0, 0], "rollout_ids": [0, 1, 2]}
    with pytest.raises(ValueError, match=message):
        advantages(**{**fitting, **wrong})


def test_no_leaves_have_no_advantages() -> None:
    for removed in (None, []):
        result = advantages([], [], [], removed=removed, normalize_std=True)
        assert result.shape == (0,)
        assert result.dtype == np.float64


def test_arguments_are_not_changed() -> None:
    arrays = {
        "rewards": np.array([1.0, np.nan]),
        "group_ids": np.array([0, 0]),
        "rollout_ids": np.array([0, 1]),
        "removed": np.array([False, True]),
    }
    before = {name: array.copy() for name, array in arrays.items()}
    advantages(**arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


@given(
    st.lists(
        st.lists(st.floats(-100, 100).map(lambda reward: round(reward, 2)), min_size=2, max_size=8),
        min_size=1,
        max_size=5,
    ),
    estimators,
    st.booleans(),
    st.randoms(),
)
def test_groups_that_never_fork_get_what_slime_gives_them(
    groups: list[list[float]], estimator: str, normalize_std: bool, random: Any
) -> None:
    """slime: rewards - rewards.mean(), / (rewards.std() + 1e-6), with torch's unbiased std."""
    expected = []
    for group, rewards in enumerate(groups):
        centred = np.array(rewards) - np.mean(rewards)
        std = np.std(rewards, ddof=1)
        if estimator in SCALED and normalize_std:
            # On equal rewards slime divides rounding errors of its mean by 1e-6.
            centred = centred / (std + 1e-6) if std >= 1e-6 else 0 * centred
        if estimator == "rloo":
            # The reward less the mean of the others'.
            centred = [
                reward - np.mean(rewards[:own] + rewards[own + 1 :])
                for own, reward in enumerate(rewards)
            ]
        expected += [(group, *pair) for pair in zip(rewards, centred, strict=True)]
    leaves = list(enumerate(expected))
    random.shuffle(leaves)
    result = advantages(
        [reward for _, (_, reward, _) in leaves],
        [group for _, (group, _, _) in leaves],
        [rollout for rollout, _ in leaves],
        estimator=estimator,
        normalize_std=normalize_std,
    )
    np.testing.assert_allclose(
        result, [advantage for _, (_, _, advantage) in leaves], rtol=1e-9, atol=1e-9
    )


@given(leaf_batches(), estimators, st.booleans())
def test_forks_and_removed_rollouts_change_nothing_for_the_others(
    batch: tuple[list[float], list[Any], list[Any], list[bool]],
    estimator: str,
    normalize_std: bool,
) -> None:
    """Leaf by leaf, in plain Python, against the rollouts that count, each taken once."""
    counting: dict[Any, dict[Any, float]] = {}
    for reward, group, rollout, removed in zip(*batch, strict=True):
        if not removed:
            counting.setdefault(group, {})[rollout] = reward
    expected = []
    for group, rollout in zip(batch[1], batch[2], strict=True):
        voters = counting.get(group, {})
        if rollout not in voters or len(voters) < 2:
            expected.append(0.0)
            continue
        rewards = list(voters.values())
        advantage = voters[rollout] - np.mean(rewards)
        if estimator == "rloo":
            advantage *= len(rewards) / (len(rewards) - 1)
        elif estimator in SCALED and normalize_std:
            std = np.std(rewards, ddof=1)
            advantage = advantage / (std + 1e-6) if std >= 1e-6 else 0.0
        expected.append(advantage)
    result = advantages(
        *batch[:3],
        estimator=estimator,
        normalize_std=normalize_std,
        removed=np.array(batch[3], bool),
    )
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


@given(st.floats(-3e38, 3e38), st.integers(1, 9), estimators)
def test_equal_rewards_have_no_advantage_at_all(reward: float, count: int, estimator: str) -> None:
    for normalize_std in (False, True):
        result = advantages(
            [reward] * count,
            [0] * count,
            range(count),
            estimator=estimator,
            normalize_std=normalize_std,
        )
        assert result.tolist() == [0.0] * count


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=6),
    estimators,
    st.booleans(),
)
def test_finite_rewards_have_finite_advantages(
    rewards: list[float], estimator: str, normalize_std: bool
) -> None:
    count = len(rewards)
    result = advantages(
        rewards, [0] * count, range(count), estimator=estimator, normalize_std=normalize_std
    )
    assert np.isfinite(result).all()


def test_a_standard_deviation_below_the_threshold_counts_as_none() -> None:
    for spread, nothing in ((1e-6, True), (2e-6, False)):
        rewards = [0.0, spread]  # whose std is spread / sqrt(2)
        scaled = advantages(rewards, [0, 0], [0, 1], normalize_std=True)
        assert (scaled == 0).all() == nothing
        assert (advantages(rewards, [0, 0], [0, 1]) != 0).all()


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus_baseline", "dr_grpo", "rloo"])
def test_these_estimators_are_never_divided_by_the_standard_deviation(estimator: str) -> None:
    results = [
        advantages([0, 2, 4], [0, 0, 0], [0, 1, 2], estimator=estimator, normalize_std=std)
        for std in (False, True)
    ]
    expected = [-3, 0, 3] if estimator == "rloo" else [-2, 0, 2]
    assert [result.tolist() for result in results] == [expected, expected]


def test_a_hundred_thousand_leaves_cost_little_more_than_to_sort_them() -> None:
    """Some 12 ms, where sorting takes 9."""
    random = np.random.default_rng(0)
    rollouts = np.concatenate([np.arange(20_000), random.integers(20_000, size=80_000)])
    random.shuffle(rollouts)
    reward = random.random(20_000)
    group = random.permutation(20_000) % 2_500
    rewards, groups = reward[rollouts], group[rollouts]

    def ours() -> None:
        result = advantages(rewards, groups, rollouts, normalize_std=True)
        assert result.shape == (100_000,)

    seconds, sort = quickest(15, ours, lambda: np.argsort(rewards, kind="stable"))
    assert seconds < 2.5 * sort
