"""Looking for marks in a text that comes piece by piece, at a cost that follows the text alone."""

from collections.abc import Iterable, Sequence

__all__ = ["Beginning", "Search"]


class Search:
    """Looks for the mark that ends first.

    What was read is looked at again only where a mark may have begun there: for each mark, the
    place where it may have begun only ever moves forward.
    """

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = [mark for mark in marks if mark]
        self.restart()

    @property
    def held(self) -> int:
        """How many of the last characters are a mark, or may be the beginning of one."""
        return len(self._tail)

    def restart(self) -> None:
        """Look for the next mark, of which nothing was read yet."""
        self._tail = ""
        self._matched = [0] * len(self._marks)

    def feed(self, text: str, start: int = 0) -> tuple[int, str | None]:
        """Read on with `text[start:]`. After a mark was found, only behind `restart`.

        Returns where reading stopped, and the mark that ends there: None at the end of the text.
        """
        known = len(self._tail)
        read = self._tail + text[start:]
        found, end = None, len(read)
        for mark, matched in zip(self._marks, self._matched, strict=True):
            # Of marks that end at one place, the first one is told.
            at = read.find(mark, known - matched, end if found is None else end - 1)
            if at >= 0:
                found, end = mark, at + len(mark)
        read = read[:end]
        self._matched = [
            _matched(mark, read, known - matched)
            for mark, matched in zip(self._marks, self._matched, strict=True)
        ]
        self._tail = read[len(read) - max(self._matched, default=0) :]
        return start + end - known, found


def _matched(mark: str, read: str, start: int) -> int:
    """How long the longest beginning of the mark is that the text ends with, from `start` on."""
    at = max(start, len(read) - len(mark))
    while (at := read.find(mark[0], at)) >= 0:
        if mark.startswith(read[at:]):
            return len(read) - at
        at += 1
    return 0


class Beginning:
    """Tells which mark a text begins with after whitespace.

    space: the characters that are whitespace; None for Unicode's.
    """

    def __init__(self, marks: Sequence[str], space: str | None = None) -> None:
        self._marks = marks
        self._strip = space
        self._space: list[str] = []
        self._word = ""

    def feed(self, text: str) -> str | None:
        """Read on: the mark, "" when there is none, or None while that is not known."""
        if not self._word:
            word = text.lstrip(self._strip)
            self._space.append(text[: len(text) - len(word)])
            text = word
        self._word += text
        if any(mark.startswith(self._word) and mark != self._word for mark in self._marks):
            return None
        return next((mark for mark in self._marks if self._word.startswith(mark)), "")

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join([*self._space, self._word])

    @property
    def word(self) -> str:
        """All that was read but for the whitespace at its beginning."""
        return self._word
