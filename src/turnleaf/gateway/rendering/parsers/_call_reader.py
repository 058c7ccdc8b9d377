"""Finding calls in a text that is not finished.

Nothing here knows what a call is: once a call may be complete, the format's own parser is given
the text from where the call begins. If that is one call and nothing else, it is certain, whatever
follows. After what is no call, all is left to the parse of the whole text.
"""

from collections.abc import Iterator

import attrs

from turnleaf.gateway.rendering.parsers._base import CallParser, ParsedCall, Tools
from turnleaf.gateway.rendering.parsers._search import Search

__all__ = ["CallForm", "TaggedCallReader"]

_ATTEMPTS = 8
"""How often a call may seem complete and not be: each time, its text is parsed from the start."""


@attrs.frozen
class CallForm:
    """The tags of a format.

    first: what the first call begins with. further: what each further call begins with, if it lacks
    what is said once before all of them. close: what a call ends with. behind: what stands once
    behind all of them.
    """

    first: str
    close: str
    further: str | None = None
    behind: str | None = None


class TaggedCallReader:
    """Finds the calls of a format with tags.

    parallel: a reply may have several calls. Otherwise a second one makes text of the first, so
    that none is certain before the end.
    """

    def __init__(self, parse: CallParser, form: CallForm, tools: Tools, *, parallel: bool) -> None:
        self._parse = parse
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._opening = self._search_for(form.first)
        self._closing = Search([form.close])
        self._held = ""
        self._call: list[str] | None = None
        self._attempts = 0
        self._called = False
        self._halted = False

    def feed(self, text: str) -> Iterator[str | ParsedCall]:
        """See `CallReader.feed`."""
        at = 0
        while at < len(text) and not self._halted:
            if self._call is None:
                end, mark = self._opening.feed(text, at)
                read = self._held + text[at:end]
                kept = len(read) - (len(mark) if mark else self._opening.held)
                self._held = read[kept:]
                if kept:
                    yield read[:kept]
                if mark:
                    self._open(mark)
            else:
                end, close = self._closing.feed(text, at)
                self._call.append(text[at:end])
                if close and (call := self._complete(self._call)):
                    yield call
            at = end

    def _open(self, mark: str) -> None:
        form = self._form
        begins = (form.further or form.first) if self._called else form.first
        self._halted = not self._parallel or mark != begins
        # The format's parser takes a call without what is said once for none.
        self._call = [mark] if mark == form.first else [form.first, mark]
        self._held = ""
        self._attempts = 0

    def _complete(self, call: list[str]) -> ParsedCall | None:
        """The call whose text this is, if it is certain."""
        self._closing.restart()
        parts = self._parse("".join(call), self._tools).parts
        if len(parts) == 3 and parts[0] == parts[2] == "" and isinstance(parts[1], ParsedCall):
            self._call = None
            self._called = True
            self._opening = self._search_for(self._form.further or self._form.first)
            return parts[1]
        self._attempts += 1
        self._halted = self._attempts == _ATTEMPTS
        return None

    def _search_for(self, begins: str) -> Search:
        form = self._form
        return Search({mark for mark in (begins, form.further, form.behind) if mark})
