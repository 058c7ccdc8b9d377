"""When a run in which nothing succeeds is given up; the clock is the tests' own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnleaf.adapters.slime import _failures
from turnleaf.adapters.slime._failures import FailureWatch
from turnleaf.core import (
    AgentError,
    ContractError,
    GatewayError,
    Rollout,
    RolloutAborted,
    RolloutTimings,
    SessionBusy,
    SessionError,
    Trajectory,
)


@attrs.define
class Run:
    """A watch, what is noted in it, and what time it is."""

    watch: FailureWatch
    now: float = 1000.0

    def note(self, rollout: Rollout, *, at: float) -> None:
        self.now = 1000.0 + at
        self.watch.note(rollout)

    def gives_up(self, rollout: Rollout, *, at: float) -> str:
        with pytest.raises(ContractError) as raised:
            self.note(rollout, at=at)
        return str(raised.value)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    def begin(window: float = 600.0, at_least: int = 3) -> Run:
        run = Run(FailureWatch(window, at_least))
        monkeypatch.setattr(_failures, "time", SimpleNamespace(monotonic=lambda: run.now))
        return run

    return begin


def ended(error: Any = None, *, took: float = 1.0, name: str = "train-1", **fields: Any) -> Rollout:
    return Rollout(
        name=name,
        trajectory=Trajectory(),
        error=error,
        timings=RolloutTimings(session=took, **fields),
        status="completed" if error is None else "failed",
    )


FAILED = ended(AgentError("train-1: broken"))
ABORTED = attrs.evolve(ended(RolloutAborted("train-1: aborted")), status="aborted")


def test_it_takes_both_the_time_and_the_number(run: Callable[..., Run]) -> None:
    early = run()
    for _ in range(50):
        early.note(FAILED, at=0)
    # The first one was started a second before it failed.
    early.note(FAILED, at=598.9)
    early.gives_up(FAILED, at=599.0)

    few = run()
    few.note(FAILED, at=0)
    few.note(FAILED, at=5000)
    few.gives_up(FAILED, at=5001)


def test_what_a_rollout_took_is_time_without_a_success(run: Callable[..., Run]) -> None:
    watched = run()
    for _ in range(2):
        watched.note(ended(AgentError("x"), took=900.0), at=0)
    assert "for 900 s" in watched.gives_up(ended(AgentError("x"), took=900.0), at=0)


def test_waiting_for_capacity_is_not(run: Callable[..., Run]) -> None:
    watched = run()
    throttled = ended(AgentError("x"), took=1.0, waited=10_000.0, closing=10_000.0)
    for _ in range(50):
        watched.note(throttled, at=0)
    watched.note(throttled, at=598)


def test_a_success_begins_it_anew(run: Callable[..., Run]) -> None:
    watched = run()
    for _ in range(50):
        watched.note(FAILED, at=0)
    watched.note(ended(), at=590)
    # These were started before the success; the time counts from it.
    for at in (1180.0, 1185.0, 1189.0):
        watched.note(ended(AgentError("x"), took=1000.0), at=at)
    watched.gives_up(ended(AgentError("x"), took=1000.0), at=1190)


def test_what_failed_before_a_success_is_not_counted(run: Callable[..., Run]) -> None:
    watched = run()
    for _ in range(50):
        watched.note(FAILED, at=0)
    watched.note(ended(), at=1)
    for at in (1000, 2000):
        watched.note(FAILED, at=at)
    assert "3 have failed" in watched.gives_up(FAILED, at=3000)


def test_the_reasons_before_a_success_are_forgotten(run: Callable[..., Run]) -> None:
    watched = run(at_least=2)
    for _ in range(50):
        watched.note(ended(AgentError("old")), at=0)
    watched.note(ended(), at=0)
    watched.note(ended(AgentError("new")), at=1)
    said = watched.gives_up(ended(AgentError("new")), at=700)
    assert "old" not in said
    assert "2 have failed, 2 of them like this one: new" in said


def test_the_trainers_own_time_does_not_count(run: Callable[..., Run]) -> None:
    watched = run()
    watched.note(ended(), at=0)
    # Weights were trained for an hour meanwhile.
    for _ in range(50):
        watched.note(FAILED, at=3600)
    watched.note(FAILED, at=4198)
    watched.gives_up(FAILED, at=4199)


@pytest.mark.parametrize("between", [ABORTED, attrs.evolve(ABORTED, error=None)])
def test_what_slime_aborted_says_nothing(run: Callable[..., Run], between: Rollout) -> None:
    watched = run()
    for at in (0, 10_000):
        watched.note(between, at=at)
    for at in (20_000, 20_700):
        watched.note(FAILED, at=at)
        watched.note(between, at=at)
    assert "3 have failed" in watched.gives_up(FAILED, at=20_700)


def test_once_given_up_it_stays_so_until_a_success(run: Callable[..., Run]) -> None:
    watched = run(at_least=1)
    for at in (601, 602, 5000):
        watched.gives_up(ended(AgentError("x"), took=600.0), at=at)
    watched.note(ended(), at=5001)
    watched.note(FAILED, at=5002)


def test_the_most_frequent_reason_is_named_without_the_rollouts_names(
    run: Callable[..., Run],
) -> None:
    watched = run(at_least=7)
    for number in range(4):
        name = f"train-{number}"
        watched.note(ended(AgentError(f"{name}: no module named x"), name=name), at=0)
    watched.note(ended(SessionError("train-9: unreachable"), name="train-9"), at=0)
    watched.note(ended(GatewayError("the worker is away")), at=0)
    said = watched.gives_up(ended(GatewayError("the worker is away")), at=700)
    assert said == (
        "no rollout has succeeded for 701 s (turnleaf.failure_window: 600), 7 have failed, "
        "4 of them like this one: no module named x"
    )


def test_a_long_reason_is_cut(run: Callable[..., Run]) -> None:
    watched = run(at_least=1)
    said = watched.gives_up(ended(AgentError("x" * 10_000), took=600.0), at=600)
    assert len(said) < 500
    assert said.endswith("xxx…")


@given(
    st.lists(
        st.tuples(
            st.floats(0, 300, width=16),
            st.sampled_from(["succeeded", "failed", "failed", "failed", "aborted"]),
            st.floats(0, 300, width=16),
        ),
        max_size=30,
    )
)
def test_it_is_given_up_exactly_when_the_rule_says_so(
    events: list[tuple[float, str, float]],
) -> None:
    window, at_least = 600.0, 3
    now, last_success = 0.0, float("-inf")
    starts: list[float] = []
    watch = FailureWatch(window, at_least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_failures, "time", SimpleNamespace(monotonic=lambda: now))
        for pause, kind, took in events:
            now += pause
            if kind == "succeeded":
                watch.note(ended(took=took))
                starts, last_success = [], now
            elif kind == "aborted":
                watch.note(attrs.evolve(ABORTED, timings=RolloutTimings(session=took)))
            else:
                starts.append(max(now - took, last_success))
                over = len(starts) >= at_least and now - min(starts) >= window
                try:
                    watch.note(ended(AgentError("x"), took=took))
                except ContractError:
                    assert over
                else:
                    assert not over


def test_agents_for_which_there_was_no_room_do_not_count(run: Callable[..., Run]) -> None:
    watched = run(at_least=2)
    for second in range(0, 3000, 100):
        watched.note(ended(SessionBusy("train-1: throttled")), at=second)
    watched.note(ended(SessionError("train-1: broke")), at=3000)
    watched.note(ended(SessionError("train-1: broke")), at=3500)
    said = watched.gives_up(ended(SessionError("train-1: broke")), at=3650)
    assert "3 have failed" in said
