"""Many rollouts side by side."""

from collections.abc import Mapping
from typing import Any, Self

import anyio
import pytest

from turnleaf.adapters.mock import Request, Rollouts
from turnleaf.core import Background, ContractError, Key, Purpose, Rollout, StartRate, Trajectory


class Gateway:
    """Issues keys and records nothing."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, Purpose, Mapping[str, Any]]] = []

    async def open_key(
        self, *, name: str, sampling: Mapping[str, Any], purpose: Purpose, expires_in: float
    ) -> Key:
        self.opened.append((name, purpose, sampling))
        return Key(name, "http://127.0.0.1/v1", "secret")

    async def close_key(self, key_id: str, *, aborted: bool = False) -> Trajectory:
        return Trajectory()

    async def close_all(self, purpose: Purpose) -> None:
        raise NotImplementedError


class Session:
    """Rewards what the payload says, once as many as can run at a time do."""

    running = most = 0
    full = anyio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        if cls.running == 3:
            cls.full.set()
        await cls.full.wait()
        # The later it began, the earlier it ends.
        for _ in range(30 - payload["number"]):
            await anyio.lowlevel.checkpoint()
        cls.running -= 1
        if payload["number"] == payload.get("mistaken"):
            raise ContractError("nobody set this up")
        return {"reward": payload["number"]}


def requests(count: int, **payload: int) -> list[Request]:
    return [
        Request(f"r-{number}", 0, number, {"number": number, **payload}, {"temperature": number})
        for number in range(count)
    ]


@pytest.mark.anyio
async def test_results_come_in_order_and_only_so_many_run_at_once() -> None:
    gateway, done = Gateway(), list[Rollout]()
    async with Background() as background:
        rollouts = Rollouts(
            gateway, Session, background, "model", StartRate(1e6), at_once=3, max_rollout_time=9
        )
        results = await rollouts.run(requests(10), purpose="eval", done=done.append)
        assert [rollout.reward for rollout in results] == [*range(10)]
        assert Session.most == 3
        assert sorted(rollout.name for rollout in done) == [f"r-{n}" for n in range(10)]
        assert ("r-4", "eval", {"temperature": 4}) in gateway.opened
        with pytest.raises(ContractError, match="nobody set this up"):
            await rollouts.run(requests(10, mistaken=5), purpose="train")
