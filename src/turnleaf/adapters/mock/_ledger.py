"""What an engine sampled, call by call, and whether all of it is accounted for."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt
import orjson

from turnleaf.core import FinishReason, Speculation, TokenIds, WeightSpan

__all__ = ["Ledger", "LedgerEntry", "turn_of"]


def _int32(values: Any) -> TokenIds:
    return np.asarray(values, dtype=np.int32)


def _float64(values: Any) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _spans(values: Iterable[WeightSpan | dict[str, Any]]) -> tuple[WeightSpan, ...]:
    return tuple(
        value if isinstance(value, WeightSpan) else WeightSpan(**value) for value in values
    )


def _speculation(value: Speculation | dict[str, int] | None) -> Speculation | None:
    return Speculation(**value) if isinstance(value, dict) else value


def turn_of(rid: str) -> str:
    """The id of the turn that a call was made for: its rid is `<turn id>.<part>.<attempt>`."""
    turn_id, *numbers = rid.rsplit(".", 2)
    return turn_id if len(numbers) == 2 and all(map(str.isdecimal, numbers)) else rid


@attrs.frozen(eq=False)
class LedgerEntry:
    """One engine call that sampled something.

    rid: of the attempt. turn_id: the rid without the attempt. input_ids: int32[p], the prompt as
    it arrived. output_ids: int32[n], n > 0. logprobs: float64[n], as they went out.
    weight_versions: which weights sampled which of them; counts sum to n. completion_tokens: how
    many output tokens the reply claimed; n, unless a script lied. answered: whether an answer left
    the engine. told: of a streamed call, how many output tokens its events held but the last one.
    spoiled: whether a script falsified it. speculation: the counts that went out.
    top_p_ids: those kept at each output token, and routed_experts: int32[p + n - 1, layers, top_k],
    of every position, whichever of them went out; None where they were not asked for, or the
    engine does not know them.
    """

    rid: str
    turn_id: str
    routing_key: str
    input_ids: TokenIds = attrs.field(converter=_int32)
    output_ids: TokenIds = attrs.field(converter=_int32)
    logprobs: npt.NDArray[np.float64] = attrs.field(converter=_float64)
    weight_versions: tuple[WeightSpan, ...] = attrs.field(converter=_spans)
    finish: FinishReason
    completion_tokens: int
    answered: bool
    told: int = 0
    spoiled: bool = False
    speculation: Speculation | None = attrs.field(default=None, converter=_speculation)
    top_p_ids: list[list[int]] | None = None
    routed_experts: npt.NDArray[np.int32] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_int32)
    )


class Ledger:
    """The engine calls that sampled something, in the order in which they ended.

    path: where each is also appended as one line of JSON, whole lines only. Iterating yields
    `LedgerEntry`s.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: list[LedgerEntry] = []

    @classmethod
    def read(cls, path: Path) -> Self:
        """What was written to `path`; raises ValueError or TypeError when that is no ledger."""
        ledger = cls()
        for line in path.read_bytes().splitlines():
            ledger._entries.append(LedgerEntry(**orjson.loads(line)))
        return ledger

    def append(self, entry: LedgerEntry) -> None:
        """Add a call."""
        self._entries.append(entry)
        if self._path is not None:
            fields = attrs.asdict(entry)
            line = orjson.dumps(
                fields, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
            )
            # Unbuffered, so that a line is there whole or not at all when the process is killed.
            with self._path.open("ab", buffering=0) as file:
                file.write(line)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
