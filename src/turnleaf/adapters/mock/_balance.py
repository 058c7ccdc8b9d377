"""The end-to-end check: sampled = trained exactly once + excluded, by reason, + lost."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from turnleaf.adapters.mock._ledger import LedgerEntry
from turnleaf.core import (
    Exclusion,
    Leaf,
    Replay,
    Speculation,
    TokenIds,
    Trajectory,
    Turn,
    WeightSpan,
)
from turnleaf.gateway.engines import PROBE

__all__ = ["LedgerReport", "Loss", "compare"]

Loss = Literal["probe", "unanswered", "aborted", "miscounted", "retried"]
"""Why what an engine sampled is in no turn.

probe: a starting worker asked for it, to see whether replay data comes; it is no rollout's.
unanswered: the call was cut before an answer left the engine; of a stream that broke off, what
nobody received. aborted: it was ended by an abort, and nobody waited for the part. miscounted: its
reply was refused, since what it says does not fit. retried: its reply did not arrive, and a later
attempt became the turn.
"""


@attrs.frozen
class LedgerReport:
    """How many token ids were sampled, and what became of them.

    problems: what does not add up, one sentence each; empty when the books balance.
    """

    sampled: int
    trained: int
    excluded: dict[Exclusion, int]
    lost: dict[Loss, int]
    problems: tuple[str, ...]

    def raise_for_problems(self) -> None:
        """Raise AssertionError with every problem, unless the books balance."""
        if self.problems:
            raise AssertionError("the ledger does not balance:\n" + "\n".join(self.problems))


def compare(entries: Iterable[LedgerEntry], trajectories: Iterable[Trajectory]) -> LedgerReport:
    """Account for every id that an engine sampled.

    What is trained is found by looking in the leaves for the prompt and output that the *engine*
    saw, position by position; of turns and leaves, only tokens, mask and log-probabilities count.
    Where the engine sent replay data, a leaf must hold just that for every token of such a call:
    the ids kept at its outputs, and the experts of the whole path up to its last token.
    """
    trajectories = list(trajectories)
    problems: list[str] = []
    calls: dict[str, list[LedgerEntry]] = defaultdict(list)
    sampled = 0
    for entry in entries:
        calls[entry.turn_id].append(entry)
        sampled += len(entry.output_ids)

    excluded: Counter[Exclusion] = Counter()
    lost: Counter[Loss] = Counter()
    trained = 0
    for trajectory in trajectories:
        to_train: list[LedgerEntry] = []
        left_out: list[LedgerEntry] = []
        for turn in trajectory.turns:
            attempts = calls.pop(turn.id, [])
            calls_of_turn = _recorded(turn, attempts)
            for entry in attempts:
                taken = [part for call, part in calls_of_turn if call is entry]
                unrecorded = len(entry.output_ids) - sum(len(part.output_ids) for part in taken)
                if unrecorded:
                    lost[_loss(entry) or "retried"] += unrecorded
            if not calls_of_turn:
                if len(turn.output):
                    problems.append(f"turn {turn.id}: no answered engine call sampled its output")
                continue
            recorded = _as_one([part for _, part in calls_of_turn])
            problems += _turn_problems(trajectory, turn, recorded)
            if turn.excluded is None:
                to_train.append(recorded)
            else:
                left_out.append(recorded)
                excluded[turn.excluded] += len(recorded.output_ids)
        leaves = trajectory.leaves()
        problems += _leaf_problems(leaves, to_train, left_out)
        trained += sum(int(np.count_nonzero(leaf.loss_mask)) for leaf in leaves)

    for turn_id, attempts in calls.items():
        for entry in attempts:
            reason = _loss(entry)
            if reason is None:
                problems.append(f"call {entry.rid}: answered, but turn {turn_id} was not recorded")
            else:
                lost[reason] += len(entry.output_ids)
    accounted = trained + excluded.total() + lost.total()
    if sampled != accounted:
        problems.append(
            f"{sampled} ids were sampled, but {trained} are trained, {excluded.total()} excluded "
            f"and {lost.total()} lost"
        )
    return LedgerReport(sampled, trained, dict(excluded), dict(lost), tuple(problems))


def _loss(entry: LedgerEntry) -> Loss | None:
    if entry.routing_key == PROBE:
        return "probe"
    if not entry.answered:
        return "unanswered"
    if entry.spoiled or entry.completion_tokens != len(entry.output_ids):
        return "miscounted"
    if entry.finish == "abort":
        return "aborted"
    return None


def _recorded(turn: Turn, attempts: list[LedgerEntry]) -> list[tuple[LedgerEntry, LedgerEntry]]:
    """The calls that the turn was recorded from, in their order: one, unless it was interrupted;
    and beside each what was recorded of it: all, or what a stream told before it broke off. One
    that the engine did answer may have broken on the way, if another call went on behind it.

    Found from the end: of the calls that could be trusted, the one whose output ends where the turn
    does, then the one that ends where that began. Of several, what the turn says, else the last.
    """
    usable = [(entry, entry) for entry in attempts if _loss(entry) in (None, "aborted")]
    if not len(turn.output):
        return [pair for pair in usable[-1:] if pair[0].finish != "abort"]
    found: list[tuple[LedgerEntry, LedgerEntry]] = []
    end, prompt_end = turn.end, turn.end - len(turn.output)
    while end > prompt_end:
        said = turn.output[: end - prompt_end]
        told = [entry for entry in attempts if not (entry.answered and end == turn.end)]
        begun = [(entry, part) for entry in told if (part := _told_until(entry, end))]
        here = [pair for pair in begun if _ends_with(said, pair[1])]
        here += [pair for pair in usable if _span(pair[0]).stop == end]
        if not here:
            break
        here.sort(key=lambda pair: _ends_with(said, pair[1]))
        found.insert(0, here[-1])
        end = _span(here[-1][1]).start
    return found or usable[-1:]


def _ends_with(said: TokenIds, entry: LedgerEntry) -> bool:
    return np.array_equal(said[-len(entry.output_ids) :], entry.output_ids)


def _told_until(entry: LedgerEntry, end: int) -> LedgerEntry | None:
    """What of a stream ends there, if it was told; as a call that was interrupted there."""
    count = end - _span(entry).start
    if not 0 < count <= entry.told:
        return None
    spans: list[WeightSpan] = []
    for span in entry.weight_versions:
        left = count - sum(earlier.count for earlier in spans)
        if left > 0:
            spans.append(attrs.evolve(span, count=min(span.count, left)))
    return attrs.evolve(
        entry,
        output_ids=entry.output_ids[:count],
        logprobs=entry.logprobs[:count],
        weight_versions=spans,
        finish="abort",
        completion_tokens=count,
        speculation=None,
        top_p_ids=None,
        routed_experts=None,
    )


def _as_one(entries: list[LedgerEntry]) -> LedgerEntry:
    """The calls of one turn as if the engine had not interrupted them."""
    first, last = entries[0], entries[-1]
    if first is last:
        return first
    kept = [entry.top_p_ids for entry in entries]
    return attrs.evolve(
        first,
        rid=last.rid,
        output_ids=np.concatenate([entry.output_ids for entry in entries]),
        logprobs=np.concatenate([entry.logprobs for entry in entries]),
        weight_versions=tuple(span for entry in entries for span in entry.weight_versions),
        finish=last.finish,
        completion_tokens=sum(entry.completion_tokens for entry in entries),
        speculation=_sum([entry.speculation for entry in entries]),
        top_p_ids=None if None in kept else [ids for some in kept for ids in some or ()],
        routed_experts=last.routed_experts,
    )


def _sum(counts: list[Speculation | None]) -> Speculation | None:
    known = [attrs.astuple(count) for count in counts if count is not None]
    return Speculation(*map(sum, zip(*known, strict=True))) if known else None


def _turn_problems(trajectory: Trajectory, turn: Turn, entry: LedgerEntry) -> Iterator[str]:
    path = trajectory.tokens_through(turn.id)
    for name, same in (
        ("prompt", np.array_equal(path[: len(path) - len(turn.output)], entry.input_ids)),
        ("output", np.array_equal(turn.output, entry.output_ids)),
        ("logprobs", np.array_equal(turn.logprobs, entry.logprobs.astype(np.float32))),
        ("finish_reason", _ends_as(turn, entry)),
        ("weight_versions", turn.weight_versions == entry.weight_versions),
        ("speculation", turn.speculation == entry.speculation),
        ("replay data", turn.replay == _replay(entry, turn.keep)),
    ):
        if not same:
            yield f"turn {turn.id}: not the {name} of call {entry.rid}"


def _ends_as(turn: Turn, entry: LedgerEntry) -> bool:
    """An interruption after the last token that was wanted is the limit's end."""
    return turn.finish_reason == entry.finish or (entry.finish, turn.finish_reason) == (
        "abort",
        "length",
    )


def _leaf_problems(
    leaves: list[Leaf], to_train: list[LedgerEntry], left_out: list[LedgerEntry]
) -> Iterator[str]:
    unclaimed = [leaf.loss_mask.copy() for leaf in leaves]
    # Longest first: of two outputs to one prompt, one may be the beginning of the other.
    for entry in sorted(to_train, key=lambda entry: -len(entry.output_ids)):
        for leaf, mask in zip(leaves, unclaimed, strict=True):
            if _trains(leaf, mask, entry):
                mask[_span(entry)] = False
                yield from _replay_problems(leaf, entry)
                break
        else:
            yield f"call {entry.rid}: no leaf trains its output in the context it was sampled in"
    for number, (leaf, mask) in enumerate(zip(leaves, unclaimed, strict=True)):
        if leaf.top_p_offsets is not None and np.diff(leaf.top_p_offsets)[~leaf.loss_mask].any():
            yield f"leaf {number}: has kept ids at tokens that are not trained"
        if not mask.any():
            continue
        culprits = [
            f"call {entry.rid} is {what}"
            for what, group in (("trained again", to_train), ("excluded", left_out))
            for entry in group
            if _trains(leaf, mask, entry)
        ]
        yield (
            f"leaf {number}: {np.count_nonzero(mask)} trained positions, the first at "
            f"{np.flatnonzero(mask)[0]}, that nobody sampled there ({', '.join(culprits) or '?'})"
        )


def _replay(entry: LedgerEntry, keep: int) -> Replay | None:
    """What a turn records of the call that keeps so many tokens of its parent's path."""
    experts, kept = entry.routed_experts, entry.top_p_ids
    if experts is None and kept is None:
        return None
    return Replay(
        routed_experts=None if experts is None else experts[max(keep - 1, 0) :],
        top_p_ids=None if kept is None else [i for ids in kept for i in ids],
        top_p_offsets=None if kept is None else np.cumsum([0, *map(len, kept)]),
    )


def _replay_problems(leaf: Leaf, entry: LedgerEntry) -> Iterator[str]:
    experts = leaf.routed_experts
    rows = None if experts is None else experts[: _span(entry).stop - 1]
    if not _same(rows, entry.routed_experts):
        yield f"call {entry.rid}: its leaf has other routed experts than the engine's"
    kept = None
    if leaf.top_p_ids is not None and leaf.top_p_offsets is not None:
        bounds = leaf.top_p_offsets[_span(entry).start : _span(entry).stop + 1].tolist()
        kept = [leaf.top_p_ids[begin:end].tolist() for begin, end in pairwise(bounds)]
    if kept != entry.top_p_ids:
        yield f"call {entry.rid}: its leaf has other top-p ids than the engine's"


def _same(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def _span(entry: LedgerEntry) -> slice:
    return slice(len(entry.input_ids), len(entry.input_ids) + len(entry.output_ids))


def _trains(leaf: Leaf, mask: npt.NDArray[np.bool_], entry: LedgerEntry) -> bool:
    """Whether the leaf trains the call's output right behind the call's own prompt."""
    span = _span(entry)
    return (
        span.stop <= len(leaf.tokens)
        and bool(mask[span].all())
        and np.array_equal(leaf.tokens[span], entry.output_ids)
        and np.array_equal(leaf.logprobs[span], entry.logprobs.astype(np.float32))
        and np.array_equal(leaf.tokens[: span.start], entry.input_ids)
    )
