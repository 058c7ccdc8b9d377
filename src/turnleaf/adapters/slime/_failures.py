"""A run in which nothing succeeds stops itself."""

import math
import time
from collections import Counter

import attrs

from turnleaf.core import ContractError, Rollout, SessionBusy

__all__ = ["FailureWatch"]

_EXCERPT = 300


@attrs.define
class FailureWatch:
    """Counts what failed since the last success.

    window: seconds without a success after which a run is given up, counted from when the first
    rollout that failed since then was started. at_least: how many rollouts must have failed in
    them. Rollouts that slime aborted, and agents for which there was no room, say nothing.
    """

    window: float
    at_least: int
    _succeeded: float = attrs.field(init=False, default=-math.inf)
    _since: float = attrs.field(init=False, default=math.inf)
    _failed: int = attrs.field(init=False, default=0)
    _reasons: Counter[str] = attrs.field(init=False, factory=Counter)

    def note(self, rollout: Rollout) -> None:
        """A rollout has ended; raises ContractError when the run is to be given up."""
        if rollout.status == "aborted" or isinstance(rollout.error, SessionBusy):
            return
        if rollout.error is None:
            self._succeeded, self._since, self._failed = time.monotonic(), math.inf, 0
            self._reasons.clear()
            return
        now = time.monotonic()
        # What a rollout took, too, is time without a success.
        began = max(now - rollout.timings.session, self._succeeded)
        self._since = min(self._since, began)
        self._failed += 1
        self._reasons[_reason(rollout)] += 1
        if now - self._since >= self.window and self._failed >= self.at_least:
            reason, count = self._reasons.most_common(1)[0]
            raise ContractError(
                f"no rollout has succeeded for {now - self._since:.0f} s "
                f"(turnleaf.failure_window: {self.window:g}), {self._failed} have failed, "
                f"{count} of them like this one: {reason}"
            )


def _reason(rollout: Rollout) -> str:
    """The error without the rollout's name, by which the same ones would differ."""
    text = str(rollout.error).removeprefix(f"{rollout.name}: ")
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"
