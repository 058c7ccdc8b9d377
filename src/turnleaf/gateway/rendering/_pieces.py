"""From sampled tokens to text, as far as it is certain while more may come."""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

from turnleaf.gateway.rendering._control import ControlledTokenizer
from turnleaf.gateway.rendering.parsers import Piece
from turnleaf.gateway.rendering.parsers._search import Search

__all__ = ["PieceReader"]


class PieceReader:
    """Decodes tokens and holds back what may not belong to the message.

    That is: the last token, which may be the one that ended the turn; the beginning of a character;
    and what is a stop string, or may be the beginning of one. From a stop string on, which the
    engine may name at the end, nothing is certain any more. A tokenizer whose tokens are not bytes
    makes nothing certain.
    """

    def __init__(self, tokenizer: ControlledTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = Search(stop)
        self._undecided: list[int] = []
        self._held: deque[Piece] = deque()
        self._held_length = 0
        self._stopped = not tokenizer.decodes_bytes

    def feed(self, ids: Sequence[int]) -> Iterator[Piece]:
        """The pieces that have become certain; a control token is always whole."""
        self._undecided += ids
        decided, self._undecided = self._undecided[:-1], self._undecided[-1:]
        for piece in self._decode(decided):
            yield from self._certain(piece)

    def _decode(self, ids: Sequence[int]) -> Iterator[Piece]:
        tokenizer = self._tokenizer
        for control, run in groupby(ids, tokenizer.control_ids.__contains__):
            if not control:
                # In one piece: what reading costs follows the pieces more than their length.
                yield Piece(self._bytes.decode(b"".join(map(tokenizer.bytes_of, run))), False)
                continue
            yield Piece(self._bytes.decode(b"", final=True), False)
            for id_ in run:
                yield Piece(tokenizer.text_of(id_), True)

    def _certain(self, piece: Piece) -> Iterator[Piece]:
        if self._stopped or not piece.text:
            return
        end, stop = self._stops.feed(piece.text)
        self._stopped = stop is not None
        certain = self._held_length + end - self._stops.held
        self._held.append(piece)
        self._held_length += len(piece.text)
        while self._held and len(self._held[0].text) <= certain:
            first = self._held.popleft()
            certain -= len(first.text)
            self._held_length -= len(first.text)
            yield first
        if certain and not self._held[0].control:
            text = self._held.popleft().text
            self._held.appendleft(Piece(text[certain:], False))
            self._held_length -= certain
            yield Piece(text[:certain], False)
