"""What the gateways are asked, and what it cost them."""

import sys
from typing import Any

import attrs
from harness.gateways import Gateway
from harness.programs import cpu_seconds, resident_bytes, running

TOKENS = 128
"""Of every reply of the dialogues."""


@attrs.frozen
class Load:
    """Agents that run at once.

    turns: of each. words: of each tool result. first_words: of the user's message. tokens: of each
    reply. stream: whether replies are streamed, and then they are prose. stagger: seconds over
    which the agents begin.
    """

    sessions: int
    turns: int
    words: int = 300
    first_words: int = 40
    tokens: int = TOKENS
    stream: bool = False
    calls: int = 1
    stagger: float = 0.0

    @property
    def all_turns(self) -> int:
        return self.sessions * self.turns


@attrs.frozen
class Cost:
    """Of one load: CPU seconds of the gateway's process, and bytes by which it grew."""

    cpu: float
    memory: int
    turns: int

    @property
    def cpu_ms(self) -> float:
        """CPU of a turn, in milliseconds."""
        return self.cpu / self.turns * 1e3

    @property
    def memory_kb(self) -> float:
        """Growth of a turn, in 1,000 bytes."""
        return self.memory / self.turns / 1e3


WARM_UP = Load(sessions=4, turns=3, words=100)


async def run(gateway: Gateway, load: Load) -> Cost:
    """Run a load to its end; raises RuntimeError when a request failed."""
    sessions = await gateway.open_sessions(load.sessions)
    cpu, memory = cpu_seconds(gateway.pid), resident_bytes(gateway.pid)
    said = await ask(sessions, load)
    cost = Cost(
        cpu=cpu_seconds(gateway.pid) - cpu,
        memory=resident_bytes(gateway.pid) - memory,
        turns=load.all_turns,
    )
    if said["failures"]:
        raise RuntimeError(f"{gateway.name}: {len(said['failures'])} failed: {said['failures'][0]}")
    return cost


async def ask(sessions: list[tuple[str, str]], load: Load) -> dict[str, Any]:
    """Have the client's process run a load; what it prints."""
    config = {"agents": sessions, **attrs.asdict(load)}
    async with running("client", config, python=sys.executable) as client:
        said: dict[str, Any] = await client.hear()
    return said
