"""The tree of a rollout's turns, and the leaves that are trained."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import numpy.typing as npt

from turnleaf.core._errors import TrajectoryError
from turnleaf.core._serialisation import turns_from_json, turns_to_json
from turnleaf.core._turn import Exclusion, Logprobs, ReplayArray, TokenIds, Turn

__all__ = ["Leaf", "Place", "Trajectory"]

LossMask = npt.NDArray[np.bool_]

_MOST_PATHS = 8
"""For so many paths that take turns, it is remembered what they consist of."""


class Place(NamedTuple):
    """Where a full prompt attaches to a trajectory.

    parent: id of the turn whose path shares the longest token prefix with the prompt, None when
    nothing is shared. keep: how many tokens are shared.
    """

    parent: str | None
    keep: int


@attrs.frozen(eq=False)
class Leaf:
    """One token sequence with a loss mask: a path from the root to a turn that nobody extends.

    tokens: int32[n]. loss_mask: bool[n], True where a token is trained in this leaf.
    logprobs: float32[n], the sampled log-probability where loss_mask is True, else 0.
    prompt_length: how many tokens precede the first trained one.
    turns: every turn that contributes tokens, root first. trained_turns: those whose output is
        trained here (the others are context: trained in an earlier leaf, excluded, or cut).
    routed_experts: [n - 1, layers, top_k], or None unless every turn recorded them.
    top_p_ids, top_p_offsets: kept ids of the trained tokens, flat, and int64[n + 1] offsets; a
        token that is not trained has an empty span. None unless every trained turn recorded them.
    """

    tokens: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    prompt_length: int
    turns: tuple[Turn, ...]
    trained_turns: tuple[Turn, ...]
    routed_experts: ReplayArray | None = None
    top_p_ids: ReplayArray | None = None
    top_p_offsets: npt.NDArray[np.int64] | None = None


class _Piece(NamedTuple):
    """The tokens of a path that `turn` contributes: positions [turn.keep, upto)."""

    turn: Turn
    upto: int

    @property
    def whole(self) -> bool:
        return self.upto == self.turn.end

    def arrays(self) -> Iterator[TokenIds]:
        own = self.upto - self.turn.keep
        yield self.turn.prompt[:own]
        yield self.turn.output[: max(own - len(self.turn.prompt), 0)]


class Trajectory:
    """The tree of a rollout's turns.

    Turns are added parents first, in any order of their indices. Memory follows the tokens that
    are new or rendered anew, never turns × history. Not thread-safe.

    refused: how many requests led to no turn, by the code of the error that they were answered.
    """

    def __init__(
        self, turns: Iterable[Turn] = (), *, refused: Mapping[str, int] | None = None
    ) -> None:
        self._refused = Counter(refused or {})
        self._turns: dict[str, Turn] = {}
        self._indices: set[int] = set()
        # Length of each turn's path, number in the order of their addition, and id.
        self._ends: list[tuple[int, int, str]] = []
        # What a turn's path consists of: of those that were last asked for, or have extended one.
        self._paths: dict[str, list[TokenIds]] = {}
        self._experts: tuple[int, ...] | None = None
        for turn in turns:
            self.add(turn)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn, in the order of their indices."""
        return tuple(sorted(self._turns.values(), key=lambda turn: turn.index))

    @property
    def refused(self) -> Mapping[str, int]:
        """How many requests were refused, by the error's code (docs/gateway.md lists them)."""
        return dict(self._refused)

    def refuse(self, code: str) -> None:
        """Count a request that was refused with an error of that code."""
        self._refused[code] += 1

    def turn(self, turn_id: str) -> Turn:
        """The turn with that id; raises TrajectoryError when there is none."""
        try:
            return self._turns[turn_id]
        except KeyError:
            raise TrajectoryError(f"the trajectory has no turn {turn_id!r}") from None

    def __len__(self) -> int:
        return len(self._turns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return self.turns == other.turns and self.refused == other.refused

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<Trajectory of {len(self)} turns>"

    def add(self, turn: Turn) -> None:
        """Add a turn whose parent is already there.

        Raises TrajectoryError when its id or index is taken, its parent is unknown, it keeps
        more tokens than its parent's path has, or its routed experts have other layers or
        another top_k than those before.
        """
        if turn.id in self._turns:
            raise TrajectoryError(f"turn {turn.id!r} is already in the trajectory")
        if turn.index in self._indices:
            raise TrajectoryError(f"turn {turn.id!r}: index {turn.index} is already taken")
        if turn.parent is not None:
            parent = self._turns.get(turn.parent)
            if parent is None:
                raise TrajectoryError(f"turn {turn.id!r}: parent {turn.parent!r} is unknown")
            if turn.keep > parent.end:
                raise TrajectoryError(
                    f"turn {turn.id!r}: keeps {turn.keep} tokens of {parent.end} of its parent's"
                )
        experts = _experts(turn)
        if experts is not None:
            shape = experts.shape[1:]
            if self._experts not in (None, shape):
                raise TrajectoryError(
                    f"turn {turn.id!r}: routed_experts has (layers, top_k) {shape}, but those "
                    f"of earlier turns have {self._experts}"
                )
            self._experts = shape
        if turn.parent is not None and turn.keep == self._turns[turn.parent].end:
            arrays = self._paths.pop(turn.parent, None)
            if arrays is not None:
                arrays += turn.prompt, turn.output
                self._paths[turn.id] = arrays
        self._turns[turn.id] = turn
        self._indices.add(turn.index)
        insort(self._ends, (turn.end, len(self._ends), turn.id))

    def exclude(self, turn_id: str, reason: Exclusion | None) -> None:
        """Set why a turn is not trained; None trains it. Raises TrajectoryError if unknown."""
        self._turns[turn_id] = self.turn(turn_id).excluded_for(reason)

    def locate(
        self, prompt: TokenIds, *, along: str | None = None, with_experts: bool = False
    ) -> Place:
        """Find the path that shares the longest token prefix with a full prompt.

        Ties go to a turn whose path is shared whole, then to one that was delivered, then to the
        latest one added. Costs one comparison of the prompt per branch that it follows, plus a
        step per turn.

        along: id of a turn that the prompt is known to continue: it begins with all tokens of that
        turn's path, which are not compared. Turns with shorter paths then cost nothing, and a
        branch beside it one comparison of a turn's own tokens.
        with_experts: only turns that recorded routed experts count. A leaf has experts only if
        all of its turns do, and a call that was aborted before its first token recorded none.
        """

        def may_be_parent(turn: Turn, matched: int) -> bool:
            # A turn that adds nothing to the match is no parent: its own parent is one.
            return matched > turn.keep and (not with_experts or _experts(turn) is not None)

        shared: dict[str | None, int] = {None: 0}
        shortest = 0
        if along is not None:
            known = self.turn(along)
            shared[along] = known.end
            if may_be_parent(known, known.end):
                shortest = known.end
        candidates = self._ends[bisect_left(self._ends, (shortest,)) :]
        reaching = {along: True}
        best, best_rank = Place(None, 0), (0, False, False, 0)
        for _, order, turn_id in candidates:
            turn = self._turns[turn_id]
            if shortest and not self._may_share(shortest, turn, prompt, reaching):
                continue
            matched = self._match(turn, prompt, shared)
            rank = (matched, matched == turn.end, turn.excluded != "undelivered", order)
            if may_be_parent(turn, matched) and rank > best_rank:
                best, best_rank = Place(turn.id, matched), rank
        return best

    def tokens_through(self, turn_id: str) -> TokenIds:
        """int32[n]: the turn's full prompt and its output."""
        arrays = self._paths.pop(turn_id, None) or _arrays(self._path(turn_id))
        self._paths[turn_id] = arrays
        if len(self._paths) > _MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        return _join(arrays, np.int32)

    def leaves(self) -> list[Leaf]:
        """The token sequences to train, in the order of their last turns' indices.

        Every output token of a turn that is not excluded is trained in exactly one leaf: the
        first that holds the turn whole. A leaf with nothing left to train is not emitted. The
        last one is the rollout's *final* leaf.
        """
        trained: set[str] = set()
        leaves = []
        for turn in self._last_turns():
            leaf = self._leaf(turn, trained)
            if leaf is not None:
                leaves.append(leaf)
        return leaves

    def to_json(self) -> bytes:
        """JSON with a version; arrays as base64 of their little-endian bytes."""
        return turns_to_json(self._turns.values(), self._refused)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Read what `to_json` wrote; raises TrajectoryError when it is anything else."""
        turns, refused = turns_from_json(data)
        return cls(turns, refused=refused)

    def _match(self, turn: Turn, prompt: TokenIds, shared: dict[str | None, int]) -> int:
        """How many tokens of the turn's path the prompt shares.

        shared: the same of the turns for which it is known; those that it takes are added.
        """
        unknown = []
        at: Turn | None = turn
        while at is not None and at.id not in shared:
            unknown.append(at)
            at = None if at.parent is None else self._turns[at.parent]
        for at in reversed(unknown):
            matched = min(at.keep, shared[at.parent])
            shared[at.id] = _shared(at, prompt) if matched == at.keep else matched
        return shared[turn.id]

    def _may_share(
        self, count: int, turn: Turn, prompt: TokenIds, known: dict[str | None, bool]
    ) -> bool:
        """Whether the prompt may share that many tokens of the turn's path.

        Of these, only the own ones of the turn that adds the last are compared, which keeps a
        search from going through all of another branch. known: of which turns that was found out;
        those that it takes are added.
        """
        beyond = []
        while turn.id not in known and turn.parent is not None and turn.keep >= count:
            beyond.append(turn.id)
            turn = self._turns[turn.parent]
        if turn.id not in known:
            known[turn.id] = _shared(turn, prompt) >= count
        known |= dict.fromkeys(beyond, known[turn.id])
        return known[turn.id]

    def _path(self, turn_id: str) -> list[_Piece]:
        pieces = []
        turn, upto = self.turn(turn_id), self.turn(turn_id).end
        while True:
            if upto > turn.keep:
                pieces.append(_Piece(turn, upto))
            if turn.parent is None:
                return pieces[::-1]
            turn, upto = self._turns[turn.parent], min(upto, turn.keep)

    def _last_turns(self) -> list[Turn]:
        """Turns to train that no other one's path holds whole."""
        # How many tokens of a turn's path the turns to train below it keep, at most.
        kept: dict[str, int] = {}
        for turn in reversed(self._turns.values()):
            if turn.parent is not None:
                below = turn.keep if turn.excluded is None else min(turn.keep, kept.get(turn.id, 0))
                kept[turn.parent] = max(kept.get(turn.parent, 0), below)
        last = [t for t in self._turns.values() if t.excluded is None and kept.get(t.id, 0) < t.end]
        return sorted(last, key=lambda turn: turn.index)

    def _leaf(self, last: Turn, trained: set[str]) -> Leaf | None:
        path = self._path(last.id)
        here = [
            piece.turn
            for piece in path
            if piece.whole and piece.turn.excluded is None and piece.turn.id not in trained
        ]
        trained.update(turn.id for turn in here)
        here = [turn for turn in here if len(turn.output)]
        if not here:
            return None
        loss_mask = np.zeros(last.end, dtype=np.bool_)
        logprobs = np.zeros(last.end, dtype=np.float32)
        for turn in here:
            sampled = slice(turn.end - len(turn.output), turn.end)
            loss_mask[sampled] = True
            logprobs[sampled] = turn.logprobs
        top_p_ids, top_p_offsets = _top_p(here, last.end)
        return Leaf(
            tokens=_join(_arrays(path), np.int32),
            loss_mask=loss_mask,
            logprobs=logprobs,
            prompt_length=here[0].end - len(here[0].output),
            turns=tuple(piece.turn for piece in path),
            trained_turns=tuple(here),
            routed_experts=_routed_experts(path),
            top_p_ids=top_p_ids,
            top_p_offsets=top_p_offsets,
        )


def _arrays(path: Iterable[_Piece]) -> list[TokenIds]:
    """The tokens of a path, in pieces."""
    return [array for piece in path for array in piece.arrays()]


def _join(arrays: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _shared(turn: Turn, prompt: TokenIds) -> int:
    """How many tokens of the turn's path the prompt shares, given that it shares the kept ones."""
    at = turn.keep
    for own in (turn.prompt, turn.output):
        theirs = prompt[at : at + len(own)]
        same = own[: len(theirs)] == theirs
        if not same.all():
            return at + int(same.argmin())
        at += len(theirs)
        if len(theirs) < len(own):
            return at
    return at


def _experts(turn: Turn) -> ReplayArray | None:
    return None if turn.replay is None else turn.replay.routed_experts


def _routed_experts(path: list[_Piece]) -> ReplayArray | None:
    rows = []
    for piece in path:
        experts = _experts(piece.turn)
        if experts is None:
            return None
        # The last token that a turn contributes is routed in the call that follows it.
        rows.append(experts[: piece.upto - 1 - max(piece.turn.keep - 1, 0)])
    return _join(rows, np.uint8)


def _top_p(
    trained: list[Turn], length: int
) -> tuple[ReplayArray | None, npt.NDArray[np.int64] | None]:
    kept = np.zeros(length, dtype=np.int64)
    ids = []
    for turn in trained:
        replay = turn.replay
        if replay is None or replay.top_p_ids is None or replay.top_p_offsets is None:
            return None, None
        kept[turn.end - len(turn.output) : turn.end] = np.diff(
            replay.top_p_offsets.astype(np.int64)
        )
        ids.append(replay.top_p_ids)
    return _join(ids, np.uint8), np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])
