"""Watching a demo: a reward curve that grows in a terminal, or a line for each step."""

import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnleaf.adapters.mock import Recipe
from turnleaf.cli._stdout import write

__all__ = ["LiveScreen", "PlainLines", "curve"]

HEIGHT = 8
"""Lines of the reward curve."""
FRAMES_PER_SECOND = 8
_BARS = " ▁▂▃▄▅▆▇█"
_GAUGE = 5
"""Columns that the scale takes beside the curve."""


class PlainLines:
    """A line for each measurement and step: for pipes and files."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, name: str, total: int) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._phase = name
        if name in ("warm-up", "check"):
            self._print(name)

    def advance(self) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""

    def measured(self, accuracy: float) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._print(f"{self._phase}: {accuracy:.1%}")

    def stepped(self, reward: float) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._print(f"{self._phase}: reward {reward:.3f}")

    def _print(self, text: str) -> None:
        write(self._file, text + "\n")


class LiveScreen:
    """The reward of each step as a curve, and what is being done, drawn anew as it changes."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console = console
        self._began = time.monotonic()
        self._steps = recipe.steps
        self._phase, self._done, self._total = "", 0, 0
        self._rollouts = 0
        self._accuracies: list[float] = []
        self._rewards: list[float] = []
        self._live = Live(
            console=console, get_renderable=self._drawn, refresh_per_second=FRAMES_PER_SECOND
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def phase(self, name: str, total: int) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._phase, self._done, self._total = name, 0, total

    def advance(self) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._done += 1
        if self._phase not in ("warm-up", "check"):
            self._rollouts += 1

    def measured(self, accuracy: float) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._accuracies.append(accuracy)

    def stepped(self, reward: float) -> None:
        """See `turnleaf.adapters.mock.Watcher`."""
        self._rewards.append(reward)

    def _drawn(self) -> RenderableType:
        accuracy = " → ".join(f"{accuracy:.1%}" for accuracy in self._accuracies) or "–"
        facts = (
            f"accuracy {accuracy} · {self._rollouts:,} rollouts · "
            f"{time.monotonic() - self._began:.0f} s"
        )
        width = self._console.width - _GAUGE
        lines = curve(self._rewards, self._steps, width)
        scale = ["1.0", *[""] * (HEIGHT - 2), "0.0"]
        drawn = Text()
        for label, line in zip(scale, lines, strict=True):
            drawn.append(f"{label:>3} ", "dim").append("│", "dim").append(line, "green")
            drawn.append("\n")
        state = Table.grid(padding=(0, 1))
        state.add_row(
            Text(self._phase, "bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=20),
            Text(facts),
        )
        return Group(Text("mean reward of each step", "dim"), drawn, state)


def curve(rewards: list[float], steps: int, width: int) -> list[str]:
    """Bars from 0 to 1 as `HEIGHT` lines of text, as wide as `steps` bars; the latest when they
    would be wider than `width`."""
    wide = max(1, min(3, width // max(steps, 1)))
    shown = rewards[-(width // wide) :]
    eighths = [round(min(max(reward, 0.0), 1.0) * HEIGHT * 8) for reward in shown]
    gap = " " if wide > 1 else ""
    return [
        "".join(
            _BARS[min(max(height - 8 * line, 0), 8)] * (wide - len(gap)) + gap for height in eighths
        )
        for line in reversed(range(HEIGHT))
    ]
