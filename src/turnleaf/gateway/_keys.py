"""Keys: what names a rollout at the gateway, and what is recorded under it."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import anyio
import attrs

from turnleaf.core import Exclusion, Purpose, Trajectory, Turn
from turnleaf.gateway._asked import AskedTurns
from turnleaf.gateway._bodies import Bodies, Body
from turnleaf.gateway._branches import Branches
from turnleaf.gateway._history import ClientReasoning, History, ThinkingRetention
from turnleaf.gateway._limits import Limits
from turnleaf.gateway._metrics import Metrics
from turnleaf.gateway.engines import Stop
from turnleaf.gateway.protocols import RequestError

__all__ = ["Call", "Keys", "Record", "ended"]

logger = logging.getLogger(__name__)

CLOSE_WAIT = 2.0
"""Seconds that closing a key waits for its calls to end before it cuts them."""
RETRY_GRACE = 30.0
"""Seconds for which a turn whose connection was lost waits for a retry, by default."""
MANY_LEAVES = 8
"""Leaves of a rollout above which its log says why there are so many."""
FORGET_INTERVAL = 1.0
"""Seconds between two looks for keys to forget, each of which goes through all of them."""
COLLECT_GRACE = 60.0
"""Seconds for which a collected trajectory can be collected again, after a lost reply."""
UNCOLLECTED_GRACE = 3600.0
"""Seconds after its end for which a key's trajectory waits to be collected."""


@attrs.define(eq=False)
class Call:
    """A request in flight. `stop` ends it at the engine; `reason` says why.

    due: turns that it is having sampled and that are not recorded yet. joined: it waits for those
    of another one. answered: the client has its reply. body: what was sent.
    """

    due: int = 0
    joined: bool = False
    answered: bool = False
    body: Body | None = None
    stop: Stop = attrs.field(factory=Stop)
    reason: Exclusion = "undelivered"
    finished: asyncio.Event = attrs.field(factory=asyncio.Event)
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)

    def end(self, reason: Exclusion) -> None:
        """Ask the call to end; the first reason stands."""
        if not self.stop.is_set():
            self.reason = reason
            self.stop.set()


@attrs.define(eq=False)
class Record:
    """One key and everything recorded under it.

    sampling: the trainer's sampling parameters, never changed. sampled_from: how many turns were
    sampled from each prompt, by its digest; counted where a seed would make them equal. clock: what
    templates that print the time are told, for as long as the key lives. connections: how many send
    a request or wait for a reply. sampled_tokens: of all turns. expires_at, closed_at,
    collected_at: `time.monotonic` seconds.
    """

    id: str
    name: str
    purpose: Purpose
    sampling: Mapping[str, Any]
    expires_at: float
    history: History
    asked: AskedTurns
    metrics: Metrics
    limits: Limits = attrs.field(factory=Limits)
    clock: datetime = attrs.field(factory=lambda: datetime.now(UTC).astimezone())
    trajectory: Trajectory = attrs.field(factory=Trajectory)
    bodies: Bodies = attrs.field(factory=Bodies)
    branches: Branches = attrs.field(factory=Branches)
    calls: set[Call] = attrs.field(factory=set)
    warned: set[str] = attrs.field(factory=set)
    sampled_from: Counter[bytes] = attrs.field(factory=Counter)
    connections: int = 0
    sampled_tokens: int = 0
    closed_at: float | None = None
    collected_at: float | None = None
    _next_index: int = 0
    _finished: bool = False
    _warned_of_leaves: bool = False

    @property
    def who(self) -> str:
        """The rollout, as logs name it."""
        return f"rollout {self.name}, {self.id}"

    def check_open(self) -> None:
        """Raises a 401 RequestError when the key works no longer."""
        if self.closed_at is not None:
            raise _unknown()
        if time.monotonic() > self.expires_at:
            raise _unauthorised("this API key has expired with its rollout's time limit")

    def take_indices(self, count: int) -> range:
        """The indices of the next turns."""
        first = self._next_index
        self._next_index += count
        return range(first, first + count)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """While one more connection is there; raises a 429 RequestError for too many."""
        self.limits.check_connections(self.connections)
        self.connections += 1
        try:
            yield
        finally:
            self.connections -= 1

    def admit(self, turns: int) -> Call:
        """The call of a request for so many turns; raises RequestError when a limit is reached."""
        self.limits.check_turns(len(self.trajectory) + sum(c.due for c in self.calls), turns)
        self.limits.tokens_left(self.sampled_tokens)
        waited_for = (call for call in self.calls if not (call.joined or call.answered))
        self.limits.check_in_flight(sum(max(call.due, 1) for call in waited_for), turns)
        return Call(due=turns)

    def add(self, turn: Turn, call: Call) -> None:
        """Record a turn of a call."""
        self.trajectory.add(turn)
        self.sampled_tokens += len(turn.output)
        call.due -= 1
        self.metrics.recorded(turn)

    def deliver(self, turn_id: str) -> None:
        """The agent has a turn's reply."""
        if self.trajectory.turn(turn_id).excluded != "undelivered":
            return
        self.trajectory.exclude(turn_id, None)
        self.asked.deliver(turn_id)
        reason = self.branches.deliver(self.trajectory, turn_id)
        if reason is not None:
            self.metrics.forked(reason)
            self._warn_of_leaves()

    def refuse(self, error: RequestError) -> None:
        """Note a request that led to no turn, unless it only came after the rollout's end."""
        if error.status != HTTPStatus.UNAUTHORIZED:
            self.trajectory.refuse(error.code)

    def finish(self) -> None:
        """Count what became of it, once, when nothing is added any more."""
        if not self._finished:
            self._finished = True
            self.metrics.ended(self.trajectory, self.branches.leaves)

    def _warn_of_leaves(self) -> None:
        if self.branches.leaves <= MANY_LEAVES or self._warned_of_leaves:
            return
        self._warned_of_leaves = True
        forks = self.branches.forks
        logger.warning(
            "%s: this rollout has more than %d leaves, each of which is trained with a context "
            "of its own; it forked for these reasons: %s. What helps is in docs/agents.md, "
            '"Keeping to one leaf"%s',
            self.who,
            MANY_LEAVES,
            ", ".join(f"{count} × {reason}" for reason, count in forks.most_common()),
            "; against thinking, turnleaf.history.thinking_retention" * bool(forks["thinking"]),
        )

    def outlived(self, now: float) -> bool:
        """Whether nobody can be expected to collect the trajectory any more."""
        if self.collected_at is not None:
            return now > self.collected_at + COLLECT_GRACE
        ended = self.expires_at if self.closed_at is None else self.closed_at
        return now > ended + UNCOLLECTED_GRACE


class Keys:
    """Issues keys and finds what they name. Secrets are held as digests only.

    retry_grace: seconds for which a turn whose connection was lost waits for a retry. limits: of
    each key. metrics: what is counted of all keys.
    """

    def __init__(
        self,
        client_reasoning: ClientReasoning,
        *,
        thinking_retention: ThinkingRetention = "template",
        retry_grace: float = RETRY_GRACE,
        limits: Limits | None = None,
    ) -> None:
        self._client_reasoning = client_reasoning
        self._thinking_retention = thinking_retention
        self._retry_grace = retry_grace
        self._limits = limits or Limits()
        self._records: dict[str, Record] = {}
        self._by_secret: dict[bytes, Record] = {}
        self._forget_at = 0.0
        self.metrics = Metrics()
        self.metrics.watch(keys_open=self._count_open, in_flight=self._count_calls)

    def __contains__(self, key_id: str) -> bool:
        """Whether the key's trajectory can still be collected."""
        return key_id in self._records

    def open(
        self, *, name: str, sampling: Mapping[str, Any], purpose: Purpose, expires_in: float
    ) -> tuple[Record, str]:
        """Issue a key that works for `expires_in` seconds; returns its record and its secret."""
        self._forget_now_and_then()
        secret = f"tl-{secrets.token_urlsafe(32)}"
        record = Record(
            id=f"key-{secrets.token_hex(12)}",
            name=name,
            purpose=purpose,
            sampling=dict(sampling),
            expires_at=time.monotonic() + expires_in,
            history=History(self._client_reasoning, self._thinking_retention),
            asked=AskedTurns(self._retry_grace),
            metrics=self.metrics,
            limits=self._limits,
        )
        self._records[record.id] = record
        self._by_secret[_digest(secret)] = record
        return record, secret

    def authenticate(self, secret: str | None) -> Record:
        """The record that a secret names; raises a 401 RequestError when there is none."""
        if not secret:
            raise _unauthorised(
                "no API key was sent: pass the payload's _config api_key to the model client, "
                "which sends it as `Authorization: Bearer …` or `x-api-key`"
            )
        record = self._by_secret.get(_digest(secret))
        if record is None:
            raise _unknown()
        record.check_open()
        return record

    async def close(self, key_id: str, *, aborted: bool) -> Trajectory:
        """End a key and its calls, and return what was recorded; a second time, the same.

        Raises a 404 RequestError for an unknown key.
        """
        record = self._records.get(key_id)
        if record is None:
            raise RequestError(404, f"no key {key_id!r} is known here", code="key_not_found")
        await self._end([record], "aborted" if aborted else "undelivered")
        record.collected_at = record.collected_at or time.monotonic()
        self._forget_now_and_then()
        return record.trajectory

    async def close_all(self, purpose: Purpose) -> None:
        """End every key of a purpose and its calls; their trajectories wait for `close`."""
        await self._end([r for r in self._records.values() if r.purpose == purpose], "aborted")

    async def _end(self, records: list[Record], reason: Exclusion) -> None:
        ending = {id(record) for record in records}
        for record in records:
            record.closed_at = record.closed_at or time.monotonic()
            for call in record.calls:
                call.end(reason)
        self._by_secret = {
            digest: record for digest, record in self._by_secret.items() if id(record) not in ending
        }
        with anyio.move_on_after(CLOSE_WAIT):
            for record in records:
                while record.calls:
                    await next(iter(record.calls)).finished.wait()
        for record in records:
            for call in record.calls:
                logger.warning("%s: a call did not end in time and was cut", record.who)
                call.scope.cancel()
            record.finish()

    def _forget_now_and_then(self) -> None:
        if time.monotonic() >= self._forget_at:
            self._forget_at = time.monotonic() + FORGET_INTERVAL
            self._forget_outlived()

    def _forget_outlived(self) -> None:
        now = time.monotonic()
        outlived = {key_id for key_id, record in self._records.items() if record.outlived(now)}
        if not outlived:
            return
        for key_id in outlived:
            self._records[key_id].finish()
        self._records = {k: r for k, r in self._records.items() if k not in outlived}
        self._by_secret = {d: r for d, r in self._by_secret.items() if r.id not in outlived}

    def _count_open(self) -> int:
        now = time.monotonic()
        return sum(now <= record.expires_at for record in self._by_secret.values())

    def _count_calls(self) -> int:
        return sum(len(record.calls) for record in self._records.values())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def ended() -> RequestError:
    """What a call is answered whose key was closed meanwhile."""
    return _unauthorised("the rollout of this API key has ended")


def _unknown() -> RequestError:
    return _unauthorised(
        "this API key is unknown or its rollout has ended: each rollout has its own, in its "
        "payload's _config"
    )


def _unauthorised(message: str) -> RequestError:
    return RequestError(401, message, code="invalid_api_key")
