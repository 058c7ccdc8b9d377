"""`turnleaf demo`: a run, how it is watched, and what is said at its end."""

import functools
import math
import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from turnleaf.adapters.mock import DemoSession, Recipe, Summary, run_demo
from turnleaf.cli._demo_screen import LiveScreen, PlainLines
from turnleaf.cli._stdout import write
from turnleaf.core import ContractError, Service

__all__ = ["demo"]

RUNS = Path("runs")


def demo(
    recipe: Recipe,
    seed: int,
    service: Service,
    stdout: TextIO,
    *,
    as_json: bool,
    session: DemoSession = DemoSession.HTTP,
) -> int:
    """Run it and print what came of it; returns the exit code: 1 when something does not add up.

    With `as_json` stdout gets the summary alone, and its progress is on stderr.
    """
    if not math.isfinite(recipe.learning_rate):
        raise ContractError(f"--learning-rate {recipe.learning_rate} is no rate")
    folder = _new_folder()
    told = sys.stderr if as_json else stdout
    console = Console(file=told, highlight=False)
    screen = LiveScreen(console, recipe) if console.is_terminal else PlainLines(told)
    run = functools.partial(
        run_demo, recipe, seed=seed, folder=folder, watcher=screen, session=session
    )
    with screen:
        summary = service.call(run)
    if as_json:
        write(stdout, summary.to_json() + "\n")
    else:
        with console.capture() as shown:
            console.print(_table(summary))
        write(stdout, shown.get())
    for problem in summary.problems:
        sys.stderr.write(f"turnleaf demo: {problem}\n")
    return 1 if summary.problems else 0


def _new_folder() -> Path:
    """One of its own for each run, named after the time."""
    name = time.strftime("%Y-%m-%d-%H%M%S")
    try:
        RUNS.mkdir(exist_ok=True)
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):
            folder = (RUNS / f"{name}{suffix}").absolute()
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise ContractError(
            f"the folder {RUNS.absolute()} cannot be written ({error.strerror}): change into one "
            "that can"
        ) from None
    raise ContractError(f"{RUNS.absolute()} holds too many runs of this second: try again")


def _table(summary: Summary) -> Table:
    counts = summary.counts
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")  # a folder is to be copied
    for name, value, note in (
        ("rollouts", f"{counts.rollouts:,}", f"and {counts.evaluation_rollouts:,} to evaluate"),
        ("turns", f"{counts.turns:,}", ""),
        ("leaves", f"{counts.leaves:,}", ""),
        ("forks", f"{counts.forks:,}", "rollouts of more than one leaf"),
        ("trained tokens", f"{counts.trained_tokens:,}", "each of them once"),
        ("masked tokens", f"{counts.masked_tokens:,}", ""),
        ("failures", f"{counts.failures:,}", ""),
        ("accuracy before", f"{summary.accuracy_before:.1%}", "of first answers, held out"),
        ("accuracy after", f"{summary.accuracy_after:.1%}", ""),
        (
            "log-probabilities",
            f"± {counts.max_logprob_difference:.0e}",
            "recorded against recomputed",
        ),
        ("seconds", f"{summary.seconds:.1f}", ""),
        ("files", "", summary.folder),
    ):
        table.add_row(name, value, note)
    return table
