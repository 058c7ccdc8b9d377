"""Streamed replies: what a token costs in a long one, against one in a shorter."""

from collections.abc import Callable, Mapping

from harness import gateways, loads
from harness.environments import long_tool_calls, texts
from harness.loads import Load
from harness.report import Bar, Report, table

REPLIES: Mapping[str, Callable[[int], list[list[int]]]] = {
    "prose": texts,
    "a tool call": long_tool_calls,
}
LENGTHS = {1000: Load(sessions=4, turns=4), 4000: Load(sessions=4, turns=1)}
"""Of replies, and loads with as many tokens in all."""
EVENT_INTERVAL = 0.002
"""Seconds between the events of a stream, each of which holds one token."""
BAR = 1.5
"""At most so much more for a token of the longer replies: a quadratic term would make it 4."""


async def streams(rounds: int) -> Report:
    """Microseconds of a token, the best of some rounds, for each kind and length of replies."""
    rows, bars = [], []
    for kind, replies in REPLIES.items():
        found = [await _microseconds(replies(tokens), tokens, rounds) for tokens in LENGTHS]
        rows.append([kind, *(f"{each:.0f} µs" for each in found)])
        bars.append(Bar(f"streamed {kind}: a token at 4,000 / at 1,000", found[1] / found[0], BAR))
    head = ["per token", *(f"{tokens:,} tokens" for tokens in LENGTHS)]
    return Report([*table(head, rows)], bars)


async def _microseconds(outputs: list[list[int]], tokens: int, rounds: int) -> float:
    load = LENGTHS[tokens]
    async with (
        gateways.engine(outputs, event_interval=EVENT_INTERVAL) as engine_url,
        gateways.turnleaf()(engine_url) as gateway,
    ):
        streamed = Load(load.sessions, load.turns, tokens=tokens, stream=True)
        await loads.run(gateway, streamed)
        costs = [await loads.run(gateway, streamed) for _ in range(rounds)]
    return min(cost.cpu for cost in costs) / (load.sessions * load.turns * tokens) * 1e6
