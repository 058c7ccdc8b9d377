"""Looking for marks in a text that comes piece by piece, at a cost that follows the text alone."""

import re
from collections.abc import Iterable, Sequence

__all__ = ["Beginning", "Search"]


class Search:
    """Looks for the mark that ends first.

    It never goes back in the text: per mark it keeps how much of it the text ends with
    (Knuth, Morris and Pratt).
    """

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = [mark for mark in marks if mark]
        self._fallbacks = [_fallbacks(mark) for mark in self._marks]
        # (?!) never matches: there may be no marks.
        self._first = re.compile("|".join(re.escape(mark[0]) for mark in self._marks) or "(?!)")
        self.restart()

    @property
    def held(self) -> int:
        """How many of the last characters are a mark, or may be the beginning of one."""
        return max(self._matched, default=0)

    def restart(self) -> None:
        """Look for the next mark, of which nothing was read yet."""
        self._matched = [0] * len(self._marks)

    def feed(self, text: str, start: int = 0) -> tuple[int, str | None]:
        """Read on with `text[start:]`.

        Returns where reading stopped, and the mark that ends there: None at the end of the text.
        """
        at = start
        while at < len(text):
            if not self.held:
                first = self._first.search(text, at)
                if first is None:
                    break
                at = first.start()
            for index, mark in enumerate(self._marks):
                self._matched[index] = self._next(index, text[at])
                if self._matched[index] == len(mark):
                    self._read_on(index + 1, text[at])
                    return at + 1, mark
            at += 1
        return len(text), None

    def _read_on(self, start: int, sign: str) -> None:
        """The marks behind the one that was found read its last character, too."""
        for index in range(start, len(self._marks)):
            self._matched[index] = self._next(index, sign)

    def _next(self, index: int, sign: str) -> int:
        mark, matched = self._marks[index], self._matched[index]
        while matched and mark[matched] != sign:
            matched = self._fallbacks[index][matched - 1]
        return matched + (mark[matched] == sign)


def _fallbacks(mark: str) -> list[int]:
    """For each beginning of the mark the longest shorter one that it ends with."""
    fallbacks = [0]
    for sign in mark[1:]:
        matched = fallbacks[-1]
        while matched and mark[matched] != sign:
            matched = fallbacks[matched - 1]
        fallbacks.append(matched + (mark[matched] == sign))
    return fallbacks


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
