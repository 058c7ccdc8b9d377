"""How many leaves a rollout has, turn by turn, and why there is more than one."""

from collections import Counter
from typing import Literal

import attrs
import numpy as np

from turnleaf.core import Trajectory, Turn
from turnleaf.gateway._history import Conversation, Match

__all__ = ["Branches", "ForkReason"]

ForkReason = Literal["edited", "new", "resampled", "template", "thinking"]
"""Why a turn began another leaf.

edited: its messages hold replies other than those that were given. new: they hold no reply at all,
and nobody asked them before: a conversation of its own. resampled: what it continues, or the very
same conversation, had been continued before. thinking: the template now omits sampled reasoning.
template: it was not proved to continue such a conversation, and wrote the past in another way.
"""


@attrs.frozen
class _Origin:
    """What a turn continued.

    matched: the turn whose reply it continued; None for none. has_replies: replies that were not
    given are among its new messages. reasoning: the path of `matched` holds some. repeated: the
    very same conversation was answered before.
    """

    matched: str | None
    has_replies: bool
    reasoning: bool
    repeated: bool


@attrs.define(eq=False)
class Branches:
    """The leaves of a rollout as far as its turns are delivered.

    A turn costs a step for each turn that it does not extend, up to one that it does.
    """

    forks: Counter[ForkReason] = attrs.field(init=False, factory=Counter)
    _origins: dict[str, _Origin] = attrs.field(init=False, factory=dict)
    _tips: set[str] = attrs.field(init=False, factory=set)
    _extended: set[str] = attrs.field(init=False, factory=set)

    @property
    def leaves(self) -> int:
        """How many there are."""
        return len(self._tips)

    def note(
        self, turn_id: str, conversation: Conversation, match: Match | None, *, repeated: bool
    ) -> None:
        """A turn was recorded. repeated: its conversation was answered before."""
        new = conversation.messages if match is None else match.new
        self._origins[turn_id] = _Origin(
            matched=None if match is None else match.turn_id,
            has_replies=any(message["role"] == "assistant" for message in new),
            reasoning=match is not None and match.carries_reasoning,
            repeated=repeated,
        )

    def deliver(self, trajectory: Trajectory, turn_id: str) -> ForkReason | None:
        """A turn that is to be trained was delivered; returns why it began another leaf, if so."""
        origin = self._origins.pop(turn_id)
        before = len(self._tips)
        self._extend_path(trajectory, trajectory.turn(turn_id))
        if turn_id not in self._extended:
            self._tips.add(turn_id)
        if not before or len(self._tips) <= before:
            return None
        reason = _reason(trajectory, turn_id, origin)
        self.forks[reason] += 1
        return reason

    def _extend_path(self, trajectory: Trajectory, turn: Turn) -> None:
        """Note each turn whose path this one's holds whole."""
        kept = turn.keep
        while turn.parent is not None:
            parent = trajectory.turn(turn.parent)
            if kept == parent.end:
                if parent.id in self._extended:
                    return
                self._extended.add(parent.id)
                self._tips.discard(parent.id)
            turn, kept = parent, min(kept, parent.keep)


def _reason(trajectory: Trajectory, turn_id: str, origin: _Origin) -> ForkReason:
    if origin.matched is None:
        if origin.repeated:
            return "resampled"
        return "edited" if origin.has_replies else "new"
    matched = trajectory.tokens_through(origin.matched)
    mine = trajectory.tokens_through(turn_id)[: len(matched)]
    if not np.array_equal(matched, mine):
        return "thinking" if origin.reasoning else "template"
    return "edited" if origin.has_replies else "resampled"
