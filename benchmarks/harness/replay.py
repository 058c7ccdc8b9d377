"""Replay data: what the routed experts of every token add to a turn."""

from collections.abc import Mapping

from harness import gateways, loads
from harness.environments import tool_calls
from harness.gateways import Gateway
from harness.loads import Cost, Load
from harness.report import Bar, Report, table

EXPERTS = (48, 8)
"""Layers, and experts of each that a token is routed to."""
TURNS: Mapping[str, Load] = {
    "in a dialogue, at 2k tokens": Load(sessions=8, turns=6, before=3),
    "in a dialogue, at 8k tokens": Load(sessions=8, turns=18, before=15),
    "with a prompt of 2k new tokens": Load(sessions=8, turns=1, first_words=1_600),
    "with a prompt of 8k new tokens": Load(sessions=8, turns=1, first_words=6_800),
}
BAR = 1.5
"""At most so much more at 8k tokens: for a turn whose history has grown fourfold, and for each new
token of a prompt that is four times as long. A quadratic term would make it 4."""


async def replay(rounds: int) -> Report:
    """The cost of a turn with the experts and without."""
    with_experts, without = await _measured(rounds, EXPERTS), await _measured(rounds, None)
    rows = [
        [name, *(f"{cost.cpu_ms:.1f} ms" for cost in found)]
        for name in TURNS
        for found in [(with_experts[name], without[name])]
    ]
    dialogue, long_dialogue, prompt, long_prompt = (
        with_experts[name].cpu_ms - without[name].cpu_ms for name in TURNS
    )
    head = ["a turn", f"with experts of {EXPERTS[0]} × {EXPERTS[1]}", "without"]
    return Report(
        [*table(head, rows)],
        [
            Bar("experts in a dialogue: at 8k tokens / at 2k", long_dialogue / dialogue, BAR),
            Bar("experts of a new prompt: a token of 8k / of 2k", long_prompt / prompt / 4, BAR),
        ],
    )


async def _measured(rounds: int, experts: tuple[int, int] | None) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    async with gateways.engine(tool_calls(loads.TOKENS), experts=experts) as engine_url:
        start = gateways.turnleaf(routed_experts_shape=experts)
        for name, load in TURNS.items():
            async with start(engine_url) as gateway:
                found[name] = await _best(gateway, load, rounds)
    return found


async def _best(gateway: Gateway, load: Load, rounds: int) -> Cost:
    await loads.run(gateway, loads.WARM_UP)
    costs = [await loads.run(gateway, load) for _ in range(rounds)]
    return min(costs, key=lambda cost: cost.cpu)
