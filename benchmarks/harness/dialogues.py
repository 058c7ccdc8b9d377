"""Dialogues with a tool: CPU and memory of a turn, how they grow with a dialogue, and ratios."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import attrs
from harness import gateways, loads
from harness.environments import tool_calls
from harness.gateways import Start
from harness.loads import Cost, Load
from harness.report import Bar, Report, table

DIALOGUES = {
    "128 × 4 turns": Load(sessions=128, turns=4, words=100),
    "16 × 16 turns": Load(sessions=16, turns=16),
    "8 × 64 turns": Load(sessions=8, turns=64),
    "4 × 2 × 64 turns": Load(sessions=4, turns=128, conversations=2),
}
CPU_BARS = {"128 × 4 turns": 1 / 2, "16 × 16 turns": 1 / 3, "8 × 64 turns": 1 / 5}
"""At most so much of the toolkit's better mode."""
FLAT_BAR = 2.0
"""A turn of the longest dialogues costs at most so much more than one of the shortest."""
TWO_BAR = 1.5
"""So does a turn of two conversations that one key has in turn, than one of one conversation."""
MEMORY_BAR = 1 / 8
SHORT = {
    "32 × 4 turns": Load(sessions=32, turns=4, words=100),
    "4 × 64 turns": Load(sessions=4, turns=64),
}
SHORT_BAR = 3.0
SHORT_ROUNDS = 3

FEW, MORE = Load(sessions=8, turns=64), Load(sessions=24, turns=64)
"""Run one behind the other: memory is the slope between 8 and 32 sessions of 64 turns."""


@attrs.frozen
class Measured:
    """Of one gateway: the cost of a turn in each round of each load, and the slope of its memory
    in 1,000 bytes for each turn."""

    costs: Mapping[str, Sequence[Cost]]
    slopes: Sequence[float]

    def cpu_ms(self, load: str) -> float:
        """Milliseconds for a turn, in the best round: others only ever add to it."""
        return min(cost.cpu_ms for cost in self.costs[load])

    def memory_kb(self, load: str) -> float:
        return median(cost.memory_kb for cost in self.costs[load])


async def dialogues(rounds: int, *, alone: bool) -> Report:
    """turnleaf's worker, and unless alone both modes of the public toolkit's gateway."""
    starts: dict[str, Start] = {"turnleaf": gateways.turnleaf()}
    if not alone:
        starts |= {f"toolkit, {mode}": gateways.toolkit(mode) for mode in ("tree", "linear")}
    measured = await _measured(starts, rounds)
    return Report([*_lines(measured)], [*_bars(measured)])


async def _measured(starts: Mapping[str, Start], rounds: int) -> dict[str, Measured]:
    """All gateways in turn, so many times; each load on a process of its own."""
    costs: dict[str, dict[str, list[Cost]]] = {
        name: {load: [] for load in DIALOGUES} for name in starts
    }
    slopes: dict[str, list[float]] = {name: [] for name in starts}
    async with gateways.engine(tool_calls(loads.TOKENS)) as engine_url:
        for _ in range(rounds):
            for load in DIALOGUES:
                for name, start in starts.items():
                    async with start(engine_url) as gateway:
                        await loads.run(gateway, loads.WARM_UP)
                        costs[name][load].append(await loads.run(gateway, DIALOGUES[load]))
        for name, start in starts.items():
            async with start(engine_url) as gateway:
                await loads.run(gateway, FEW)
                slopes[name].append((await loads.run(gateway, MORE)).memory_kb)
    return {name: Measured(costs[name], slopes[name]) for name in starts}


def _lines(measured: Mapping[str, Measured]) -> Iterator[str]:
    """A row for each load; then the slope of memory."""
    rows = [
        [load, *(f"{m.cpu_ms(load):.2f} ms, {m.memory_kb(load):.0f} KB" for m in measured.values())]
        for load in DIALOGUES
    ]
    rows.append(["memory, 8 to 32 × 64", *(f"{m.slopes[0]:.0f} KB" for m in measured.values())])
    yield from table(["per turn", *measured], rows)


def _bars(measured: Mapping[str, Measured]) -> Iterator[Bar]:
    ours = measured["turnleaf"]
    others = [m for name, m in measured.items() if name != "turnleaf"]
    shortest, _, longest, two = DIALOGUES
    yield Bar("64 turns / 4 turns", ours.cpu_ms(longest) / ours.cpu_ms(shortest), FLAT_BAR)
    yield Bar("two conversations / one", ours.cpu_ms(two) / ours.cpu_ms(longest), TWO_BAR)
    if not others:
        return
    for load, bar in CPU_BARS.items():
        better = min(other.cpu_ms(load) for other in others)
        yield Bar(f"{load}: CPU / the toolkit's better mode", ours.cpu_ms(load) / better, bar)
    better = min(other.slopes[0] for other in others)
    yield Bar("memory / the toolkit's better mode", ours.slopes[0] / better, MEMORY_BAR)


async def flatness() -> Report:
    """The short form: turnleaf alone, one process, the best of some rounds."""
    costs: dict[str, list[Cost]] = {name: [] for name in SHORT}
    async with (
        gateways.engine(tool_calls(loads.TOKENS)) as engine_url,
        gateways.turnleaf()(engine_url) as gateway,
    ):
        await loads.run(gateway, loads.WARM_UP)
        for _ in range(SHORT_ROUNDS):
            for name, load in SHORT.items():
                costs[name].append(await loads.run(gateway, load))
    best = {name: min(cost.cpu_ms for cost in costs[name]) for name in SHORT}
    shortest, longest = best.values()
    rows = [[name, f"{cpu_ms:.2f} ms"] for name, cpu_ms in best.items()]
    return Report(
        [*table(["per turn", "turnleaf"], rows)],
        [Bar("64 turns / 4 turns", longest / shortest, SHORT_BAR)],
    )
