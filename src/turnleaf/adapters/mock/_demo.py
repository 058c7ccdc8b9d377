"""The demo: a policy learns through the whole path, from agents over HTTP to new weights."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import anyio
import anyio.from_thread
import anyio.to_thread
import attrs
import numpy as np

from turnleaf.adapters.mock._blas import use_one_blas_thread
from turnleaf.adapters.mock._checkpoint import cached_checkpoint
from turnleaf.adapters.mock._demo_services import MODEL_ID, Services, demo_services
from turnleaf.adapters.mock._demo_sessions import DemoSession
from turnleaf.adapters.mock._demo_summary import Summary, Tally
from turnleaf.adapters.mock._policy import Policy
from turnleaf.adapters.mock._recipe import Recipe
from turnleaf.adapters.mock._rollouts import Request, Rollouts
from turnleaf.adapters.mock._samples import samples_of
from turnleaf.adapters.mock._task import REWARDS, problems
from turnleaf.adapters.mock._trainer import Trainer
from turnleaf.adapters.mock._warm_up import Conversation, warmed_up
from turnleaf.core import Background, GatewayError, Rollout, StartRate, unwrapped
from turnleaf.sessions import session_factory

__all__ = ["Watcher", "run_demo"]

RETELLING = 2
"""One row of so many is for an agent that rewrites its history after a wrong first answer."""
HELD_OUT = 1 << 31
"""Where the numbers of evaluation rollouts begin."""
STARTS_PER_SECOND = 2000.0
PATIENCE = 16
"""So many failures in a row are not the agent's bad luck: a process is gone."""
CLEAN_UP_LIMIT = 10.0  # seconds


class Watcher(Protocol):
    """Is told how far the demo is, from any thread."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins, in which something happens `total` times."""
        ...

    def advance(self) -> None:
        """It happened once more."""
        ...

    def measured(self, accuracy: float) -> None:
        """The policy was evaluated."""
        ...

    def stepped(self, reward: float) -> None:
        """A step of training is over: the mean reward of its rollouts."""
        ...


async def run_demo(
    recipe: Recipe,
    *,
    seed: int,
    folder: Path,
    watcher: Watcher,
    session: DemoSession = DemoSession.HTTP,
) -> Summary:
    """Warm a policy up, train it with rollouts of an agent, and check every token of it.

    folder: an absolute path; exists and is empty; gets `samples.jsonl`, `ledger.jsonl`,
    `summary.json` and `weights/<version>.npz`.

    Raises ContractError when something is not installed or cannot be started, GatewayError or
    EngineError when a part breaks down on the way.
    """
    use_one_blas_thread()
    (folder / "weights").mkdir()
    clock = _Clock()
    async with contextlib.AsyncExitStack() as stack:
        with clock.phase("start"):
            policy, services = await _start(recipe, seed, folder, watcher, session, stack)
        trainer = Trainer(policy, recipe, engine=services.engine, folder=folder / "weights")
        tally = Tally(folder)
        async with Background(limit=CLEAN_UP_LIMIT) as background:
            rollouts = Rollouts(
                gateway=services.gateway,
                session=session_factory(services.sessions.backend),
                background=background,
                model_id=MODEL_ID,
                start_rate=StartRate(STARTS_PER_SECOND),
            )
            demo = _Demo(recipe, seed, rollouts, trainer, tally, watcher, clock)
            await demo.publish(0)
            before = await demo.accuracy("before")
            rewards = [await demo.step(number) for number in range(recipe.steps)]
            after = await demo.accuracy("after")
        counts = tally.counts
        found = await services.sessions.problems(counts.rollouts + counts.evaluation_rollouts)
    with clock.phase("check"):
        watcher.phase("check", 1)
        found += await anyio.to_thread.run_sync(tally.problems)
        watcher.advance()
    summary = Summary(
        folder=str(folder),
        seed=seed,
        learning_rate=recipe.learning_rate,
        accuracy_before=before,
        accuracy_after=after,
        rewards=rewards,
        counts=counts,
        seconds=clock.seconds,
        phases=clock.phases,
        problems=found,
    )
    (folder / "summary.json").write_text(summary.to_json() + "\n", encoding="utf-8")
    return summary


async def _start(
    recipe: Recipe,
    seed: int,
    folder: Path,
    watcher: Watcher,
    session: DemoSession,
    stack: contextlib.AsyncExitStack,
) -> tuple[Policy, Services]:
    """The warmed-up policy, and the services, which start beside it and end with the stack."""
    watcher.phase("warm-up", recipe.warm_up_updates)
    checkpoint = await anyio.to_thread.run_sync(cached_checkpoint, "qwen3")
    conversation = await anyio.to_thread.run_sync(Conversation, checkpoint)
    warmed: list[Policy] = []

    def updated() -> None:
        anyio.from_thread.check_cancelled()
        watcher.advance()

    def warm_up() -> None:
        warmed.append(warmed_up(conversation, recipe, seed, updated=updated))

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, warm_up)
            services = await stack.enter_async_context(
                demo_services(
                    checkpoint,
                    conversation,
                    recipe,
                    seed=seed,
                    ledger=folder / "ledger.jsonl",
                    session=session,
                )
            )
    except ExceptionGroup as group:
        raise unwrapped(group) from None
    return warmed[0], services


@attrs.define
class _Clock:
    """Seconds since the beginning, and of each phase."""

    began: float = attrs.field(init=False, factory=time.monotonic)
    phases: dict[str, float] = attrs.field(init=False, factory=dict)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began


@attrs.define
class _Demo:
    """One run, once everything has started."""

    recipe: Recipe
    seed: int
    rollouts: Rollouts
    trainer: Trainer
    tally: Tally
    watcher: Watcher
    clock: _Clock
    _rows: list[tuple[int, ...]] = attrs.field(init=False)
    _held_out: list[tuple[int, ...]] = attrs.field(init=False)
    _failed_in_a_row: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        count = self.recipe.steps * self.recipe.prompts
        self._rows = problems(count, seed=self.seed, purpose="train")
        self._held_out = problems(
            self.recipe.held_out, seed=self.seed, purpose="held-out", without=set(self._rows)
        )

    async def publish(self, step: int) -> None:
        """Have the engine sample with the weights that this step begins with."""
        await self.trainer.publish(f"step-{step}")

    async def accuracy(self, when: str) -> float:
        """Share of first answers to the held-out problems that are right; a failure is wrong."""
        self.watcher.phase(f"accuracy {when}", len(self._held_out))
        requests = [
            self._request(f"eval-{when}-{number}", number, HELD_OUT + number, digits, 1)
            for number, digits in enumerate(self._held_out)
        ]
        with self.clock.phase("evaluation"):
            rollouts = await self.rollouts.run(requests, purpose="eval", done=self._done)
        self.tally.evaluated(rollouts)
        accuracy = float(np.mean([rollout.reward == REWARDS[0] for rollout in rollouts]))
        self.watcher.measured(accuracy)
        return accuracy

    async def step(self, step: int) -> float:
        """Sample with the current weights and learn from it; returns the mean reward."""
        requests = self._requests(step)
        self.watcher.phase(f"step {step + 1} of {self.recipe.steps}", len(requests))
        with self.clock.phase("rollouts"):
            rollouts = await self.rollouts.run(requests, purpose="train", done=self._done)
        with self.clock.phase("updates"):
            samples = samples_of(requests, rollouts)
            difference = await anyio.to_thread.run_sync(self.trainer.logprob_difference, samples)
            self.tally.trained(step, rollouts, samples, difference)
            await anyio.to_thread.run_sync(self.trainer.learn, samples)
            await self.publish(step + 1)
        reward = float(np.mean([rollout.reward or 0.0 for rollout in rollouts]))
        self.watcher.stepped(reward)
        return reward

    def _requests(self, step: int) -> list[Request]:
        """A step's groups: each of its rows, as often as a group has rollouts."""
        first, end = step * self.recipe.prompts, (step + 1) * self.recipe.prompts
        return [
            self._request(
                f"train-{step}-{rollout}", group, rollout, self._rows[group], len(REWARDS)
            )
            for group in range(first, end)
            for rollout in range(group * self.recipe.rollouts, (group + 1) * self.recipe.rollouts)
        ]

    def _request(
        self, name: str, group: int, rollout: int, digits: tuple[int, ...], turns: int
    ) -> Request:
        return Request(
            name=name,
            group=group,
            rollout=rollout,
            payload={
                "digits": list(digits),
                "turns": turns,
                "retells": group % RETELLING == RETELLING - 1,
            },
            sampling={
                "temperature": self.recipe.temperature,
                "max_new_tokens": self.recipe.max_new_tokens,
                # Of each rollout's own, so that a seed's run can be repeated, up to rounding.
                "sampling_seed": (self.seed << 32) + rollout,
            },
        )

    def _done(self, rollout: Rollout) -> None:
        self.watcher.advance()
        self._failed_in_a_row = 0 if rollout.error is None else self._failed_in_a_row + 1
        if self._failed_in_a_row == PATIENCE:
            raise GatewayError(
                f"{PATIENCE} rollouts in a row failed, the last one with: {rollout.error}"
            )
