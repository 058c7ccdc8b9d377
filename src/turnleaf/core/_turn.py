"""One model call, as exact tokens."""

import copy
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import attrs
import numpy as np
import numpy.typing as npt

from turnleaf.core._errors import TrajectoryError

__all__ = [
    "Exclusion",
    "FinishReason",
    "Logprobs",
    "Replay",
    "ReplayArray",
    "Speculation",
    "TokenIds",
    "Turn",
    "TurnTimings",
    "WeightSpan",
]

_LARGEST_ID = int(np.iinfo(np.int32).max)

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
ReplayArray = npt.NDArray[np.unsignedinteger[Any]]

FinishReason = Literal["stop", "length", "abort"]
"""Why the engine stopped: a stop token or string, a token limit, or an abort."""

Exclusion = Literal["undelivered", "aborted", "constrained", "untrained"]
"""Why a turn is not trained.

undelivered: the agent was gone before the last byte. aborted: the rollout ended it. constrained:
its probabilities were masked by a grammar. untrained: the agent asked for context only.
"""


def _numbers(values: npt.ArrayLike, kinds: str, requirement: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    # An empty list becomes an array of floats, whatever it should have held.
    if array.size and array.dtype.kind not in kinds:
        raise TrajectoryError(f"{requirement}, but came as {array.dtype}")
    return array


def _naturals(values: npt.ArrayLike, what: str, largest: int) -> npt.NDArray[Any]:
    requirement = f"{what} must be integers from 0 to {largest}"
    array = _numbers(values, "iu", requirement)
    if array.size and (int(array.min()) < 0 or int(array.max()) > largest):
        raise TrajectoryError(f"{requirement}, but reach from {array.min()} to {array.max()}")
    return array


def _frozen_copy(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    copy = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy


def _token_ids(values: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
    return _frozen_copy(_naturals(values, "token ids", _LARGEST_ID), np.int32)


def _logprobs(values: Sequence[float] | npt.NDArray[Any]) -> Logprobs:
    array = _numbers(values, "iuf", "log-probabilities must be numbers")
    with np.errstate(over="ignore"):  # becomes infinite, which the turn refuses by name
        return _frozen_copy(array, np.float32)


def _smallest_unsigned(values: npt.ArrayLike) -> npt.NDArray[np.unsignedinteger[Any]]:
    array = _naturals(values, "replay data", np.iinfo(np.int64).max)
    return _frozen_copy(array, np.min_scalar_type(int(array.max()) if array.size else 0))


@attrs.frozen
class WeightSpan:
    """`count` consecutive output tokens sampled by the weights called `version`."""

    version: str
    count: int = attrs.field(validator=attrs.validators.ge(0))


def _spans(values: Iterable[WeightSpan]) -> tuple[WeightSpan, ...]:
    return tuple(values)


@attrs.frozen
class TurnTimings:
    """Where a turn's time went; seconds.

    started: Unix time at which the request was accepted.
    engine: spent waiting for the engine. total: from acceptance until the turn was recorded.
    """

    started: float = 0.0
    engine: float = 0.0
    total: float = 0.0


@attrs.frozen
class Speculation:
    """How a turn's tokens were guessed by a draft model; counts from 0.

    accepted: draft tokens that the model agreed with. drafted: draft tokens that it was shown.
    verifications: forward passes that checked drafts, each of which also sampled a token itself.
    """

    accepted: int = attrs.field(validator=attrs.validators.ge(0))
    drafted: int = attrs.field(validator=attrs.validators.ge(0))
    verifications: int = attrs.field(validator=attrs.validators.ge(0))


@attrs.frozen(eq=False)
class Replay:
    """What a trainer needs to repeat the sampler's discrete choices; stored beyond the parent only.

    Integers are held in the smallest unsigned type that fits.

    routed_experts: [rows, layers, top_k] or None. Row i holds the experts chosen at position
        `max(keep - 1, 0) + i` of the path, so that rows end before the last sampled token, at
        which nothing was routed yet: rows = end - 1 - max(keep - 1, 0).
    top_p_ids, top_p_offsets: the token ids that top-p kept at each output token, flat, and where
        each token's ids begin: int64[n + 1], from 0 to len(top_p_ids). Both or neither.
    """

    routed_experts: ReplayArray | None = attrs.field(
        default=None, converter=attrs.converters.optional(_smallest_unsigned)
    )
    top_p_ids: ReplayArray | None = attrs.field(
        default=None, converter=attrs.converters.optional(_smallest_unsigned)
    )
    top_p_offsets: ReplayArray | None = attrs.field(
        default=None, converter=attrs.converters.optional(_smallest_unsigned)
    )

    def problem(self, *, keep: int, end: int, sampled: int) -> str | None:
        """What does not fit a turn with that many kept, total and sampled tokens, or None."""
        experts = self.routed_experts
        rows = max(end - 1 - max(keep - 1, 0), 0)
        if experts is not None and (experts.ndim != 3 or len(experts) != rows):
            return f"routed_experts has shape {experts.shape}, but needs ({rows}, layers, top_k)"
        ids, offsets = self.top_p_ids, self.top_p_offsets
        if (ids is None) != (offsets is None):
            return "top_p_ids and top_p_offsets come together"
        if ids is not None and offsets is not None:
            if ids.ndim != 1:
                return f"top_p_ids has {ids.ndim} dimensions instead of one"
            if offsets.shape != (sampled + 1,):
                return f"top_p_offsets has shape {offsets.shape}, but needs ({sampled + 1},)"
            widened = offsets.astype(np.int64)
            if widened[0] != 0 or widened[-1] != len(ids) or (np.diff(widened) < 0).any():
                return "top_p_offsets do not run from 0 to the number of top_p_ids"
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Replay):
            return NotImplemented
        return _fields_equal(self, other)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


def _fields_equal(one: attrs.AttrsInstance, other: attrs.AttrsInstance) -> bool:
    pairs = (
        (getattr(one, field.name), getattr(other, field.name)) for field in attrs.fields(type(one))
    )
    return all(
        np.array_equal(mine, theirs)
        if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray)
        else bool(mine == theirs)
        for mine, theirs in pairs
    )


@attrs.frozen(eq=False)
class Turn:
    """One model call: what followed the kept tokens, what was sampled, and how likely it was.

    The full prompt is the first `keep` tokens of the parent's path, then `prompt`. Arrays are
    copied and made read-only.

    id: the completion id that the agent sees; unique in its trajectory.
    index: assigned when the request starts, so turns answered out of order keep their order.
    parent: id of the turn whose path shares the longest token prefix with the full prompt; None
        for a turn that shares nothing.
    keep: how many tokens of the parent's path are kept; 0 without a parent.
    prompt: int32[p], the prompt tokens after the kept ones.
    output: int32[n], the sampled tokens, as sampled.
    logprobs: float32[n], natural log-probability of each output token under the sampling
        temperature.
    weight_versions: which weights sampled which output tokens; counts sum to n.
    cached_tokens: prompt tokens that the engine took from its prefix cache.
    replay: the sampler's discrete choices, where the trainer replays them.
    speculation: None when no draft model took part, or the engine does not say.
    excluded: None, or why the turn is not trained.

    Raises TrajectoryError when the fields contradict each other.
    """

    id: str
    index: int = attrs.field(converter=operator.index)
    parent: str | None
    keep: int = attrs.field(converter=operator.index)
    prompt: TokenIds = attrs.field(converter=_token_ids)
    output: TokenIds = attrs.field(converter=_token_ids)
    logprobs: Logprobs = attrs.field(converter=_logprobs)
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...] = attrs.field(default=(), converter=_spans)
    cached_tokens: int = attrs.field(default=0, converter=operator.index)
    timings: TurnTimings = TurnTimings()
    replay: Replay | None = None
    speculation: Speculation | None = None
    excluded: Exclusion | None = None

    def __attrs_post_init__(self) -> None:
        def refuse(reason: str) -> TrajectoryError:
            return TrajectoryError(f"turn {self.id!r}: {reason}")

        if self.index < 0:
            raise refuse(f"index is {self.index}, but counts from 0")
        if self.keep < 0 or (self.parent is None and self.keep != 0):
            raise refuse(f"keep is {self.keep}, which its parent {self.parent!r} cannot have")
        for name in ("prompt", "output", "logprobs"):
            if getattr(self, name).ndim != 1:
                raise refuse(f"{name} has {getattr(self, name).ndim} dimensions instead of one")
        if len(self.output) != len(self.logprobs):
            raise refuse(
                f"{len(self.output)} output tokens but {len(self.logprobs)} log-probabilities"
            )
        if not np.isfinite(self.logprobs).all():
            raise refuse("a log-probability is not finite")
        if self.finish_reason not in get_args(FinishReason):
            raise refuse(
                f"finish_reason {self.finish_reason!r} is not one of {get_args(FinishReason)}"
            )
        self._check_exclusion(self.excluded)
        if self.weight_versions:
            counted = sum(span.count for span in self.weight_versions)
            if counted != len(self.output):
                raise refuse(
                    f"weight_versions count {counted} tokens, but {len(self.output)} were sampled"
                )

        if self.replay is not None:
            problem = self.replay.problem(keep=self.keep, end=self.end, sampled=len(self.output))
            if problem is not None:
                raise refuse(problem)

    def _check_exclusion(self, reason: Exclusion | None) -> None:
        if reason is not None and reason not in get_args(Exclusion):
            raise TrajectoryError(
                f"turn {self.id!r}: excluded {reason!r} is not one of {get_args(Exclusion)}"
            )

    def excluded_for(self, reason: Exclusion | None) -> "Turn":
        """The same turn with another reason not to be trained; None trains it.

        It shares the arrays, and costs the same however long they are. Raises TrajectoryError for
        a reason that is none.
        """
        self._check_exclusion(reason)
        twin = copy.copy(self)
        object.__setattr__(twin, "excluded", reason)  # it is nobody else's yet
        return twin

    @property
    def end(self) -> int:
        """Length of the turn's whole path: kept tokens, prompt and output."""
        return self.keep + len(self.prompt) + len(self.output)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        return _fields_equal(self, other)

    def __hash__(self) -> int:
        return hash(self.id)
