"""One rollout for slime: what `turnleaf.adapters.slime.generate` does."""

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

import attrs

from turnleaf.adapters.slime import _host
from turnleaf.adapters.slime._plan import is_fully_async, sampling_for
from turnleaf.adapters.slime._rewards import (
    has_reward_model,
    reward_form,
    scored,
    take_over_reward_model,
)
from turnleaf.adapters.slime._rollout_samples import RolloutSamples
from turnleaf.adapters.slime._samples import (
    NO_REPLAYS,
    Outcome,
    clean_copy,
    give,
    requeues_of,
    samples_of,
)
from turnleaf.adapters.slime._service import RolloutService
from turnleaf.core import (
    AgentError,
    BadResultError,
    ContractError,
    Purpose,
    Rollout,
    RolloutAborted,
    RolloutError,
    SessionError,
    described,
    is_interrupt,
)

__all__ = ["generated"]

logger = logging.getLogger(__name__)

END_LIMIT = 15.0
"""Seconds that the sessions under way may take to be left before the process ends."""
_ending = threading.Lock()
_EXCERPT = 80


async def generated(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], *, evaluation: bool
) -> Any:
    """See `turnleaf.adapters.slime.generate`."""
    try:
        return await _Generation.of(args, sample, evaluation=evaluation).carry_out(sampling_params)
    except Exception as error:
        if is_fully_async(args):
            _end_process(error)
        raise


def _end_process(error: Exception) -> None:
    """slime's fully asynchronous rollout would log the error, drop the group and wait on."""
    _ending.acquire()  # for good: what else fails now fails of the end
    logger.error("the run cannot go on; ending its sessions: %s", described(error))
    # In a thread, since it waits for what may not come.
    ending = threading.Thread(target=RolloutService.close_current, daemon=True)
    ending.start()
    ending.join(END_LIMIT)
    logger.critical("the run cannot go on: %s", described(error), exc_info=error)
    logging.shutdown()
    os._exit(1)


@attrs.frozen(kw_only=True)
class _Generation:
    """One call of the hook.

    clean: the incoming sample, without anything of an earlier run.
    """

    args: Any
    clean: Any
    evaluation: bool
    requeues: int
    session_id: str
    service: RolloutService

    @classmethod
    def of(cls, args: Any, sample: Any, *, evaluation: bool) -> "_Generation":
        service = RolloutService.of(args)
        take_over_reward_model(args)
        if sample.index is None:
            raise ContractError("a sample has no index; the data source must number them")
        return cls(
            args=args,
            clean=clean_copy(sample),
            evaluation=evaluation,
            requeues=requeues_of(sample),
            session_id=sample.session_id or uuid.uuid4().hex,
            service=service,
        )

    @property
    def purpose(self) -> Purpose:
        return "eval" if self.evaluation else "train"

    @property
    def name(self) -> str:
        return f"{self.purpose}-{self.clean.index}"

    async def carry_out(self, sampling_params: Mapping[str, Any]) -> Any:
        rollout = await self.service.run(
            self.clean.metadata.get("payload"),
            name=self.name,
            sampling=sampling_for(sampling_params),
            purpose=self.purpose,
        )
        outcome = self._outcome(rollout)
        samples = self._samples(outcome)
        if outcome.reward is None and not self._is_scored_by_group:
            outcome = await self._scored(outcome, samples[-1])
            if outcome.leaves:
                give(samples, outcome)
            else:
                samples = self._samples(outcome)
        if not self.evaluation:
            self.service.failures.note(outcome.rollout)
        # In evaluation every sample counts, so a rollout is its final leaf.
        return samples[-1] if self.evaluation else samples

    def _outcome(self, rollout: Rollout) -> Outcome:
        """What a rollout came to, its reward None if it is still to be scored."""
        settings, removed = self.service.plan.settings, None
        reward = self._reward_form(0.0)
        leaves = rollout.trajectory.leaves()
        if isinstance(rollout.error, BadResultError) and settings.on_bad_result == "raise":
            raise self._located(rollout.error, rollout)
        if rollout.status == "aborted":
            # Put back or dropped, but never trained: what it had sampled is not its whole.
            leaves, removed = [], "aborted"
        elif rollout.error is not None:
            if rollout.cause == "infrastructure" and settings.on_infrastructure_failure == "remove":
                removed = "infrastructure"
        elif not leaves and not self.evaluation:
            rollout = attrs.evolve(rollout, status="failed", error=_without_turn(rollout))
        else:
            reward = None if rollout.reward is None else self._reward_form(rollout.reward)
        if not leaves and removed is None and not self.evaluation:
            removed = "no turn"
        return Outcome(
            rollout=rollout,
            leaves=leaves,
            reward=reward,
            removed=removed,
            session_id=rollout.session_id or self.session_id,
            requeues=self.requeues,
        )

    async def _scored(self, outcome: Outcome, sample: Any) -> Outcome:
        """The outcome with the reward that slime's own hub gives the final leaf."""
        none = self._reward_form(0.0)
        if not has_reward_model(self.args, sample):
            return self._without_reward(outcome, "slime has no reward model to ask")
        try:
            reward = await self._unless_aborted(
                scored(self.args, sample, evaluation=self.evaluation)
            )
        except ContractError:
            raise
        except BadResultError as error:
            if self.service.plan.settings.on_bad_result == "raise":
                raise self._located(error, outcome.rollout) from None
            failed = BadResultError(f"{self.name}: {error}")
            rollout = attrs.evolve(outcome.rollout, status="failed", error=failed)
            return attrs.evolve(outcome, rollout=rollout, reward=none)
        except RolloutAborted as error:
            rollout = attrs.evolve(outcome.rollout, status="aborted", error=error)
            return self._outcome(rollout)
        except Exception as error:
            logger.warning("%s: the reward model failed", self.name, exc_info=error)
            failure = SessionError(f"{self.name}: the reward model failed: {described(error)}")
            rollout = attrs.evolve(outcome.rollout, status="failed", error=failure)
            return attrs.evolve(outcome, rollout=rollout, reward=none, removed="no reward")
        if reward is None:
            return self._without_reward(outcome, "slime's reward model gave none either")
        return attrs.evolve(outcome, reward=reward)

    def _without_reward(self, outcome: Outcome, why: str) -> Outcome:
        error = AgentError(
            f"{self.name}: the agent gave no reward, and {why}: return one from the agent, or set "
            "--rm-type or --custom-rm-path"
        )
        rollout = attrs.evolve(outcome.rollout, status="failed", error=error)
        reward = self._reward_form(0.0)
        return attrs.evolve(outcome, rollout=rollout, reward=reward, removed="no reward")

    async def _unless_aborted(self, scoring: Coroutine[Any, Any, Any]) -> Any:
        """What the scoring gives; raises RolloutAborted when slime aborts the rollout meanwhile."""
        task = asyncio.create_task(_contained(scoring))
        tasks = {task}
        if not self.evaluation:
            tasks.add(asyncio.create_task(self.service.aborted()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in tasks:
                one.add_done_callback(_heard)
                one.cancel()
        # A judge that asks slime's engines is cut off by the abort a moment before it is seen.
        if not task.done() or (not self.evaluation and _host.aborted()):
            raise RolloutAborted(f"{self.name}: aborted while it was scored")
        if task.cancelled():
            raise SessionError(f"{self.name}: the reward model cancelled itself")
        return task.result()

    @property
    def _is_scored_by_group(self) -> bool:
        return bool(self.args.group_rm) and not self.evaluation

    def _reward_form(self, reward: float) -> Any:
        return reward_form(self.args, reward, evaluation=self.evaluation)

    def _samples(self, outcome: Outcome) -> RolloutSamples:
        # Nothing of an evaluation is trained, and slime asks the engine for nothing to replay.
        replays = NO_REPLAYS if self.evaluation else self.service.plan.replays
        return samples_of(outcome, self.clean, replays, partial(_host.decoded, self.args))

    def _located(self, error: BadResultError, rollout: Rollout) -> BadResultError:
        """The error, saying of which row, for whom it stops the run."""
        prompt = f"{self.clean.prompt!r:.{_EXCERPT}}"
        session_id = rollout.session_id or self.session_id
        return BadResultError(
            f"{error} (row with the prompt {prompt}, sample index {self.clean.index}, group "
            f"{self.clean.group_index}, session {session_id}). To have such a rollout fail alone, "
            "with reward 0, set turnleaf.on_bad_result: fail_rollout"
        )


async def _contained(scoring: Coroutine[Any, Any, Any]) -> Any:
    """What the scoring gives; an exit that it raises would end slime's event loop."""
    try:
        return await scoring
    except (SystemExit, KeyboardInterrupt) as error:
        if is_interrupt(error):
            raise
        raise SessionError(f"the reward model raised {described(error)}") from error


def _heard(task: asyncio.Task[Any]) -> None:
    """Asking for the exception keeps asyncio from reporting it."""
    if not task.cancelled():
        task.exception()


def _without_turn(rollout: Rollout) -> RolloutError:
    return AgentError(
        f"{rollout.name}: the agent finished without a model call that can be trained; does its "
        "client use the base_url and api_key of the payload's _config?"
    )
