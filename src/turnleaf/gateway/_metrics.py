"""What a worker counts, for Prometheus. No label holds a key, or anything that an agent chose."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import Response

from turnleaf.core import Exclusion, Trajectory, Turn
from turnleaf.gateway._branches import ForkReason

__all__ = ["Metrics"]

QUEUE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
ENGINE_BUCKETS = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
LAG_BUCKETS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3)
LEAF_BUCKETS = (1, 2, 3, 4, 6, 8, 16, 32, 64)


class Metrics:
    """The counts of one worker, in a registry of its own; docs/gateway.md says what each means."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "turnleaf_requests",
            "Requests on the agents' listener, by HTTP status and error code",
            ["status", "code"],
            registry=registry,
        )
        self._turns = Counter(
            "turnleaf_turns", "Turns of keys that ended", ["outcome"], registry=registry
        )
        tokens = Counter("turnleaf_tokens", "Tokens of recorded turns", ["kind"], registry=registry)
        self._prompt_tokens, self._cached_tokens, self._sampled_tokens = (
            tokens.labels(kind) for kind in ("prompt", "cached", "sampled")
        )
        self._forks = Counter(
            "turnleaf_forks", "Turns that began another leaf", ["reason"], registry=registry
        )
        self._retries_joined = Counter(
            "turnleaf_retries_joined",
            "Requests that were given the turn of an earlier one",
            registry=registry,
        )
        self._ignored = Counter(
            "turnleaf_ignored_fields",
            "Requests with a field that is a hint only, or the trainer's to choose",
            ["field"],
            registry=registry,
        )
        self._malformed = Counter(
            "turnleaf_malformed_tool_calls",
            "Sampled tool calls that could not be read and are text",
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "turnleaf_queue_seconds",
            "Seconds of a turn outside of the engine: rendering, and waiting for it",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self._engine_seconds = Histogram(
            "turnleaf_engine_seconds",
            "Seconds of a turn's engine call, interruptions included",
            buckets=ENGINE_BUCKETS,
            registry=registry,
        )
        self._leaves = Histogram(
            "turnleaf_rollout_leaves",
            "Leaves of keys that ended with a turn to train",
            buckets=LEAF_BUCKETS,
            registry=registry,
        )
        self._loop_lag = Histogram(
            "turnleaf_event_loop_lag_seconds",
            "Seconds that work which was ready had to wait for the event loop",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self._keys_open = Gauge(
            "turnleaf_keys_open", "Keys that agents can use now", registry=registry
        )
        self._in_flight = Gauge(
            "turnleaf_requests_in_flight", "Model calls under way now", registry=registry
        )
        # What there may be is there from the start, so that a first increase shows as one.
        for outcome in ("trained", *get_args(Exclusion)):
            self._turns.labels(outcome)
        for reason in get_args(ForkReason):
            self._forks.labels(reason)

    def watch(self, *, keys_open: Callable[[], int], in_flight: Callable[[], int]) -> None:
        """Have what holds now counted whenever somebody looks."""
        self._keys_open.set_function(keys_open)
        self._in_flight.set_function(in_flight)

    def answered(self, status: int | None, code: str) -> None:
        """A request was answered, or its client left before that: status None."""
        self._requests.labels("none" if status is None else str(status), code).inc()

    def recorded(self, turn: Turn) -> None:
        """A turn was sampled."""
        self._prompt_tokens.inc(turn.end - len(turn.output))
        self._cached_tokens.inc(turn.cached_tokens)
        self._sampled_tokens.inc(len(turn.output))
        self._engine_seconds.observe(turn.timings.engine)
        self._queue_seconds.observe(turn.timings.total - turn.timings.engine)

    def lagged(self, seconds: float) -> None:
        """The event loop kept work waiting for so long; see `watch_lag`."""
        self._loop_lag.observe(seconds)

    def forked(self, reason: ForkReason) -> None:
        """A turn began another leaf."""
        self._forks.labels(reason).inc()

    def joined(self) -> None:
        """A request was given the turn of an earlier one."""
        self._retries_joined.inc()

    def ignored(self, fields: Iterable[str]) -> None:
        """A request has fields, of those that the protocol knows, which are not used."""
        for field in fields:
            self._ignored.labels(field).inc()

    def malformed(self, calls: int) -> None:
        """So many tool calls could not be read."""
        self._malformed.inc(calls)

    def ended(self, trajectory: Trajectory, leaves: int) -> None:
        """A key has ended."""
        outcomes = Counts(turn.excluded or "trained" for turn in trajectory.turns)
        for outcome, count in outcomes.items():
            self._turns.labels(outcome).inc(count)
        if leaves:
            self._leaves.observe(leaves)

    def response(self) -> Response:
        """All of it, as Prometheus reads it."""
        return Response(
            generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )
