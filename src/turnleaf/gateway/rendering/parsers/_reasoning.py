"""Reasoning between `<think>` and `</think>`, before the answer."""

from typing import Literal

from turnleaf.gateway.rendering.parsers._search import Beginning, Search

__all__ = ["ReasoningReader", "split_reasoning"]

_OPEN = "<think>"
_CLOSE = "</think>"


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Cut `text` into reasoning and answer.

    opened: the prompt already opened `<think>`, its newline included. Both parts are as sampled,
    except for the newlines that the format puts beside its tags: one after the opening tag, one
    before the closing one, up to two after it. Reasoning without its end is all reasoning; tags
    after the first pair are part of the answer.
    """
    lead = text.lstrip()
    if lead.startswith(_OPEN):
        text = lead[len(_OPEN) :].removeprefix("\n")
    elif not opened:
        return "", text
    reasoning, close, answer = text.partition(_CLOSE)
    if not close:
        return text, ""
    return reasoning.removesuffix("\n"), answer.removeprefix("\n").removeprefix("\n")


class ReasoningReader:
    """`split_reasoning` of a text that is not finished.

    newline: one more newline, at the beginning of the text, is the format's.
    """

    def __init__(self, opened: bool, *, newline: bool) -> None:
        self._opened = opened
        self._phase: Literal["beginning", "reasoning", "answer"] = "beginning"
        self._beginning = Beginning([_OPEN])
        self._closing = Search([_CLOSE])
        self._newlines = int(newline)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What has become certain of the reasoning, and of the answer."""
        text = self._without_newlines(text)
        if self._phase == "beginning":
            text = self._begin(text)
        if self._phase == "reasoning":
            return self._reason(text)
        return "", text

    def _begin(self, text: str) -> str:
        """Returns the text that the next phase begins with."""
        mark = self._beginning.feed(text)
        if mark is None:
            return ""
        self._phase = "reasoning" if mark or self._opened else "answer"
        if not mark:
            return self._beginning.text
        self._newlines = 1
        return self._without_newlines(self._beginning.word[len(mark) :])

    def _reason(self, text: str) -> tuple[str, str]:
        end, close = self._closing.feed(text)
        held = self._held + text[:end]
        if close is not None:
            self._phase, self._newlines = "answer", 2
            answer = self._without_newlines(text[end:])
            return held[: -len(close)].removesuffix("\n"), answer
        certain = held[: len(held) - self._closing.held].removesuffix("\n")
        self._held = held[len(certain) :]
        return certain, ""

    def _without_newlines(self, text: str) -> str:
        """The text without those newlines of the format that are still to come."""
        while self._newlines and text:
            if not text.startswith("\n"):
                self._newlines = 0
                break
            self._newlines -= 1
            text = text[1:]
        return text
