"""A thousand rollouts with a call in flight each, before an engine that takes two seconds."""

import math
from collections.abc import Sequence

import httpx
from harness import gateways, loads
from harness.environments import tool_calls
from harness.loads import Load
from harness.report import Bar, Report
from prometheus_client.parser import text_string_to_metric_families

LATENCY = 2.0
"""Seconds that the engine takes for each reply."""
LOAD = Load(sessions=1000, turns=5, words=100, stagger=LATENCY)
"""The keys begin one after another, in as many seconds as a call takes."""
REPLY_BAR, LAG_BAR = 0.25, 0.05
LAG = "turnleaf_event_loop_lag_seconds"


async def many_keys() -> Report:
    """Failed sessions, the gateway's own share of replies' time, the lag of its event loop."""
    async with (
        gateways.engine(tool_calls(loads.TOKENS), latency=LATENCY) as engine_url,
        gateways.turnleaf()(engine_url) as gateway,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        await loads.run(gateway, loads.WARM_UP)
        await http.get(f"{engine_url}/times")
        assert gateway.metrics_url is not None
        before = _waits((await http.get(gateway.metrics_url)).text)
        cost = await loads.run(gateway, LOAD, tolerant=True)
        after = _waits((await http.get(gateway.metrics_url)).text)
        times = (await http.get(f"{engine_url}/times")).json()
    own = sorted(
        reply - engine
        for name, replies in zip(cost.names, cost.seconds, strict=True)
        for reply, engine in zip(replies, times.get(name, []), strict=False)
    )
    waits = {bound: count - before[bound] for bound, count in after.items()}
    reply, lag = _quantile(own, 0.99), _bound(waits, 0.99)
    lines = [
        f"1,000 keys, {len(own)} replies, {cost.cpu_ms:.2f} ms of CPU each",
        f"reply time less the engine's: median {_quantile(own, 0.5):.3f} s, p99 {reply:.3f} s, "
        f"most {own[-1]:.3f} s",
        f"event-loop lag: median at most {_bound(waits, 0.5):g} s, p99 at most {lag:g} s",
    ]
    return Report(
        lines,
        [
            Bar("1,000 keys: agents that failed", len(cost.failures), 0),
            Bar("1,000 keys: p99 of reply time less the engine's, in seconds", reply, REPLY_BAR),
            Bar("1,000 keys: p99 of the event loop's lag, in seconds", lag, LAG_BAR),
        ],
    )


def _waits(metrics: str) -> dict[float, float]:
    """Looks at the event loop that found at most so many seconds of lag."""
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == f"{LAG}_bucket"
    }


def _bound(waits: dict[float, float], share: float) -> float:
    """The least of the histogram's bounds below which there is that share."""
    return min(bound for bound, count in waits.items() if count >= share * waits[math.inf])


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
