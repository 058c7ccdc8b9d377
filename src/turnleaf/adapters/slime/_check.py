"""What of a configuration and of a dataset can be seen to be wrong before slime starts."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from turnleaf.core import (
    ContractError,
    PayloadError,
    RolloutSession,
    Settings,
    checked_payload,
)
from turnleaf.sessions import session_factory

__all__ = ["Configuration", "Finding", "Rows", "check_configuration", "check_rows"]

Verdict = Literal["good", "warning", "bad"]

SHOWN = 10
"""How many wrong rows are described; the others are counted."""

_ARN = re.compile(
    r"arn:aws(-[^:]+)?:bedrock-agentcore:[a-z0-9-]+:[0-9]{12}:runtime/[a-zA-Z]\w*-[a-zA-Z0-9]+"
)
_ARN_EXAMPLE = (
    "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/my_agent-a1B2c3D4e5, as the "
    "deployment of the agent prints it"
)
_SLICE = re.compile(r"@\[-?\d*:-?\d*\]$")
_LIKENESS = 0.8
"""How alike two names are, from 0 to 1, for one to be taken for the other misspelt."""
_BACKEND_ARGUMENTS = ("backend", "agentcore_runtime_arn", "target", "url")
_EXCERPT = 100


@attrs.frozen
class Finding:
    """One thing that was looked at. remedy: what to do about it; empty where there is nothing."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


@attrs.frozen
class Configuration:
    """What a configuration says. settings, session: None where they are wrong."""

    findings: tuple[Finding, ...]
    settings: Settings | None
    session: Callable[[], RolloutSession] | None


@attrs.define
class Rows:
    """What a file of rows holds.

    wrong: the number of rows that cannot be run. examples: the line and the fault of the first of
    them. without_prompt: the number of rows without `prompt`. first: the first payload that an
    agent can be given, None if there is none.
    """

    total: int = 0
    wrong: int = 0
    examples: list[tuple[int, str]] = attrs.Factory(list)
    without_prompt: int = 0
    first: dict[str, Any] | None = None

    def findings(self) -> list[Finding]:
        """What is to be said of them."""
        if not self.total:
            return [Finding("rows", "bad", "the file holds no row")]
        if self.wrong:
            said = "is wrong" if self.wrong == 1 else "are wrong"
            found = [Finding("rows", "bad", f"{self.wrong:,} of {_rows(self.total)} {said}")]
            found += [Finding("rows", "bad", f"line {line}: {why}") for line, why in self.examples]
            if self.wrong > len(self.examples):
                more = self.wrong - len(self.examples)
                found.append(Finding("rows", "bad", f"… and {_rows(more)} more like these"))
        else:
            each = "with a payload" if self.total == 1 else "each with a payload"
            found = [Finding("rows", "good", f"{_rows(self.total)}, {each}")]
        if self.without_prompt:
            verb = "has" if self.without_prompt == 1 else "have"
            found.append(
                Finding(
                    "rows",
                    "warning",
                    f"{_rows(self.without_prompt)} {verb} no `prompt`, which slime reads through "
                    "--input-key prompt",
                    "add it, or name the key that they have with --input-key; the agent never "
                    "sees it",
                )
            )
        return found


def check_configuration(mapping: Mapping[Any, Any]) -> Configuration:
    """Look at a configuration as slime does, which sets every top-level key on its arguments.

    The session's class is imported and one session made, but never entered.
    """
    found = [finding for key in mapping if (finding := _key(key)) is not None]
    settings = session = None
    try:
        settings = Settings.from_mapping(
            {key: value for key, value in mapping.items() if isinstance(key, str)},
            ignore_unknown_top_level=True,
        )
    except ContractError as error:
        found.append(Finding("config", "bad", str(error)))
    else:
        arn = _runtime_arn(settings.rollout_session_backend)
        if arn is not None:
            found.append(arn)
        try:
            session = session_factory(settings.rollout_session_backend)
        except ContractError as error:
            found.append(Finding("config", "bad", str(error), _backend_remedy(settings)))
    if all(finding.verdict != "bad" for finding in found):
        found.insert(0, Finding("config", "good", "every setting is valid"))
    return Configuration(tuple(found), settings, session)


def check_rows(path: Path) -> Rows:
    """Look at every row of a JSONL file; a slice behind its name, as slime takes it, is left out.

    Raises ContractError for a file of another kind, and for one that cannot be read.
    """
    path = Path(_SLICE.sub("", str(path))).expanduser()
    if path.suffix == ".parquet":
        raise ContractError(
            f"{path}: slime reads parquet, this check only JSONL; write some of its rows as JSONL "
            "and check those"
        )
    if path.suffix != ".jsonl":
        raise ContractError(f"{path}: slime takes .jsonl and .parquet files only; rename the file")
    try:
        with path.open("rb") as lines:
            return _checked(lines)
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror}") from None


def _checked(lines: Iterable[bytes]) -> Rows:
    rows = Rows()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        rows.total += 1
        try:
            row = _object(line)
            payload = _payload(row)
        except PayloadError as error:
            rows.wrong += 1
            if len(rows.examples) < SHOWN:
                rows.examples.append((number, str(error)))
            continue
        if rows.first is None:
            rows.first = payload
        if row.get("prompt") is None:
            rows.without_prompt += 1
    return rows


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PayloadError(f"is not UTF-8 text ({error.reason}); slime cannot read it") from None
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"is not JSON ({error}); slime leaves such a row out") from None
    if not isinstance(row, dict):
        raise PayloadError(f"is {row!r:.{_EXCERPT}}, not a JSON object")
    return row


def _payload(row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise PayloadError(
            f"`metadata` is {metadata!r:.{_EXCERPT}}, not a JSON object that holds the payload"
        )
    if "turnleaf" in metadata:
        raise PayloadError(
            "`metadata` already has `turnleaf`, under which turnleaf says what became of a "
            "rollout; rename that field of the row"
        )
    if "payload" not in metadata and "payload" in row:
        raise PayloadError("`payload` stands beside `metadata`; it belongs inside of it")
    try:
        return checked_payload(metadata.get("payload"), name="row")
    except PayloadError as error:
        raise PayloadError(str(error).removeprefix("row: ")) from None


def _key(key: object) -> Finding | None:
    """What is to be said of a top-level key, which need not be turnleaf's at all."""
    if not isinstance(key, str):
        return Finding(
            "config", "bad", f"the top-level key {key!r} is no text; slime cannot take it"
        )
    sections = _sections()
    # Names joined by dots are refused with the rest of the settings.
    if "." in key or sections.get(key) == "":
        return None
    if key in sections:
        return Finding(
            "config",
            "bad",
            f"{key!r} stands at the top level, where nothing would read it",
            f"write it below `{sections[key]}:`",
        )
    close = difflib.get_close_matches(key, sections, n=1, cutoff=_LIKENESS)
    if close:
        return Finding(
            "config",
            "bad",
            f"unknown setting {key!r}: slime takes any name, but nothing would read this one",
            f"is {'.'.join(filter(None, (sections[close[0]], close[0])))!r} meant?",
        )
    return Finding(
        "config",
        "warning",
        f"{key!r} is none of turnleaf's settings; slime takes it for one of its own arguments",
    )


def _sections() -> dict[str, str]:
    """Below which names each name of a setting stands; "" for the top level."""
    sections = dict.fromkeys(_BACKEND_ARGUMENTS, "rollout_session_backend")
    for field in attrs.fields(Settings):
        names = f"{field.metadata.get('section', '')}{field.name}".split(".")
        sections |= {name: ".".join(names[:depth]) for depth, name in enumerate(names)}
    return sections


def _runtime_arn(backend: Mapping[str, Any]) -> Finding | None:
    if "agentcore_runtime_arn" not in backend:
        return None
    arn = backend["agentcore_runtime_arn"]
    if isinstance(arn, str) and _ARN.fullmatch(arn):
        return None
    if isinstance(arn, str) and "<" in arn:
        fault = "is still the example's"
    else:
        fault = "is not the ARN of an AgentCore runtime"
    return Finding(
        "config",
        "bad",
        f"rollout_session_backend.agentcore_runtime_arn {fault}: {arn!r:.{2 * _EXCERPT}}",
        f"give one such as {_ARN_EXAMPLE}",
    )


def _backend_remedy(settings: Settings) -> str:
    if str(settings.rollout_session_backend["backend"]).startswith("agentcore_rl_toolkit."):
        return (
            "turnleaf's own session classes are in turnleaf.sessions "
            "(docs/from-agentcore-rl-toolkit.md)"
        )
    return ""


def _rows(number: int) -> str:
    return f"{number:,} {'row' if number == 1 else 'rows'}"
