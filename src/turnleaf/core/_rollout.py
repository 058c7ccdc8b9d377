"""One rollout: an agent runs on one payload, and what it had sampled comes back."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import anyio
import attrs

from turnleaf.core._attendance import Attendance
from turnleaf.core._background import Background
from turnleaf.core._described import described, hidden, text_of, unwrapped
from turnleaf.core._errors import (
    AgentError,
    BadResultError,
    Cause,
    ContractError,
    GatewayError,
    PayloadError,
    RolloutAborted,
    RolloutError,
    RolloutTimeout,
    SessionError,
)
from turnleaf.core._exchange import checked_payload, checked_result, checked_reward, with_config
from turnleaf.core._protocols import Gateway, Key, Purpose, RolloutSession
from turnleaf.core._start_rate import StartRate
from turnleaf.core._tasks import is_cancelled, is_interrupt, wait_for_first
from turnleaf.core._trajectory import Trajectory

__all__ = ["Rollout", "RolloutTimings", "run_rollout"]

logger = logging.getLogger(__name__)

GATEWAY_LIMIT = 60.0
"""Seconds that the gateway may take to open or close a key."""

Status = Literal["completed", "truncated", "failed", "timed_out", "aborted"]

INFRASTRUCTURE_REFUSALS = frozenset({"engine_unavailable", "engine_reply", "gateway_error"})
"""Codes of refusals for which engine or gateway are answerable."""

Answer = TypeVar("Answer")
Ours = TypeVar("Ours", bound=ContractError | RolloutError | GatewayError)


@attrs.frozen
class RolloutTimings:
    """Where a rollout's time went; seconds.

    waited: for room and for its turn to start. started_at: Unix time of the start, None if it
    never started. session: from the start until the agent's result, or until it was cut off.
    closing: until the gateway had handed over the trajectory.
    """

    waited: float = 0.0
    started_at: float | None = None
    session: float = 0.0
    closing: float = 0.0


@attrs.frozen(kw_only=True)
class Rollout:
    """What came of one run of an agent.

    trajectory: every turn captured, whatever the status.
    status: completed; truncated (completed, but it hit a limit); failed; timed_out; aborted.
    reward: finite; None when the agent gave none.
    result: what the agent returned, as it came, or None when it returned no dict.
    error: why it did not complete; None when it did. Never shows the key's secret.
    session_id: what the session calls itself, towards its remote side too; None if it has no name.
    """

    name: str
    trajectory: Trajectory
    status: Status
    reward: float | None = None
    result: dict[str, Any] | None = attrs.field(default=None, repr=False)
    error: RolloutError | GatewayError | None = None
    timings: RolloutTimings = RolloutTimings()
    session_id: str | None = None

    @property
    def hit_limit(self) -> bool:
        """Whether a limit cut the rollout short, whatever became of it.

        That is: the last turn to train ended at a token limit, the rollout's own limits were used
        up, or it failed after the context had no room for a request. An agent that shortens its
        history and goes on was not cut short.
        """
        refused = self.trajectory.refused
        if "rollout_limit_exceeded" in refused:
            return True
        if self.error is not None and "context_length_exceeded" in refused:
            return True
        trained = [turn for turn in self.trajectory.turns if turn.excluded is None]
        return bool(trained) and trained[-1].finish_reason == "length"

    @property
    def cause(self) -> Cause | None:
        """Who is answerable; None for a rollout that completed.

        An agent that failed is not, where requests of its were refused for what is not its doing.
        """
        not_its_doing = self.trajectory.refused.keys() & INFRASTRUCTURE_REFUSALS
        failed = self.status == "failed" and isinstance(self.error, AgentError | BadResultError)
        if failed and not_its_doing:
            return "infrastructure"
        if isinstance(self.error, RolloutError):
            return self.error.cause
        return None if self.error is None else "infrastructure"


async def run_rollout(
    payload: object,
    *,
    session: Callable[[], RolloutSession],
    gateway: Gateway,
    background: Background,
    model_id: str,
    sampling: Mapping[str, Any],
    name: str,
    purpose: Purpose = "train",
    max_rollout_time: float = 900.0,
    start_rate: StartRate | None = None,
    abort: anyio.Event | None = None,
) -> Rollout:
    """Run an agent once and return what came of it; whatever goes wrong with it is in the Rollout.

    payload: the row's JSON object; the agent gets a copy of it with `_config` added.
    session: makes the session, which is always left again. sampling: the trainer's parameters, in
        SGLang's names. name: names the rollout in logs, errors and at the engine; not secret.
    max_rollout_time: seconds from the start on; waiting for room, where the session has to, and
        then for `start_rate` is not counted.
    abort: the trainer's signal. On it, as on a timeout, the key is closed and the Rollout, with
        the turns captured until then, returned at once.

    Leaving the session goes on in `background`, which holds no result back. Cancellation is passed
    on at once, while `background` closes the key and leaves the session.

    An exception out of the session that is no error of turnleaf's is a SessionError: sessions
    raise AgentError for what the agent did. That holds for SystemExit and its like, too; only the
    user's own Ctrl-C passes.

    Raises ContractError, bare, for a mistake that would recur on every rollout.
    """
    unstarted = Rollout(name=name, trajectory=Trajectory(), status="failed")
    try:
        checked = checked_payload(payload, name=name)
    except PayloadError as error:
        logger.warning("%s", error)
        return attrs.evolve(unstarted, error=error)
    run = _Run(
        rollout=unstarted,
        payload=checked,
        session=session,
        gateway=gateway,
        model_id=model_id,
        max_rollout_time=max_rollout_time,
        start_rate=start_rate,
        abort=anyio.Event() if abort is None else abort,
    )

    async def conduct() -> None:
        await run.conduct(sampling=sampling, purpose=purpose)

    background.start(conduct, name=name)
    try:
        await run.ended.wait()
    finally:
        run.unwanted.set()
    if run.ending is None:
        raise RuntimeError(f"{name}: the background tasks ended before the rollout did")
    if isinstance(run.ending, ContractError):
        raise run.ending
    return run.ending


@attrs.define(eq=False, kw_only=True)
class _Run:
    """A rollout under way, whose `conduct` has the key and the clock.

    rollout: what is known of it so far. ended: set once `ending` is there, or never will be.
    unwanted: set when nobody waits for it any more.
    """

    rollout: Rollout
    payload: dict[str, Any]
    session: Callable[[], RolloutSession]
    gateway: Gateway
    model_id: str
    max_rollout_time: float
    start_rate: StartRate | None
    abort: anyio.Event
    ended: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    ending: Rollout | ContractError | None = attrs.field(init=False, default=None)
    unwanted: anyio.Event = attrs.field(init=False, factory=anyio.Event)

    async def conduct(self, *, sampling: Mapping[str, Any], purpose: Purpose) -> None:
        """Wait for the start, open the key, wait for the session, a signal or the clock, close it.

        Returns when the session is left; `ended` is set before that.
        """
        attendance, key = Attendance(self.rollout.name, self.session), None
        try:
            try:
                if not await self._may_start(attendance):
                    return
                started = anyio.current_time()
                self._note(started_at=time.time())
                try:
                    key = await self._open(sampling=sampling, purpose=purpose)
                except (ContractError, GatewayError) as error:
                    self._end(error)
                    return
                try:
                    outcome = await self._attended(attendance, key, started=started)
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    outcome = self._broken(error, key.secret)
                # The key goes first, so that calls in flight end as aborted, not as abandoned.
                await self._close(key, outcome, aborted=not attendance.settled.is_set())
            finally:
                await attendance.dismiss()
        except BaseException as error:
            if is_interrupt(error):
                raise
            if self.ending is None:
                self._end(self._broken(error, "" if key is None else key.secret))
        finally:
            self.ended.set()

    async def _may_start(self, attendance: Attendance) -> bool:
        """Wait for room and for the turn to start; False when the rollout has ended before."""
        begun = anyio.current_time()
        if not self._cut_off():
            attendance.start()
            await wait_for_first(attendance.admitted.wait, self.abort.wait, self.unwanted.wait)
        # Room first: who waits for it must not hold up the starts of others, nor save up its own.
        if self.start_rate is not None and not (self._cut_off() or attendance.settled.is_set()):
            await wait_for_first(self.start_rate.wait, self.abort.wait, self.unwanted.wait)
        self._note(waited=anyio.current_time() - begun)
        if self._cut_off():
            error = RolloutAborted(f"{self.rollout.name}: aborted before it started")
            self.ending = attrs.evolve(self.rollout, status="aborted", error=error)
            self.ended.set()
        elif attendance.settled.is_set():
            self._end(self._outcome(attendance, secret=""))
        return self.ending is None

    async def _attended(
        self, attendance: Attendance, key: Key, *, started: float
    ) -> Rollout | ContractError:
        if not self._cut_off():
            request = with_config(self.payload, key=key, model_id=self.model_id)
            attendance.begin(request, secret=key.secret)
        with anyio.CancelScope(deadline=started + self.max_rollout_time):
            await wait_for_first(attendance.settled.wait, self.abort.wait, self.unwanted.wait)
        self._note(session=anyio.current_time() - started)
        self.rollout = attrs.evolve(self.rollout, session_id=attendance.session_id)
        return self._outcome(attendance, secret=key.secret)

    def _broken(self, error: BaseException, secret: str) -> Rollout:
        """The rollout that ended in a way that nobody foresaw, or in the end of the background."""
        name = self.rollout.name
        if isinstance(error, asyncio.CancelledError):
            text = f"{name}: cut off: the background tasks ended before the rollout did"
        else:
            text = hidden(f"{name}: the rollout broke: {described(error)}", secret)
        return attrs.evolve(self.rollout, status="failed", error=SessionError(text))

    async def _open(self, *, sampling: Mapping[str, Any], purpose: Purpose) -> Key:
        opening = self.gateway.open_key(
            name=self.rollout.name,
            sampling=sampling,
            purpose=purpose,
            # Every key is closed; only those of a trainer that died are left to expire.
            expires_in=self.max_rollout_time + 2 * GATEWAY_LIMIT,
        )
        return await _answer(opening, f"{self.rollout.name}: the gateway did not open a key")

    def _outcome(self, attendance: Attendance, *, secret: str) -> Rollout | ContractError:
        """How the rollout went, still without its trajectory."""
        name, result, reward, failure = self.rollout.name, None, None, attendance.failure
        if not attendance.settled.is_set():
            if self._cut_off():
                failure = RolloutAborted(f"{name}: aborted while it ran")
            else:
                failure = RolloutTimeout(f"{name}: cut off after {self.max_rollout_time:g} s")
        elif failure is None:
            try:
                result = checked_result(attendance.result, name=name, secret=secret)
                reward = checked_reward(result, name=name, secret=secret)
            except RolloutError as error:
                failure = error
            except Exception as error:  # noqa: BLE001  # out of a result of foreign types
                said = hidden(described(error), secret)
                failure = BadResultError(f"{name}: the agent's result cannot be read: {said}")
        if failure is None:
            return attrs.evolve(self.rollout, status="completed", reward=reward, result=result)
        blamed = _blamed(failure, name=name, secret=secret)
        if isinstance(blamed, ContractError):
            return blamed
        return attrs.evolve(self.rollout, status=_status(blamed), result=result, error=blamed)

    async def _close(self, key: Key, outcome: Rollout | ContractError, *, aborted: bool) -> None:
        name, began = self.rollout.name, anyio.current_time()
        closing = self.gateway.close_key(key.id, aborted=aborted)
        try:
            trajectory = await _answer(closing, f"{name}: the gateway did not close key {key.id}")
        except (ContractError, GatewayError) as failure:
            error = _silenced(failure, key.secret)
            if isinstance(outcome, Rollout):
                error.add_note(f"Before that the rollout was {outcome.status}: {outcome.error}")
                self.rollout = outcome
            self._end(outcome if isinstance(outcome, ContractError) else error)
            return
        self._note(closing=anyio.current_time() - began)
        if isinstance(outcome, Rollout):
            outcome = attrs.evolve(outcome, trajectory=trajectory, timings=self.rollout.timings)
            if outcome.status == "completed" and outcome.hit_limit:
                outcome = attrs.evolve(outcome, status="truncated")
        self._end(outcome)

    def _end(self, ending: Rollout | ContractError | GatewayError) -> None:
        if isinstance(ending, GatewayError):
            ending = attrs.evolve(self.rollout, status="failed", error=ending)
        self.ending = ending
        if isinstance(ending, Rollout) and ending.error is not None:
            logger.log(
                logging.INFO if ending.status == "aborted" else logging.WARNING,
                "%s: %s (%s): %s",
                ending.name,
                ending.status,
                ending.cause,
                f"{ending.error}{_refusals(ending.trajectory)}",
            )
        self.ended.set()

    def _cut_off(self) -> bool:
        return self.abort.is_set() or self.unwanted.is_set()

    def _note(self, **timings: float) -> None:
        self.rollout = attrs.evolve(
            self.rollout, timings=attrs.evolve(self.rollout.timings, **timings)
        )


async def _answer(call: Awaitable[Answer], refusal: str) -> Answer:
    """What the gateway answers; raises ContractError as it is, all else as GatewayError."""
    try:
        with anyio.move_on_after(GATEWAY_LIMIT):
            return await call
    except Exception as error:
        known = unwrapped(error)
        if isinstance(known, ContractError | GatewayError):
            raise known from known.__cause__
        raise GatewayError(f"{refusal}: {described(known)}") from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise GatewayError(f"{refusal}: what it waited for was cancelled") from None
    raise GatewayError(f"{refusal} within {GATEWAY_LIMIT:g} s")


def _blamed(
    failure: BaseException, *, name: str, secret: str
) -> ContractError | RolloutError | GatewayError:
    """The error of ours that says what went wrong, without the key's secret."""
    error = unwrapped(failure)
    if not isinstance(error, ContractError | RolloutError | GatewayError):
        cause = error
        error = SessionError(f"{name}: the session failed: {described(cause)}")
        error.__cause__ = cause
    return _silenced(error, secret)


def _silenced(error: Ours, secret: str) -> Ours:
    """`error`, or one of its kind that does not show the secret, nor has a cause that does."""
    text = text_of(error)
    if text is not None and secret not in _printed(error, secret):
        return error
    # An exception of a session's own may need other arguments; those of ours take a text.
    ours = next(kind for kind in type(error).__mro__ if kind.__module__ == SessionError.__module__)
    silent: Ours = ours(hidden(described(error) if text is None else text, secret))
    return silent


def _printed(error: BaseException, secret: str) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # groups within groups can be too deep for it
        return secret


def _refusals(trajectory: Trajectory) -> str:
    """What the gateway refused, for the end of a log line."""
    refused = [f"{count} × {code}" for code, count in sorted(trajectory.refused.items())]
    return f" (the gateway refused requests: {', '.join(refused)})" if refused else ""


def _status(error: RolloutError | GatewayError) -> Status:
    if isinstance(error, RolloutTimeout):
        return "timed_out"
    return "aborted" if isinstance(error, RolloutAborted) else "failed"
