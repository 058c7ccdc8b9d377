"""What becomes of a turn that nobody waits for any more."""

import weakref

import pytest

from tests.waiting import until
from turnleaf.gateway._asked import Asked, AskedTurns
from turnleaf.gateway.protocols import RequestError

pytestmark = pytest.mark.anyio


def waited_for(turns: AskedTurns, abandoned: list[str], name: str) -> Asked:
    asked = turns.ask(name.encode(), on_abandoned=lambda: abandoned.append(name))
    asked.take()
    return asked


async def test_a_turn_is_abandoned_when_its_last_connection_is_lost() -> None:
    abandoned: list[str] = []
    asked = waited_for(AskedTurns(0.0), abandoned, "asked")
    asked.take()
    asked.leave(delivered=False)
    assert abandoned == []
    asked.leave(delivered=False)
    assert abandoned == ["asked"]


async def test_a_retry_stops_the_grace_and_its_loss_starts_another() -> None:
    abandoned: list[str] = []
    turns = AskedTurns(0.05)
    asked, other = (waited_for(turns, abandoned, name) for name in ("asked", "other"))
    asked.leave(delivered=False)
    asked.take()
    other.leave(delivered=False)
    await until(lambda: bool(abandoned))
    assert abandoned == ["other"]
    asked.leave(delivered=False)
    await until(lambda: len(abandoned) == 2)
    assert turns.claim(b"asked", marked=True) is None


async def test_what_is_over_or_delivered_is_not_abandoned() -> None:
    abandoned: list[str] = []
    turns = AskedTurns(0.0)
    over, lost, delivered = (
        waited_for(turns, abandoned, name) for name in ("over", "lost", "delivered")
    )
    over.finish(RequestError(503, "no engine", code="engine_unavailable"))
    for asked in (over, lost, delivered):
        asked.leave(delivered=asked is delivered)
    assert abandoned == ["lost"]


async def test_a_turn_that_ends_within_the_grace_is_not_abandoned() -> None:
    abandoned: list[str] = []
    turns = AskedTurns(0.05)
    over, other = (waited_for(turns, abandoned, name) for name in ("over", "other"))
    over.leave(delivered=False)
    over.finish(RequestError(503, "no engine", code="engine_unavailable"))
    other.leave(delivered=False)
    await until(lambda: bool(abandoned))
    assert abandoned == ["other"]


def test_a_refusal_does_not_hold_on_to_its_request() -> None:
    class Request:
        pass

    turns = AskedTurns(60.0)

    def refused() -> "weakref.ref[Request]":
        request = Request()
        try:
            raise RequestError(429, "too many", code="too_many")
        except RequestError as error:
            turns.refuse(b"asked", error)
        return weakref.ref(request)

    assert refused()() is None
