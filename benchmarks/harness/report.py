"""How figures are printed: Markdown tables, and bars that are met or not."""

from collections.abc import Iterator, Sequence

import attrs


@attrs.frozen
class Bar:
    """A figure, and the most that it may be."""

    name: str
    value: float
    most: float

    @property
    def met(self) -> bool:
        return self.value <= self.most

    def __str__(self) -> str:
        verdict = "met" if self.met else "NOT MET"
        return f"{self.name}: {self.value:.3g} (at most {self.most:.3g}): {verdict}"


@attrs.frozen
class Report:
    """What one part found: lines for people, and bars."""

    lines: Sequence[str]
    bars: Sequence[Bar] = ()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table with columns of even width."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, ["-" * width for width in widths], *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
