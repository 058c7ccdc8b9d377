"""A worker that is to record replay data finds out at its start whether it will come."""

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from socket import create_server
from typing import Any

import pytest

from turnleaf.adapters.mock import ScriptedEngine, compare, serve_router
from turnleaf.core import ContractError
from turnleaf.gateway import _probe
from turnleaf.gateway._probe import check_replay, passes_structural_tags
from turnleaf.gateway.engines import PROBE, SGLangEngine

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., Awaitable[tuple[ScriptedEngine, str]]]
SHAPE = (2, 3)
WHEEL = "v0.3.2-9daabcd of zhuzilin/sgl-router"
PATCH = "sglang-top_p.patch"
FLAG = "--enable-return-routed-experts"


async def probe(url: str, **expected: Any) -> None:
    engine = SGLangEngine(url, retry_budget=0)
    try:
        await check_replay(engine, **{"routed_experts_shape": SHAPE, "top_p_ids": True, **expected})
    finally:
        await engine.aclose()


async def complaint(url: str, **expected: Any) -> str:
    with pytest.raises(ContractError) as caught:
        await probe(url, **expected)
    return str(caught.value)


@asynccontextmanager
async def behind_a_router(url: str, *drops: str) -> AsyncIterator[str]:
    async with serve_router([url], drops=drops) as router:
        yield router


async def test_an_engine_that_sends_all_of_it_is_found_good(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({}, routed_experts_shape=SHAPE)
    await probe(url)
    # Whether the wish for a part of the rows arrives does not matter.
    async with behind_a_router(url, "routed_experts_start_len") as router:
        await probe(router)
    for call, entry in zip(engine.calls, engine.ledger, strict=True):
        assert call.routing_key == PROBE
        assert call.rid.startswith(PROBE)
        assert call.sampling["max_new_tokens"] == 1
        assert len(entry.output_ids) == 1
    report = compare(engine.ledger, [])
    report.raise_for_problems()
    assert report.lost == {"probe": 2}


async def test_only_what_is_expected_is_asked_for(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({}, knows_top_p_ids=False, routed_experts_shape=SHAPE)
    await probe(url, top_p_ids=False)
    plain, url = await scripted_engine({})
    await probe(url, routed_experts_shape=None)
    assert "custom_params" not in engine.calls[0].sampling
    assert plain.calls[0].experts_from is None


async def test_a_router_that_drops_the_fields_is_to_blame(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({}, routed_experts_shape=SHAPE)
    async with serve_router([url]) as router:
        told = await complaint(router)
    assert f"the router at {router} drops what asks for top_p_token_ids" in told
    assert "routed_experts" in told
    assert f"the engine at {url} sends when it is asked directly" in told
    assert WHEEL in told
    assert PATCH not in told
    assert FLAG not in told
    assert compare(engine.ledger, []).problems == ()


async def test_an_engine_that_knows_no_such_fields_is_to_blame(
    scripted_engine: StartEngine,
) -> None:
    _, url = await scripted_engine({}, knows_top_p_ids=False)
    async with behind_a_router(url) as router:
        told = await complaint(router)
    assert told.startswith(f"the engine at {url} sends no top_p_token_ids")
    assert "routed_experts" in told
    assert PATCH in told
    assert FLAG in told
    assert WHEEL not in told


async def test_router_and_engine_may_both_be_to_blame(scripted_engine: StartEngine) -> None:
    _, url = await scripted_engine({}, knows_top_p_ids=False, routed_experts_shape=SHAPE)
    async with serve_router([url]) as router:
        told = await complaint(router)
    assert f"the router at {router} drops what asks for routed_experts, which" in told
    assert f"the engine at {url} sends no top_p_token_ids" in told
    assert WHEEL in told
    assert PATCH in told
    assert FLAG not in told


async def test_without_a_list_of_engines_both_remedies_are_told(
    scripted_engine: StartEngine,
) -> None:
    _, url = await scripted_engine({}, routed_experts_shape=SHAPE, knows_top_p_ids=False)
    told = await complaint(url)
    assert told.startswith(f"replies from {url} have no top_p_token_ids")
    assert PATCH in told
    assert WHEEL in told
    assert FLAG not in told


async def test_an_engine_that_cannot_be_asked_directly_is_passed_over(
    scripted_engine: StartEngine,
) -> None:
    _, url = await scripted_engine({}, routed_experts_shape=SHAPE)
    digest = zlib.crc32(PROBE.encode())
    # So many that the router's choice is neither the first of them nor beyond those asked.
    count = next(n for n in range(2, 100) if 0 < digest % n < 3)
    engines = ["http://127.0.0.1:9"] * count
    engines[digest % count] = url
    async with serve_router(engines) as router:
        assert f"the engine at {url} sends when" in await complaint(router, top_p_ids=False)


async def test_a_wrong_shape_is_told_with_its_numbers(scripted_engine: StartEngine) -> None:
    _, url = await scripted_engine({}, routed_experts_shape=(4, 3))
    told = await complaint(url)
    assert "routed_experts holds 24 numbers" in told
    assert "(2, 3) have 12" in told


async def test_a_probe_that_the_engine_aborts_is_made_again(
    scripted_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_probe, "_PAUSE", 0.01)
    aborted = {"ids": [], "finish": "abort"}
    script = {PROBE: [aborted, aborted, {"ids": [4], "finish": "length"}]}
    engine, url = await scripted_engine(script, routed_experts_shape=SHAPE)
    await probe(url)
    assert len({call.rid for call in engine.calls}) == 3


async def test_an_engine_that_fails_or_is_silent_is_told(
    scripted_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = await scripted_engine({PROBE: [{"fail": 400}]})
    assert "the engine refuses the call" in await complaint(url)
    monkeypatch.setattr(_probe, "_TIMEOUT", 0.05)
    _, url = await scripted_engine({PROBE: [{"ids": [1], "hang": True}]})
    assert "did not sample one token within 0.05 s" in await complaint(url)


async def tags_pass(url: str) -> bool:
    engine = SGLangEngine(url, retry_budget=0)
    try:
        return await passes_structural_tags(engine)
    finally:
        await engine.aclose()


async def test_a_tag_that_nobody_can_read_shows_whether_the_engine_is_told(
    scripted_engine: StartEngine,
) -> None:
    engine, url = await scripted_engine({})
    assert await tags_pass(url)
    async with behind_a_router(url) as router:
        assert await tags_pass(router)
    assert compare(engine.ledger, []).sampled == 0
    async with serve_router([url]) as router:
        assert not await tags_pass(router)
    assert compare(engine.ledger, []).lost == {"probe": 1}


async def test_without_an_answer_nothing_is_enforced() -> None:
    with create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert not await tags_pass(f"http://127.0.0.1:{port}")
