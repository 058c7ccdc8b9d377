"""Requests leave nothing that only the garbage collector can free: it seldom looks."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import CoroutineType
from typing import Any

import openai
import pytest

from tests.gateway_stack import Stack, openai_client, running_gateway
from tests.waiting import until
from turnleaf.core import Key

pytestmark = [pytest.mark.anyio, pytest.mark.openai_client]

HELLO = [{"role": "user", "content": "Hello"}]
TIMES = 3


async def asked(client: openai.AsyncOpenAI, **more: Any) -> None:
    await client.chat.completions.create(model="model", messages=HELLO, **more)


async def whole(stack: Stack, key: Key) -> None:
    async with openai_client(key) as client:
        await asked(client)


async def streamed(stack: Stack, key: Key) -> None:
    async with openai_client(key) as client:
        async for _ in await client.chat.completions.create(
            model="model", messages=HELLO, stream=True
        ):
            pass


async def refused(stack: Stack, key: Key) -> None:
    async with openai_client(key) as client:
        with pytest.raises(openai.BadRequestError):
            await asked(client, top_logprobs=3)


async def refused_in_a_thread(stack: Stack, key: Key) -> None:
    many = [{"role": "user", "content": "x" * 100_000}, {"role": "nobody", "content": ""}]
    async with openai_client(key) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="model", messages=many)  # type: ignore[arg-type]


async def not_admitted(stack: Stack, key: Key) -> None:
    async with openai_client(key) as client:
        with pytest.raises(openai.BadRequestError, match="max_requests_in_flight"):
            await asked(client, n=100)


async def failed(stack: Stack, key: Key, *, stream: bool = False) -> None:
    async with openai_client(key) as client:
        with pytest.raises(openai.APIStatusError):
            await asked(client, stream=stream)


async def failed_twice(stack: Stack, key: Key) -> None:
    async with openai_client(key) as client:
        with pytest.raises(openai.APIStatusError):
            await asked(client, n=2)


async def failed_stream(stack: Stack, key: Key) -> None:
    await failed(stack, key, stream=True)


async def lost(stack: Stack, key: Key, *, stream: bool = False) -> None:
    calls = len(stack.engine.calls)
    async with openai_client(key) as client:
        asking = asyncio.ensure_future(asked(client, stream=stream))
        await until(lambda: len(stack.engine.calls) > calls)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: len(stack.engine.ledger) > calls)


async def lost_stream(stack: Stack, key: Key) -> None:
    await lost(stack, key, stream=True)


async def ended(stack: Stack, key: Key) -> None:
    async with openai_client(key) as client:
        calls = len(stack.engine.calls)
        asking = asyncio.ensure_future(asked(client))
        await until(lambda: len(stack.engine.calls) > calls)
        await stack.gateway.close_key(key.id, aborted=True)
        await asyncio.gather(asking, return_exceptions=True)


HANGS = {"text": "too late", "hang": True, "abort_after": 2}


@contextmanager
def left_over() -> Iterator[list[str]]:
    """What the context leaves of the gateway's that only the garbage collector finds."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [str(type(each)) for each in gc.garbage if _of_the_gateway(each)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _of_the_gateway(thing: Any) -> bool:
    if isinstance(thing, CoroutineType):
        return "turnleaf/gateway" in thing.cr_code.co_filename
    return type(thing).__module__.startswith("turnleaf.gateway")


@pytest.mark.parametrize(
    ("request_of", "script"),
    [
        (whole, {"text": "Hi."}),
        (streamed, {"text": "Hi."}),
        (refused, {"text": "Hi."}),
        (refused_in_a_thread, {"text": "Hi."}),
        (not_admitted, {"text": "Hi."}),
        (failed, {"fail": 400}),
        (failed, {"text": "Hi.", "drop": True}),
        (failed_twice, {"fail": 400}),
        (failed_stream, {"text": "x", "mismatch": True}),
        (lost, HANGS),
        (lost_stream, HANGS),
        (ended, HANGS),
    ],
)
async def test_a_request_leaves_no_cycles(
    request_of: Callable[[Stack, Key], Awaitable[None]],
    script: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "turnleaf")  # whoever keeps a record keeps its error, too
    await check_leavings(request_of, script)


async def test_what_fails_in_a_thread_leaves_no_cycles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "turnleaf")
    monkeypatch.setattr("turnleaf.gateway.engines._sglang._LONG", 0)  # bytes of its reply
    await check_leavings(failed, {"text": "x", "mismatch": True})


async def check_leavings(
    request_of: Callable[[Stack, Key], Awaitable[None]], script: dict[str, Any]
) -> None:
    async with running_gateway({"*": [script] * (TIMES + 1)}, retry_budget=0.0) as stack:
        keys = [await stack.open() for _ in range(TIMES + 1)]
        await request_of(stack, keys[0])  # what the first one sets up may stay
        with left_over() as found:
            for key in keys[1:]:
                await request_of(stack, key)
        for key in keys:
            await stack.close(key)
    assert found == []
