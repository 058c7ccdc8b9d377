"""Tokens of whole texts that come again: what a template writes between messages, and what all
rollouts of an agent begin with."""

from collections.abc import Callable
from threading import Lock

__all__ = ["TextMemory"]

_MOST_CHARACTERS = 2**20
_MOST_SEEN = 2**12


class TextMemory:
    """Remembers the tokens of texts that come a second time, the latest ones.

    Most texts come once: tool results, replies. Of these it only knows that they came. Several
    threads may ask it. most_characters: of all texts together.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        *,
        most_characters: int = _MOST_CHARACTERS,
        most_seen: int = _MOST_SEEN,
    ) -> None:
        self._encode = encode
        self._most_characters = most_characters
        self._most_seen = most_seen
        self._ids: dict[str, list[int]] = {}
        self._characters = 0
        self._seen: dict[int, None] = {}
        self._lock = Lock()

    def ids(self, text: str) -> list[int]:
        """The tokens, which nobody may change."""
        with self._lock:
            found = self._ids.pop(text, None)
            if found is not None:
                self._ids[text] = found  # as the latest one
                return found
            again = self._is_seen(hash(text))
        ids = self._encode(text)
        if again and len(text) <= self._most_characters:
            with self._lock:
                self._remember(text, ids)
        return ids

    def _is_seen(self, mark: int) -> bool:
        """Whether such a text came before, as far as is known. Takes note of it."""
        if mark in self._seen:
            return True
        self._seen[mark] = None
        if len(self._seen) > self._most_seen:
            del self._seen[next(iter(self._seen))]
        return False

    def _remember(self, text: str, ids: list[int]) -> None:
        if text in self._ids:
            return  # by another thread
        self._ids[text] = ids
        self._characters += len(text)
        while self._characters > self._most_characters:
            oldest = next(iter(self._ids))
            del self._ids[oldest]
            self._characters -= len(oldest)
