"""What an agent has asked for: a turn outlives the connection that asked, for a retry to claim."""

import asyncio
import time
from collections.abc import Callable

import attrs

from turnleaf.gateway.protocols import Completion, RequestError

__all__ = ["Asked", "AskedTurns", "identity_of"]

REMEMBERED = 16
"""So many delivered replies are kept to be given again, the latest ones."""
REMEMBERED_REFUSALS = 256
"""So many refusals are kept, the latest ones, whose retries claim nothing."""


def identity_of(digest: bytes, *, trained: bool) -> bytes:
    """What a request and its retries have in common. digest: of the request's body."""
    return digest + (b"trained" if trained else b"untrained")


@attrs.define(eq=False)
class Asked:
    """A turn that was asked for, under way or over.

    waiting: how many connections wait for its reply. given: to how many it was given. lost_at:
    `time.monotonic` of when the last of them was lost; None while one waits, and once the reply was
    delivered. refused_at: the same of when it was refused. unretried: how many connections were
    told so, each of which may come with a retry. events: what a streaming client is to be sent, as
    far as it is known; dropped when nobody waits for the whole any more. on_abandoned: is called
    when nobody has waited for `grace` seconds while the turn is under way; None when it is over.
    """

    identity: bytes
    grace: float
    on_abandoned: Callable[[], None] | None
    waiting: int = attrs.field(init=False, default=0)
    given: int = attrs.field(init=False, default=0)
    delivered: bool = attrs.field(init=False, default=False)
    lost_at: float | None = attrs.field(init=False, default=None)
    refused_at: float | None = attrs.field(init=False, default=None)
    unretried: int = attrs.field(init=False, default=0)
    outcome: Completion | RequestError | None = attrs.field(init=False, default=None)
    events: list[bytes] = attrs.field(init=False, factory=list)
    _changed: asyncio.Event | None = attrs.field(init=False, default=None)
    """Is there while somebody waits for it."""
    _patience: asyncio.TimerHandle | None = attrs.field(init=False, default=None)

    @property
    def done(self) -> bool:
        """Whether the turn is over."""
        return self.outcome is not None

    @property
    def changed(self) -> asyncio.Event:
        """Is set when the turn goes on, is over, or loses a connection: the next time only."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def tell(self, event: bytes) -> None:
        """There is more to send to a streaming client."""
        self.events.append(event)
        self._notify()

    def finish(self, outcome: Completion | RequestError) -> None:
        """The turn is over."""
        self.outcome = outcome
        if isinstance(outcome, RequestError):
            self.refused_at, self.unretried = time.monotonic(), self.waiting
        self.on_abandoned = None
        self._stop_patience()
        self._forget_events()
        self._notify()

    def take(self) -> None:
        """One more connection waits for the reply."""
        self.waiting += 1
        self.given += 1
        self.lost_at = None
        self._stop_patience()

    def leave(self, *, delivered: bool) -> None:
        """A connection waits no longer: it has the reply, or is lost."""
        self.waiting -= 1
        self.delivered = self.delivered or delivered
        if not self.waiting and not self.delivered:
            self.lost_at = time.monotonic()
            self._be_patient()
        self._forget_events()
        self._notify()

    def deliver(self) -> None:
        """The agent has the reply, as a later request of its shows."""
        self.delivered, self.lost_at = True, None

    def _be_patient(self) -> None:
        """Wait for a retry as long as one may claim the turn."""
        if self.lost_at is None or self.on_abandoned is None:
            return
        left = self.lost_at + self.grace - time.monotonic()
        if left > 0:
            self._patience = asyncio.get_running_loop().call_later(left, self._be_patient)
        else:
            self.on_abandoned()

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _forget_events(self) -> None:
        """The outcome says the same in less memory."""
        if self.done and not self.waiting:
            self.events = []

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


@attrs.define(eq=False)
class AskedTurns:
    """What was asked for under one key and may be claimed by a retry. grace: seconds."""

    _grace: float
    _asked: list[Asked] = attrs.field(init=False, factory=list)

    def ask(self, identity: bytes, *, on_abandoned: Callable[[], None] | None) -> Asked:
        """A request that claims nothing: a turn of its own; see `Asked`."""
        asked = Asked(identity, self._grace, on_abandoned)
        self._asked.append(asked)
        return asked

    def refuse(self, identity: bytes, error: RequestError) -> None:
        """A request was refused before a turn was asked for: a retry of it claims nothing."""
        asked = self.ask(identity, on_abandoned=None)
        asked.take()
        asked.finish(attrs.evolve(error))  # a traceback would hold on to the request
        asked.leave(delivered=False)

    def deliver(self, turn_id: str) -> None:
        """A later request shows that the agent has the turn's reply."""
        for asked in self._asked:
            if isinstance(asked.outcome, Completion) and turn_id in asked.outcome.turn_ids:
                asked.deliver()

    def claim(self, identity: bytes, *, marked: bool) -> Asked | None:
        """What a request that may be a retry is to be given, if anything.

        The oldest identical turn whose connection was lost, whether it is over or not. Else, when
        the request is marked as a retry: nothing, if it may be that of one that was refused; the
        oldest one under way, whose loss may show only later; the latest one that was delivered.
        Of several, one that was given less often.
        """
        self._forget()
        same = [asked for asked in self._asked if asked.identity == identity]
        for asked in same:
            if asked.lost_at is not None and asked.refused_at is None:
                return asked
        if not marked:
            return None
        for asked in same:
            if asked.unretried:
                asked.unretried -= 1
                return None
        under_way = [asked for asked in same if not asked.done]
        delivered = [asked for asked in reversed(same) if asked.delivered]
        return min(under_way or delivered, key=lambda asked: asked.given, default=None)

    def _forget(self) -> None:
        oldest = time.monotonic() - self._grace
        delivered = [asked for asked in self._asked if asked.delivered and not asked.waiting]
        refused = [asked for asked in self._asked if asked.refused_at is not None]
        old = set(map(id, [*delivered[:-REMEMBERED], *refused[:-REMEMBERED_REFUSALS]]))
        self._asked = [
            asked
            for asked in self._asked
            if id(asked) not in old
            and (asked.lost_at is None or asked.lost_at > oldest)
            and (asked.refused_at is None or asked.refused_at > oldest)
        ]
