"""What of a dataset can be seen to be wrong before slime starts."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from turnleaf.adapters.slime._check_files import regular_file
from turnleaf.adapters.slime._findings import Finding
from turnleaf.core import ContractError, PayloadError, checked_payload, excerpt

__all__ = ["Rows", "check_rows"]

SHOWN = 10
"""How many faults are described; rows with others are counted."""

_SLICE = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]")
MAX_LINE = 64 * 1024 * 1024
"""Characters of a line."""

_RANGES = 5
_EXCERPT = 100


@attrs.define
class Lines:
    """Numbers of lines, as ranges."""

    ranges: list[tuple[int, int]] = attrs.Factory(list)
    count: int = 0

    def add(self, number: int) -> None:
        """One more line, behind all others."""
        self.count += 1
        if self.ranges and self.ranges[-1][1] == number - 1:
            self.ranges[-1] = self.ranges[-1][0], number
        else:
            self.ranges.append((number, number))

    def __str__(self) -> str:
        told = [f"{first}" if first == last else f"{first}–{last}" for first, last in self.ranges]
        shown = ", ".join(told[:_RANGES])
        more = sum(last - first + 1 for first, last in self.ranges[_RANGES:])
        also = f" and {more:,} more" if more else ""
        return f"{'line' if self.count == 1 else 'lines'} {shown}{also}"


@attrs.define
class Rows:
    """What the rows of a file hold.

    wrong: the number of rows that cannot be run. faults: each kind of fault, with its lines; at
    most SHOWN. without_prompt: the rows without `prompt`. odd_rm_type: those whose `rm_type` is no
    text. first, first_line: the first payload that an agent can be given, and its line; None if
    there is none.
    """

    total: int = 0
    wrong: int = 0
    faults: dict[str, Lines] = attrs.Factory(dict)
    without_prompt: Lines = attrs.Factory(Lines)
    odd_rm_type: Lines = attrs.Factory(Lines)
    first: dict[str, Any] | None = None
    first_line: int | None = None

    def findings(self) -> list[Finding]:
        """What is to be said of them."""
        if not self.total:
            return [Finding("rows", "bad", "the file holds no row, or its slice none")]
        if self.wrong:
            said = "is wrong" if self.wrong == 1 else "are wrong"
            found = [Finding("rows", "bad", f"{self.wrong:,} of {_rows(self.total)} {said}")]
            found += [Finding("rows", "bad", f"{at}: {why}") for why, at in self.faults.items()]
            more = self.wrong - sum(lines.count for lines in self.faults.values())
            if more:
                found.append(Finding("rows", "bad", f"… and {_rows(more)} with other faults"))
        else:
            each = "with a payload" if self.total == 1 else "each with a payload"
            found = [Finding("rows", "good", f"{_rows(self.total)}, {each}")]
        if self.without_prompt.count:
            found.append(
                Finding(
                    "rows",
                    "warning",
                    f"{self.without_prompt}: no `prompt`, as slime's --input-key prompt asks for",
                    "add it, or name another key of the rows with slime's --input-key; the agent "
                    "never sees it",
                )
            )
        if self.odd_rm_type.count:
            found.append(
                Finding(
                    "rows",
                    "warning",
                    f"{self.odd_rm_type}: `rm_type` of `metadata` is no text, at which slime's "
                    "reward hub stops the run once it is asked",
                    'write the name of a reward model such as "math", or leave `rm_type` out',
                )
            )
        return found

    def _note(self, number: int, fault: str) -> None:
        self.wrong += 1
        if fault in self.faults or len(self.faults) < SHOWN:
            self.faults.setdefault(fault, Lines()).add(number)


def check_rows(path: Path) -> Rows:
    """Look at every row of a JSONL file, or at those of a slice such as `rows.jsonl@[0:100]`.

    Raises ContractError for a file of another kind, one that cannot be read, and a slice that slime
    does not take.
    """
    path, start, stop = _sliced(str(path))
    if path.suffix == ".parquet":
        raise ContractError(
            f"{path}: slime reads parquet, this check only JSONL; write some of its rows as JSONL "
            "and check those"
        )
    if path.suffix != ".jsonl":
        raise ContractError(f"{path}: slime takes .jsonl and .parquet files only; rename the file")
    with regular_file(path, where=f"{path}") as file:
        # Read as slime does, for which a carriage return alone ends a line, too.
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape")
        return _checked(_numbered(text, path), start, stop)


def _numbered(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    while line := text.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ContractError(
                f"{path}, line {number}: has more than {MAX_LINE:,} characters; is that the right "
                "file?"
            )
        yield number, line


def _sliced(text: str) -> tuple[Path, int, int | None]:
    found = _SLICE.fullmatch(text)
    if found is None:
        return Path(text), 0, None
    name, start, stop = found.groups()
    if "-" in start + stop:
        raise ContractError(
            f"{text}: slime takes no negative numbers in a slice; count rows from 0, as in "
            f"{name}@[0:100]"
        )
    return Path(name), int(start or 0), int(stop) if stop else None


class _LeftOutError(PayloadError):
    """slime goes on without the row, and does not count it in a slice."""


def _checked(lines: Iterator[tuple[int, str]], start: int, stop: int | None) -> Rows:
    rows, taken = Rows(), 0
    for number, line in lines:
        if stop is not None and taken >= stop:
            break
        if not line.strip():
            continue
        wanted = taken >= start
        taken += 1
        try:
            row = _object(line)
            if not wanted:
                continue
            payload = _payload(row)
        except PayloadError as error:
            taken -= isinstance(error, _LeftOutError)
            if wanted:
                rows.total += 1
                rows._note(number, str(error))
            continue
        rows.total += 1
        if rows.first is None:
            rows.first, rows.first_line = payload, number
        if row.get("prompt") is None:
            rows.without_prompt.add(number)
        if not isinstance(row["metadata"].get("rm_type") or "", str):
            rows.odd_rm_type.add(number)
    return rows


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line.encode("utf-8", "surrogateescape").decode("utf-8").strip())
    except UnicodeDecodeError as error:
        raise PayloadError(f"is not UTF-8 text ({error.reason}); slime cannot read it") from None
    except json.JSONDecodeError as error:
        raise _LeftOutError(
            f"is not JSON ({error.msg}, column {error.colno}); slime prints an error and goes on "
            "without the row"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"is not JSON that slime can read ({error})") from None
    if not isinstance(row, dict):
        raise PayloadError(f"is {excerpt(row, length=_EXCERPT)}, not a JSON object")
    return row


def _payload(row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise PayloadError(
            f"`metadata` is {excerpt(metadata, length=_EXCERPT)}, not a JSON object that holds the "
            "payload"
        )
    if "turnleaf" in metadata:
        raise PayloadError(
            "`metadata` already has `turnleaf`, under which turnleaf says what became of a "
            "rollout; rename that field of the row"
        )
    if "payload" not in metadata and "payload" in row:
        raise PayloadError("`payload` stands beside `metadata`; it belongs inside of it")
    if "payload" not in metadata and metadata:
        names = ", ".join(metadata)
        raise PayloadError(
            f"`metadata` has no `payload` (it has {names:.{_EXCERPT}}); what the agent is to be "
            "given belongs into metadata.payload"
        )
    try:
        return checked_payload(metadata.get("payload"), name="row")
    except PayloadError as error:
        raise PayloadError(str(error).removeprefix("row: ")) from None


def _rows(number: int) -> str:
    return f"{number:,} {'row' if number == 1 else 'rows'}"
