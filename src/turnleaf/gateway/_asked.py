"""What an agent has asked for: a turn outlives the connection that asked, for a retry to claim."""

import hashlib
import time
from collections.abc import Callable

import anyio
import attrs

from turnleaf.gateway.protocols import Completion, RequestError

__all__ = ["Asked", "AskedTurns", "identity_of"]

REMEMBERED = 16
"""So many delivered replies are kept to be given again, the latest ones."""


def identity_of(body: bytes, *, trained: bool) -> bytes:
    """What a request and its retries have in common."""
    return hashlib.blake2b(body, digest_size=16, person=b"trained" if trained else b"").digest()


@attrs.define(eq=False)
class Asked:
    """A turn that was asked for, under way or over.

    waiting: how many connections wait for its reply. lost_at: `time.monotonic` of when the last of
    them was lost; None while one waits, and once the reply was delivered.
    """

    identity: bytes
    waiting: int = attrs.field(init=False, default=0)
    delivered: bool = attrs.field(init=False, default=False)
    lost_at: float | None = attrs.field(init=False, default=None)
    outcome: Completion | RequestError | None = attrs.field(init=False, default=None)
    done: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    _changed: anyio.Event = attrs.field(init=False, factory=anyio.Event)

    def finish(self, outcome: Completion | RequestError) -> None:
        """The turn is over."""
        self.outcome = outcome
        self.done.set()
        self._notify()

    def take(self) -> None:
        """One more connection waits for the reply."""
        self.waiting += 1
        self.lost_at = None
        self._notify()

    def leave(self, *, delivered: bool) -> None:
        """A connection waits no longer: it has the reply, or is lost."""
        self.waiting -= 1
        self.delivered = self.delivered or delivered
        if not self.waiting and not self.delivered:
            self.lost_at = time.monotonic()
        self._notify()

    async def abandoned(self, grace: float) -> None:
        """Return when the turn is over, or nobody has waited for it for `grace` seconds."""
        while not self.done.is_set():
            changed = self._changed
            left = None if self.lost_at is None else self.lost_at + grace - time.monotonic()
            if left is not None and left <= 0:
                return
            with anyio.move_on_after(left):
                await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@attrs.define(eq=False)
class AskedTurns:
    """What was asked for under one key and may be claimed by a retry. grace: seconds."""

    _grace: float
    _asked: list[Asked] = attrs.field(init=False, factory=list)

    def ask(self, identity: bytes) -> Asked:
        """A request that claims nothing: a turn of its own."""
        asked = Asked(identity)
        self._asked.append(asked)
        return asked

    def claim(self, identity: bytes, *, marked: bool) -> Asked | None:
        """What a request that may be a retry is to be given, if anything.

        The oldest identical turn whose connection was lost, whether it is over or not. Else, when
        the request is marked as a retry: the oldest one under way, whose loss may show only later,
        or the latest one that was delivered. What was refused is claimed by nothing.
        """
        self._forget()
        same = [asked for asked in self._asked if asked.identity == identity]

        def first(condition: Callable[[Asked], bool]) -> Asked | None:
            return next(filter(condition, same), None)

        lost = first(lambda asked: asked.lost_at is not None)
        if lost is not None or not marked:
            return lost
        under_way = first(lambda asked: not asked.done.is_set())
        if under_way is not None:
            return under_way
        return next((asked for asked in reversed(same) if asked.delivered), None)

    def _forget(self) -> None:
        now = time.monotonic()
        delivered = [asked for asked in self._asked if asked.delivered and not asked.waiting]
        old = set(map(id, delivered[:-REMEMBERED]))
        self._asked = [
            asked
            for asked in self._asked
            if id(asked) not in old
            and not isinstance(asked.outcome, RequestError)
            and (asked.lost_at is None or now < asked.lost_at + self._grace)
        ]
