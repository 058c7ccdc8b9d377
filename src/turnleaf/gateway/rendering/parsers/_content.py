"""Which whitespace between a message's calls is content.

Where there are calls, whitespace alone is not content, and line feeds between the text and its
first call belong to the call. Where there are none, all of the text is content.
"""

from collections.abc import Iterator, Sequence

from turnleaf.gateway.rendering.parsers._base import ContentDelta, Delta, ParsedCall

__all__ = ["ContentReader", "content_of"]


def content_of(parts: Sequence[str | ParsedCall]) -> str:
    """The content of a finished message of these texts and calls."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        texts = [text for text in texts if text.strip()]
        if texts and parts[0] == texts[0]:
            texts[0] = texts[0].rstrip("\n")
    return "".join(texts)


class ContentReader:
    """`content_of` a message that is not finished: calls may still come.

    calls: whether they may at all.
    """

    def __init__(self, *, calls: bool) -> None:
        self._calls_may_come = calls
        self._called = False
        self._first = True
        self._blank = True
        self._blocked = False
        self._held: list[str] = []

    def feed(self, part: str | ParsedCall) -> Iterator[Delta]:
        """More of the text that stands here, or a call: what it makes certain."""
        if isinstance(part, ParsedCall):
            self._called = True
            self._held.clear()
            self.end_text()
            yield part
        elif text := self._certain(part):
            yield ContentDelta(text)

    def end_text(self) -> None:
        """What follows is another text."""
        # Content or not: that depends on calls, and all that follows stands behind it.
        self._blocked |= bool(self._held) and not self._called and self._calls_may_come
        self._held.clear()
        self._first, self._blank = False, True

    def _certain(self, text: str) -> str:
        if self._blocked:
            return ""
        if not self._calls_may_come:
            return text
        self._blank = self._blank and not text.strip()
        if self._blank:
            certain = ""
        elif self._first:
            certain = text.rstrip("\n")
        else:
            certain = text
        rest = text[len(certain) :]
        if not certain:
            self._held.append(rest)
            return ""
        certain = "".join([*self._held, certain])
        self._held = [rest] if rest else []
        return certain
