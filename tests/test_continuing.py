"""An engine's interruptions, of which only one call is seen."""

from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from turnleaf.core import Speculation, TokenIds, WeightSpan
from turnleaf.gateway.engines import (
    ContinuingEngine,
    EngineLost,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    Stop,
    TokenListener,
    _continuing,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_continuing, "PAUSE", 0.0)


def part(ids: Sequence[int], finish: Any = "abort", **fields: Any) -> EngineReply:
    return EngineReply(
        **{
            "output": np.array(ids, dtype=np.int32),
            "logprobs": -np.array(ids, dtype=np.float32),
            "finish_reason": finish,
            "matched": None,
            "cached_tokens": 0,
            "weight_versions": (WeightSpan("v", len(ids)),) if ids else (),
            **fields,
        }
    )


@attrs.define
class Played:
    """Answers with replies, or raises them, in their order; `stop` is set before `stopped_at`."""

    replies: list[EngineReply | Exception]
    stopped_at: int | None = None
    requests: list[EngineRequest] = attrs.Factory(list)

    async def generate(
        self,
        request: EngineRequest,
        *,
        stop: Stop,
        on_tokens: TokenListener | None = None,
    ) -> EngineReply:
        self.requests.append(request)
        if len(self.requests) == self.stopped_at:
            stop.set()
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        if on_tokens is not None and len(reply.output):
            on_tokens(reply.output)
        return reply

    async def check(self) -> None: ...

    async def aclose(self) -> None: ...


async def generate(
    engine: Played, *, told: list[int] | None = None, **sampling: Any
) -> EngineReply:
    request = EngineRequest(
        turn_id="turn",
        input_ids=np.array([1, 2], dtype=np.int32),
        sampling={"max_new_tokens": 10, **sampling},
        routing_key="r",
    )

    def tell(ids: TokenIds) -> None:
        assert told is not None
        told.extend(ids.tolist())

    return await ContinuingEngine(engine).generate(
        request, stop=Stop(), on_tokens=None if told is None else tell
    )


async def test_parts_are_one_reply() -> None:
    counts = Speculation(accepted=1, drafted=2, verifications=3)
    engine = Played(
        [
            part([5, 6], cached_tokens=2, speculation=counts),
            part([]),
            part([7], weight_versions=(WeightSpan("w", 1),), cached_tokens=4, speculation=counts),
            part([8, 9], "stop", matched=9, weight_versions=(WeightSpan("w", 2),)),
        ]
    )
    reply = await generate(engine, min_new_tokens=3, temperature=0.5)
    assert reply.output.tolist() == [5, 6, 7, 8, 9]
    assert reply.logprobs.tolist() == [-5, -6, -7, -8, -9]
    assert (reply.finish_reason, reply.matched, reply.cached_tokens) == ("stop", 9, 2)
    assert [(s.version, s.count) for s in reply.weight_versions] == [("v", 2), ("w", 1), ("w", 2)]
    assert reply.speculation == Speculation(accepted=2, drafted=4, verifications=6)
    asked = [(r.part, r.input_ids.tolist(), r.sampling["max_new_tokens"]) for r in engine.requests]
    assert asked == [
        (0, [1, 2], 10),
        (1, [1, 2, 5, 6], 8),
        (2, [1, 2, 5, 6], 8),
        (3, [1, 2, 5, 6, 7], 7),
    ]
    assert [r.sampling["min_new_tokens"] for r in engine.requests] == [3, 1, 1, 0]
    assert {r.sampling["temperature"] for r in engine.requests} == {0.5}


async def test_a_listener_is_told_every_part() -> None:
    told: list[list[int]] = []
    request = EngineRequest(
        turn_id="turn",
        input_ids=np.array([1, 2], dtype=np.int32),
        sampling={"max_new_tokens": 10},
        routing_key="r",
    )
    reply = await ContinuingEngine(Played([part([5, 6]), part([]), part([7], "stop")])).generate(
        request, stop=Stop(), on_tokens=lambda ids: told.append(ids.tolist())
    )
    assert told == [[5, 6], [7]]
    assert reply.output.tolist() == [5, 6, 7]


async def test_an_interruption_after_the_last_token_is_the_limits_end() -> None:
    reply = await generate(Played([part([5, 6])]), max_new_tokens=2)
    assert (reply.output.tolist(), reply.finish_reason) == ([5, 6], "length")


@pytest.mark.parametrize("ending", [part([7]), part([]), EngineLost("nothing came back")])
async def test_a_stop_ends_it_with_what_there_is(ending: Any) -> None:
    reply = await generate(Played([part([5, 6]), ending], stopped_at=2))
    sampled = [5, 6] if isinstance(ending, Exception) else [5, 6, *ending.output.tolist()]
    assert (reply.output.tolist(), reply.finish_reason) == (sampled, "abort")


async def test_what_was_lost_from_the_start_is_lost() -> None:
    with pytest.raises(EngineLost):
        await generate(Played([EngineLost("nothing came back")]))


async def test_an_engine_that_only_interrupts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_continuing, "PATIENCE", 0.05)
    with pytest.raises(EngineUnavailable, match="again and again"):
        await generate(Played([part([5]), part([])]))


async def test_after_an_interruption_no_call_begins_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_continuing, "PAUSE", 0.1)
    played = Played([part([5]), part([6], "stop"), part([7], "stop")])
    engine = ContinuingEngine(played)
    request = EngineRequest(
        turn_id="turn",
        input_ids=np.array([1], dtype=np.int32),
        sampling={"max_new_tokens": 10},
        routing_key="r",
    )
    replies: list[list[int]] = []

    async def generate() -> None:
        reply = await engine.generate(request, stop=Stop())
        replies.append(reply.output.tolist())

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(generate)
        await anyio.wait_all_tasks_blocked()
        assert len(played.requests) == 1
    assert anyio.current_time() - began >= 0.1
    assert sorted(map(len, replies)) == [1, 2]


async def test_a_call_that_waited_for_long_survives_its_first_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_continuing, "PATIENCE", 0.05)

    @attrs.define
    class Queueing(Played):
        async def generate(self, *args: Any, **options: Any) -> EngineReply:
            await anyio.sleep(0.1)
            return await Played.generate(self, *args, **options)

    reply = await generate(Queueing([part([]), part([5], "stop")]))
    assert reply.output.tolist() == [5]


@pytest.mark.parametrize("mask", ["json_schema", "structural_tag", "regex", "ebnf"])
async def test_a_masked_call_begins_anew(mask: str) -> None:
    """The engine would begin with the grammar again, in the middle of what it allows."""
    engine = Played([part([5, 6]), part([7, 8], "stop", matched=8)])
    told: list[int] = []
    reply = await generate(engine, told=told, **{mask: "x"})
    assert reply.output.tolist() == told == [7, 8]
    asked = [(r.part, r.input_ids.tolist(), r.sampling["max_new_tokens"]) for r in engine.requests]
    assert asked == [(0, [1, 2], 10), (1, [1, 2], 10)]
