"""What one rollout may have: turns, sampled tokens, requests at once."""

import attrs

from turnleaf.gateway.protocols import RequestError, bad_request

__all__ = ["Limits"]

RETRY_AFTER = 5
"""Seconds that a client is told to wait while too many of its rollout's requests are in flight:
until a model call may be over."""


@attrs.frozen
class Limits:
    """The limits of every key; None is no limit.

    Each method raises RequestError for what goes beyond: a 429 for what passes by itself, and for
    what does not a 400, which no client sends again.

    max_turns: turns that a rollout may have. max_rollout_tokens: tokens that may be sampled for
    it in all. max_requests_in_flight: its requests under way at once, each reply counted; as many
    connections more may wait with retries of these, or send their requests.
    """

    max_turns: int | None = None
    max_rollout_tokens: int | None = None
    max_requests_in_flight: int = 64

    def check_connections(self, open_now: int) -> None:
        """One more connection, before anything of its request is read."""
        if open_now >= 2 * self.max_requests_in_flight:
            raise self._busy(f"{open_now} connections")

    def check_in_flight(self, in_flight: int, asked: int) -> None:
        """One more request, which is no retry, for so many replies. Each counts as a request."""
        if asked > self.max_requests_in_flight:
            raise bad_request(
                "n",
                f"is {asked}, more than turnleaf.max_requests_in_flight, which is "
                f"{self.max_requests_in_flight}",
            )
        if in_flight + asked > self.max_requests_in_flight:
            raise self._busy(f"{in_flight} requests")

    def check_turns(self, taken: int, asked: int) -> None:
        """So many turns more. taken: those that are recorded or under way."""
        if self.max_turns is None or taken + asked <= self.max_turns:
            return
        if taken < self.max_turns:
            raise bad_request(
                "n",
                f"is {asked}, but this rollout has {self.max_turns - taken} of its "
                f"{self.max_turns} turns left (turnleaf.max_turns)",
            )
        raise _used_up(f"{self.max_turns} turns", "turnleaf.max_turns")

    def tokens_left(self, sampled: int, *, choices: int = 1) -> int | None:
        """How many tokens each of so many replies may have, at least one; None for any number."""
        if self.max_rollout_tokens is None:
            return None
        if sampled >= self.max_rollout_tokens:
            raise _used_up(
                f"{self.max_rollout_tokens} sampled tokens", "turnleaf.max_rollout_tokens"
            )
        return max((self.max_rollout_tokens - sampled) // choices, 1)

    def _busy(self, what: str) -> RequestError:
        return RequestError(
            429,
            f"this rollout has {what} in flight, and turnleaf.max_requests_in_flight is "
            f"{self.max_requests_in_flight}: wait until one is answered",
            code="rate_limit_exceeded",
            retry_after=RETRY_AFTER,
        )


def _used_up(limit: str, setting: str) -> RequestError:
    return RequestError(
        400,
        f"this rollout has used up its {limit} ({setting}): end it, no further model call is "
        "answered",
        code="rollout_limit_exceeded",
    )
