"""How many leaves there are, and why."""

import logging
from typing import Any

import httpx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.gateway_stack import Stack, running_gateway
from tests.strategies import Recorded, recorded
from turnleaf.core import Key, Trajectory
from turnleaf.gateway._branches import Branches
from turnleaf.gateway._history import History

THINK = "<think>\nhm\n</think>\n\n"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@given(recorded, st.data())
def test_leaves_are_counted_as_the_trajectory_has_them(recorded: Recorded, data: Any) -> None:
    trajectory = Trajectory(recorded.trajectory._turns.values())
    assume(all(turn.end for turn in trajectory.turns))  # no prompt of a gateway's is empty
    delivered = [turn.id for turn in trajectory.turns if turn.excluded is None]
    branches = Branches()
    for turn_id in delivered:
        trajectory.exclude(turn_id, "undelivered")
        branches.note(turn_id, History().read([], None), None, repeated=False)
    for turn_id in data.draw(st.permutations(delivered)):
        trajectory.exclude(turn_id, None)
        branches.deliver(trajectory, turn_id)
        assert branches.leaves == len(trajectory._last_turns())


async def ask(
    stack: Stack, key: Key, messages: list[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    async with httpx.AsyncClient(verify=False) as http:
        response = await http.post(
            f"{key.base_url}/chat/completions",
            json={"model": "model", "messages": messages, **fields},
            headers={"x-api-key": key.secret},
        )
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("second", "fields", "reason"),
    [
        ([user("one")], {}, "resampled"),
        ([user("two")], {}, "new"),
        ([user("one"), said("First!"), user("two")], {}, "edited"),
        ([user("one"), said("First."), user("two")], {"tools": [TOOL]}, "edited"),
        ([user("one"), said("First."), user("two")], {}, None),
    ],
)
async def test_a_fork_has_its_reason(
    second: list[dict[str, Any]], fields: dict[str, Any], reason: str | None
) -> None:
    async with running_gateway([{"text": "First."}, {"text": "Second."}]) as stack:
        key = await stack.open()
        (record,) = stack.keys._records.values()
        await ask(stack, key, [user("one")])
        await ask(stack, key, second, **fields)
        assert dict(record.branches.forks) == ({} if reason is None else {reason: 1})
        trajectory = await stack.close(key)
        assert record.branches.leaves == len(trajectory.leaves())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("third", "reason"),
    [
        ([user("two"), said("Other."), user("three")], "edited"),
        ([user("another two")], "resampled"),
    ],
)
async def test_a_reply_continued_twice_forks(third: list[dict[str, Any]], reason: str) -> None:
    async with running_gateway([{"text": "First."}] * 3) as stack:
        key = await stack.open()
        (record,) = stack.keys._records.values()
        begun = [user("one"), said("First.")]
        await ask(stack, key, begun[:1])
        await ask(stack, key, [*begun, user("two")])
        await ask(stack, key, [*begun, *third])
        assert dict(record.branches.forks) == {reason: 1}
        trajectory = await stack.close(key)
        assert record.branches.leaves == len(trajectory.leaves()) == 2


@pytest.mark.anyio
async def test_reasoning_that_the_template_omits_is_a_reason_of_its_own() -> None:
    script = [{"text": f"{THINK}First."}, {"text": f"{THINK}Second."}]
    async with running_gateway(script) as stack:
        key = await stack.open()
        (record,) = stack.keys._records.values()
        reply = await ask(stack, key, [user("one")])
        await ask(stack, key, [user("one"), reply, user("two")])
        assert dict(record.branches.forks) == {"thinking": 1}
        await stack.close(key)


@pytest.mark.anyio
async def test_above_eight_leaves_there_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway([{"text": "First."}] * 11) as stack:
        key = await stack.open()
        with caplog.at_level(logging.WARNING):
            for number in range(8):
                await ask(stack, key, [user(f"question {number}")])
            assert not caplog.records
            for _ in range(3):
                await ask(stack, key, [user("question 0")])
        (warning,) = caplog.records
        assert "more than 8 leaves" in warning.message
        assert "7 × new, 1 × resampled" in warning.message
        assert "docs/agents.md" in warning.message
        assert "thinking_retention" not in warning.message
        await stack.close(key)
