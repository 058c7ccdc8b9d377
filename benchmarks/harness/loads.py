"""What the gateways are asked, and what it cost them."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import attrs
from harness.gateways import Gateway
from harness.programs import cpu_seconds, resident_bytes, running

TOKENS = 128
"""Of every reply of the dialogues."""


@attrs.frozen
class Load:
    """Agents that run at once.

    turns: of each. conversations: of each, which take turns. words: of each tool result.
    first_words: of the user's message. tokens: of each reply, which is a tool call unless they are
    streamed. stagger: seconds over which the agents begin. before: turns of each agent that are not
    measured: all agents stop behind them, and go on together.
    """

    sessions: int
    turns: int
    conversations: int = 1
    words: int = 300
    first_words: int = 40
    tokens: int = TOKENS
    stream: bool = False
    stagger: float = 0.0
    before: int = 0


@attrs.frozen
class Cost:
    """Of one load: CPU seconds of the gateway's process, and bytes by which it grew.

    names, seconds, failures: the sessions' names, what the agents waited for each turn of theirs,
    and what went wrong.
    """

    cpu: float
    memory: int
    turns: int
    names: Sequence[str]
    seconds: Sequence[Sequence[float]]
    failures: Sequence[str]

    @property
    def cpu_ms(self) -> float:
        """CPU of a turn, in milliseconds."""
        return self.cpu / self.turns * 1e3

    @property
    def memory_kb(self) -> float:
        """Growth of a turn, in 1,000 bytes."""
        return self.memory / self.turns / 1e3


During = Callable[[], AbstractAsyncContextManager[Any]]

WARM_UP = Load(sessions=4, turns=3, words=100)


async def run(
    gateway: Gateway, load: Load, during: During = nullcontext, *, tolerant: bool = False
) -> Cost:
    """Run a load to its end; what its turns cost, but for those of `load.before`.

    during: a context in which those turns run. Raises RuntimeError when a request failed, unless
    tolerant.
    """
    sessions = await gateway.open_sessions(load.sessions)
    agents = [(session.base_url, session.api_key) for session in sessions]
    config = {"agents": agents, **attrs.asdict(load)}
    async with running("client", config, python=sys.executable) as client:
        if load.before:
            await client.hear()
        async with during():
            cpu, memory = cpu_seconds(gateway.pid), resident_bytes(gateway.pid)
            if load.before:
                await client.tell({})
            said = await client.hear()
            cost = Cost(
                cpu=cpu_seconds(gateway.pid) - cpu,
                memory=resident_bytes(gateway.pid) - memory,
                turns=load.sessions * (load.turns - load.before),
                names=[session.name for session in sessions],
                seconds=said["seconds"],
                failures=said["failures"],
            )
    if cost.failures and not tolerant:
        raise RuntimeError(f"{gateway.name}: {len(cost.failures)} failed: {cost.failures[0]}")
    return cost
