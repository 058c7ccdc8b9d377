"""The list that slime may also treat as one sample."""

import copy
import itertools
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.slime_host import slime_args, validate_rollout_ids
from turnleaf.adapters.slime import RolloutSamples

# isort: split
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.utils.types import Sample

pytestmark = pytest.mark.slime

LENGTHS = [3, 1, 2]


def leaf(number: int, *, length: int, **about: Any) -> Sample:
    told = {"error": None, "removed": None, "leaf": number, **about}
    return Sample(
        index=7,
        group_index=3,
        rollout_id=7,
        prompt="a prompt",
        tokens=[number] * (length + 2),
        response=f"leaf {number}",
        response_length=length,
        loss_mask=[1] * length,
        rollout_log_probs=[-0.5] * length,
        reward=1.0,
        status=Sample.Status.COMPLETED,
        metadata={"turnleaf": told, "row": "mine"},
    )


def rollout(lengths: list[int] = LENGTHS, **about: Any) -> RolloutSamples:
    return RolloutSamples(
        leaf(number, length=length, **about) for number, length in enumerate(lengths)
    )


def rewards(samples: RolloutSamples) -> list[Any]:
    return [sample.reward for sample in samples]


def test_reads_come_from_the_final_leaf() -> None:
    samples = rollout()
    final = samples[2]
    for name in vars(final):
        assert getattr(samples, name) is getattr(final, name), name
    assert samples.response == "leaf 2"
    assert samples.effective_response_length == 2
    assert samples.get_reward_value(Namespace(reward_key=None)) == 1.0
    assert samples.to_dict() == final.to_dict()
    # What slime puts into the one it reads belongs to that leaf.
    samples.metadata["start_rollout_id"] = 5
    assert [sample.metadata.get("start_rollout_id") for sample in samples] == [None, None, 5]


def test_of_several_changes_each_read_sees_the_last() -> None:
    samples = rollout()
    samples[0].status = Sample.Status.FAILED
    assert samples.status is Sample.Status.COMPLETED
    samples[-1].status = Sample.Status.ABORTED
    assert samples.status is Sample.Status.ABORTED
    samples.append(leaf(9, length=1))
    assert samples.response == "leaf 9"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", Sample.Status.ABORTED),
        ("session_id", "a session"),
        ("remove_sample", True),
        ("reward", 0.25),
        ("reward", {"score": 0.25}),
        ("reward", None),
        ("index", 12),
        ("group_index", 4),
        ("loss_mask", None),
        ("unknown_to_slime", [1]),
        ("_private", 1),
    ],
)
def test_writes_go_to_every_leaf(name: str, value: Any) -> None:
    samples = rollout()
    setattr(samples, name, value)
    assert [getattr(sample, name) for sample in samples] == [value] * 3
    assert getattr(samples, name) == value
    assert vars(samples) == {}
    assert [sample.response for sample in samples] == ["leaf 0", "leaf 1", "leaf 2"]


def test_what_was_written_is_the_final_leafs_own_and_shared_by_none() -> None:
    samples = rollout()
    # slime goes on writing into the trace that it hangs on.
    trace: dict[str, Any] = {"events": []}
    samples.trace = trace
    assert samples.trace is trace
    reward = {"score": 1.0}
    samples.reward = reward
    assert samples[-1].reward is reward
    samples[0].reward["score"] = 9.0
    assert samples[1].reward == samples[2].reward == {"score": 1.0}
    mask = [0, 0]
    samples.loss_mask = mask
    assert samples[-1].loss_mask is mask
    samples[0].loss_mask[0] = 1
    assert [samples[1].loss_mask, samples[2].loss_mask] == [[0], [0, 0]]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([0, 1, 0.0, True]))
def test_a_mask_of_one_value_takes_the_length_of_each_leaf(lengths: list[int], value: Any) -> None:
    samples = rollout(lengths)
    # As slime masks what an older policy sampled.
    samples.loss_mask = [value] * samples.response_length
    assert [sample.loss_mask for sample in samples] == [[value] * n for n in lengths]
    for sample in samples:
        sample._validate_response_metadata_lengths()


def test_a_mask_of_several_values_fits_one_leaf_only() -> None:
    alone = rollout([3])
    alone.loss_mask = [1, 0, 1]
    assert alone[0].loss_mask == [1, 0, 1]
    samples = rollout()
    with pytest.raises(ValueError, match=r"of 2 tokens .* 3 leaves"):
        samples.loss_mask = [0, 1]
    assert [sample.loss_mask for sample in samples] == [[1] * n for n in LENGTHS]


def test_a_mask_of_another_length_than_the_final_leafs_is_refused() -> None:
    for wrong in ([], [0], [0, 0, 0]):
        for lengths in (LENGTHS, [2]):
            samples = rollout(lengths)
            with pytest.raises(ValueError, match=f"{len(wrong)} tokens"):
                samples.loss_mask = wrong
            assert [sample.loss_mask for sample in samples] == [[1] * n for n in lengths]


def test_a_mask_may_be_an_array() -> None:
    samples = rollout()
    samples.loss_mask = np.zeros(2, dtype=np.int64)
    assert [list(sample.loss_mask) for sample in samples] == [[0, 0, 0], [0], [0, 0]]


@pytest.mark.parametrize("about", [{"error": "train-7: timed out"}, {"removed": "no turn"}])
def test_a_rollout_that_failed_or_was_removed_keeps_its_reward(about: dict[str, Any]) -> None:
    samples = rollout(**about)
    samples.reward = 5.0
    assert rewards(samples) == [1.0] * 3
    samples.status = Sample.Status.ABORTED
    assert samples.status is Sample.Status.ABORTED
    # Only the rollout as a whole is protected.
    samples[0].reward = 5.0
    assert rewards(samples) == [5.0, 1.0, 1.0]


@pytest.mark.parametrize("metadata", [None, {}, {"row": "mine"}])
def test_samples_that_turnleaf_did_not_make_take_a_reward(metadata: Any) -> None:
    samples = RolloutSamples([Sample(metadata=metadata), Sample(metadata=metadata)])
    samples.reward = 5.0
    assert rewards(samples) == [5.0, 5.0]


def test_the_index_is_the_rollouts_and_not_the_lists_method() -> None:
    samples = rollout()
    assert samples.index == 7
    samples.index = 8
    assert [sample.index for sample in samples] == [8, 8, 8]
    assert max([rollout(), samples, rollout()], key=lambda one: one.index) is samples
    # The method is still there for those who mean it.
    assert list.index(samples, samples[1]) == 1


COPIES: list[Callable[[RolloutSamples], RolloutSamples]] = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda samples, protocol=protocol: pickle.loads(pickle.dumps(samples, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("lengths", [[1], LENGTHS, []])
def test_it_survives_copying_and_pickling(
    copied: Callable[[RolloutSamples], RolloutSamples], lengths: list[int]
) -> None:
    samples = rollout(lengths)
    for sample in samples:
        sample.trace = {"events": [1]}
    again = copied(samples)
    assert type(again) is RolloutSamples
    assert again is not samples
    assert list(again) == list(samples)
    assert vars(again) == {}
    assert [sample.trace for sample in again] == [{"events": [1]}] * len(lengths)
    if lengths:
        again.status = Sample.Status.ABORTED
        assert again.status is Sample.Status.ABORTED
        shared = copied is copy.copy
        assert (samples.status is Sample.Status.ABORTED) is shared


def test_a_group_survives_pickling_with_what_its_members_share() -> None:
    group = [rollout(), rollout([1])]
    group.append(group[0])
    again = pickle.loads(pickle.dumps(group))
    assert [type(member) for member in again] == [RolloutSamples] * 3
    assert again[0] is again[2]
    assert again == group


@pytest.mark.parametrize(
    "name",
    [
        "__deepcopy__",
        "__getnewargs__",
        "__setstate__",
        "__array__",
        "__array_interface__",
        "__dataclass_fields__",
        "__torch_function__",
        "__fspath__",
        "__len_hint__",
        "_repr_html_",
        "no_such_field",
        "shape",
        "item",
        "",
        "a b",
        "é",
    ],
)
def test_odd_names_are_missing_rather_than_an_error(name: str) -> None:
    assert not hasattr(rollout(), name)
    assert not hasattr(RolloutSamples(), name)
    assert getattr(rollout(), name, "default") == "default"


@given(st.text(max_size=8))
def test_any_name_is_there_or_missing(name: str) -> None:
    samples = rollout()
    expected = hasattr(list, name) or hasattr(samples[-1], name) or name == "__dict__"
    if not name.startswith("__"):
        assert hasattr(samples, name) is expected
    hasattr(RolloutSamples(), name)


def test_an_empty_one_has_no_attributes_and_takes_none() -> None:
    empty = RolloutSamples()
    assert not empty
    assert len(empty) == 0
    for name in ("status", "reward", "index", "metadata"):
        assert not hasattr(empty, name)
        with pytest.raises(AttributeError, match=name):
            setattr(empty, name, None)


def test_a_missing_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = rollout().no_such_field
    with pytest.raises(AttributeError, match=r"'RolloutSamples'.*__array__"):
        rollout().__getattr__("__array__")


def test_it_is_a_list_to_whoever_looks() -> None:
    samples = rollout()
    assert isinstance(samples, list)
    assert not isinstance(samples, Sample)
    assert bool(samples)
    assert len(samples) == 3
    assert list(itertools.chain.from_iterable([samples, rollout([4])]))[:3] == list(samples)
    assert list(itertools.chain([*samples])) == list(samples)
    assert [sample.response for sample in reversed(samples)] == ["leaf 2", "leaf 1", "leaf 0"]
    assert samples == rollout()
    assert samples != rollout([1])
    assert samples[0] in samples
    # A part of a rollout does not stand for it.
    assert type(samples[:2]) is list


def test_slime_takes_and_flattens_it_at_every_depth() -> None:
    data = [[rollout(), rollout([1])], [rollout([2, 2]), rollout([5])]]
    validate_rollout_ids(data)
    flat: Any = data
    while isinstance(flat[0], list):
        flat = list(itertools.chain.from_iterable(flat))
    assert [sample.response_length for sample in flat] == [*LENGTHS, 1, 2, 2, 5]
    data[1][0][0].rollout_id = 8
    with pytest.raises(AssertionError, match="share"):
        validate_rollout_ids(data)


@pytest.mark.parametrize("reward_key", [None, "score"])
def test_slimes_own_filter_reads_one_reward_for_each_rollout(reward_key: str | None) -> None:
    args = slime_args(reward_key=reward_key)

    def scored(number: float, lengths: list[int]) -> RolloutSamples:
        samples = rollout(lengths)
        samples.reward = number if reward_key is None else {reward_key: number}
        return samples

    # Counted by leaves, the first group's mean would not be that of its rollouts.
    assert check_reward_nonzero_std(args, [scored(1.0, LENGTHS), scored(0.0, [1])]).keep
    dropped = check_reward_nonzero_std(args, [scored(1.0, LENGTHS), scored(1.0, [1])])
    assert not dropped.keep
    assert dropped.reason == "zero_std_1.0"
