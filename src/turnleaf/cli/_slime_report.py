"""What `turnleaf slime check` found, for a person and for a machine."""

import json
import shlex
from itertools import groupby

from rich.console import Console
from rich.text import Text

from turnleaf.adapters.slime._findings import Finding
from turnleaf.cli._document import json_result
from turnleaf.cli._run import Outcome
from turnleaf.cli._slime_check import Report
from turnleaf.cli._stdout import visible

__all__ = ["flags", "report_document", "show_report"]

VERSION = 1

MARKS = {"good": ("✓", "green"), "warning": ("!", "yellow"), "bad": ("✗", "bold red")}
WIDTH = 8
"""Columns of the longest name of a check."""


def flags(config: str, data: str) -> list[str]:
    """slime's arguments, in lines; README.md and docs/slime.md show the same."""
    return [
        "--custom-generate-function-path turnleaf.adapters.slime.generate",
        "--custom-reward-post-process-path turnleaf.adapters.slime.normalize_episode_rewards",
        f"--custom-config-path {shlex.quote(config)}",
        "--use-dynamic-batch-size --max-tokens-per-gpu 16384",
        f"--prompt-data {shlex.quote(data)} --input-key prompt",
    ]


def show_report(console: Console, report: Report, *, config: str, data: str) -> None:
    """Print a line for each finding, and below it what to do."""
    for _, findings in groupby(report.findings, key=lambda finding: finding.check):
        for number, finding in enumerate(findings):
            _print_finding(console, finding, named=number == 0)
    _print(console, Text())
    wrong = sum(finding.verdict == "bad" for finding in report.findings)
    outcome = report.outcome
    if report.scripted and outcome is not None and outcome.rollout.trajectory.turns:
        _print(console, Text("The canary's replies were scripted: no model was asked.", "yellow"))
    if wrong:
        _print(
            console,
            Text.assemble(
                ("Next: ", "bold"), "correct what ✗ names, and run the same command again"
            ),
        )
        return
    if outcome is None:
        hint = "add --canary to run one real session; or give slime these arguments, too"
    else:
        hint = "give slime these arguments, too"
    _print(console, Text.assemble(("Next: ", "bold"), hint))
    for line in flags(config, data):
        _print(console, Text(f"  {line}"))
    _print(console, Text("None of slime's own arguments was looked at (docs/slime.md).", "yellow"))


def report_document(report: Report) -> str:
    """The JSON text, on one line; docs/slime-reference.md lists the fields. Keys are left out."""
    document = {
        "version": VERSION,
        "ok": report.exit_code == 0,
        "findings": [
            {
                "check": finding.check,
                "verdict": finding.verdict,
                "text": finding.text,
                "remedy": finding.remedy,
            }
            for finding in report.findings
        ],
        "rows": {"total": report.rows.total, "wrong": report.rows.wrong},
        "base_url": report.base_url,
        "canary": None if report.outcome is None else _canary(report, report.outcome),
    }
    text = json.dumps(document, allow_nan=False)
    return text if report.outcome is None else report.outcome.hide(text)


def _canary(report: Report, outcome: Outcome) -> dict[str, object]:
    rollout, leaves = outcome.rollout, outcome.rollout.trajectory.leaves()
    requests = outcome.requests.to_mapping()
    return {
        "line": report.rows.first_line,
        "requests": requests["total"],
        "refused": requests["refused"],
        "status": rollout.status,
        "model_calls": len(rollout.trajectory.turns),
        "leaves": len(leaves),
        "trained_tokens": sum(int(leaf.loss_mask.sum()) for leaf in leaves),
        "reward": rollout.reward,
        "cause": rollout.cause,
        "error": None if rollout.error is None else str(rollout.error),
        "result": json_result(outcome),
        "scripted": report.scripted,
        "seconds": rollout.timings.session,
    }


def _print_finding(console: Console, finding: Finding, *, named: bool) -> None:
    mark, style = MARKS[finding.verdict]
    name = finding.check if named else ""
    _print(console, Text.assemble((mark, style), f" {name:{WIDTH}}{finding.text}"))
    if finding.remedy:
        _print(console, Text(f"  {'':{WIDTH}}→ {finding.remedy}"))


def _print(console: Console, line: Text) -> None:
    # What an agent returned, and a row's text, must not steer the terminal.
    console.print(Text(visible(line.plain), spans=line.spans, style=line.style), soft_wrap=True)
