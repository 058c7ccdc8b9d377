"""Encoding text so that only the chat template can write control tokens.

A control token is any token that a tokenizer has beside its model's vocabulary: `<|im_start|>`,
but `<think>` and `<tool_call>` too. Where an input spells one out, a `Shield` puts a stand-in in
its place before the template sees it. What matches a control token in the rendered text is then
the template's own; the stand-ins are taken back in the text between, which a tokenizer encodes
that has no control tokens at all.
"""

import json
import re
import secrets
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import tokenizers

from turnleaf.core import ContractError
from turnleaf.gateway.rendering._errors import RenderError
from turnleaf.gateway.rendering._texts import TextMemory
from turnleaf.gateway.rendering._words import WordMemory, state_of
from turnleaf.gateway.rendering.parsers import Piece

__all__ = ["ControlledTokenizer", "Shield"]


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(sign): byte for sign, byte in enumerate(_OTHERS, 0x100)
}
"""The byte of each sign in which a vocabulary of bytes is written: GPT-2's encoder."""


class ControlledTokenizer:
    """Encodes rendered text as the tokenizer itself does, but for stand-ins.

    control_ids: of the control tokens. decodes_bytes: a text is decoded from the bytes of its
    tokens, put together.

    Raises ContractError for a tokenizer of which that could not be said.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        for token in added.values():
            _refuse_unusual(token, backend)
        self._backend = backend
        self._plain = _without_added_tokens(backend, set(added))
        self._words = WordMemory.of(self._plain)
        self._known_texts = TextMemory(self._ids_of)
        self._ids = {token.content: id_ for id_, token in added.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        # (?!) never matches: a tokenizer may have no added tokens.
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._starts = frozenset(token[:end] for token in self._ids for end in range(1, len(token)))
        self._ends = frozenset(token[at:] for token in self._ids for at in range(1, len(token)))
        self._edge_signs = frozenset(sign for token in self._ids for sign in (token[0], token[-1]))
        self._longest = max(map(len, self._ids), default=0)
        # Of tokens that were read before: at most the vocabulary.
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.control_ids = frozenset(added)
        self.decodes_bytes = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._prove()

    def shield(self) -> "Shield":
        """A shield for one rendering."""
        return Shield(self)

    def encode(self, text: str, shield: "Shield | None" = None) -> list[int]:
        """The tokens of a rendered text; stand-ins of `shield` become ordinary text again."""
        ids: list[int] = []
        at = 0
        for control in self._pattern.finditer(text):
            ids += self._encode_plain(text[at : control.start()], shield)
            ids.append(self._ids[control[0]])
            at = control.end()
        return ids + self._encode_plain(text[at:], shield)

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, control tokens included; broken UTF-8 becomes U+FFFD."""
        if not self.decodes_bytes:
            return self._backend.decode(ids, skip_special_tokens=False)
        try:
            found = b"".join(map(self._bytes.__getitem__, ids))
        except KeyError:  # some of them for the first time
            found = b"".join(map(self.bytes_of, ids))
        return found.decode("utf-8", "replace")

    def bytes_of(self, id_: int) -> bytes:
        """The bytes of one token, if `decodes_bytes`; their text is decoded from all together."""
        known = self._bytes.get(id_)
        if known is None:
            token = self._backend.id_to_token(id_)
            if token is None:
                return b""
            try:
                known = bytes(_BYTES[sign] for sign in token)
            except KeyError:
                known = token.encode()
            self._bytes[id_] = known
        return known

    def text_of(self, id_: int) -> str:
        """The text of one token on its own."""
        known = self._texts.get(id_)
        if known is None:
            known = self.decode([id_])
            if known:  # not so for ids that there are none of
                self._texts[id_] = known
        return known

    def pieces(self, ids: list[int]) -> list[Piece]:
        """The same text, cut at control tokens."""
        return [
            Piece(self.decode(list(run)), control)
            for control, group in groupby(ids, self.control_ids.__contains__)
            for run in (([id_] for id_ in group) if control else [group])
        ]

    def first_control(self, text: str) -> str | None:
        """The control token that `text` starts with, if any.

        If so, encoding `text` apart from what precedes it cannot change its tokens.
        """
        found = self._pattern.match(text)
        return found[0] if found else None

    def last_control(self, text: str) -> str | None:
        """The last control token in `text`, if any."""
        controls = self._pattern.findall(text)
        return controls[-1] if controls else None

    def spelled(self, text: str) -> frozenset[int]:
        """The ids of the control tokens that `text` spells out."""
        return frozenset(self._ids[control] for control in self._pattern.findall(text))

    def _encode_plain(self, text: str, shield: "Shield | None") -> list[int]:
        if not text:
            return []
        if shield is not None:
            text = shield.restore(text)
        return self._known_texts.ids(_encodable(text))

    def _ids_of(self, text: str) -> list[int]:
        remembered = None if self._words is None else self._words.encode(text)
        if remembered is not None:
            return remembered
        # As a batch of one: `encode` also works out where each token begins, and holds Python's
        # global lock meanwhile.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _prove(self) -> None:
        sample = "".join(
            f"The quick  brown{token}fox\n\n{token} jumps é日 {token}{token}\n12{token}"
            for token in self._ids
        )
        if self.encode(sample) != self._backend.encode(sample, add_special_tokens=False).ids:
            raise ContractError(
                "this tokenizer encodes text beside a control token differently than text on its "
                "own, so prompts cannot be built piece by piece; use another checkpoint"
            )


class Shield:
    """Stand-ins, for one rendering, for control tokens that its inputs spell out.

    Beginnings and ends of control tokens at the edge of a string are replaced too, for the
    template may put the rest beside them. A stand-in is a random number of 48 digits or more:
    it survives JSON, escaping and changes of case, and no input can hold it.
    """

    def __init__(self, tokenizer: ControlledTokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = str(10**23 + secrets.randbelow(9 * 10**23))
        self._indices: dict[str, int] = {}

    def cover(self, value: Any) -> Any:
        """A copy of a JSON value in which every string, keys included, is harmless."""
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, dict | Mapping):  # the first is told sooner
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The text with what the stand-ins stand for.

        Raises RenderError if the template changed a stand-in beyond recognition.
        """
        if not self._indices:
            return text
        pieces = list(self._indices)
        restored = re.sub(
            f"{self._nonce}([0-9]+?){self._nonce}", lambda found: pieces[int(found[1])], text
        )
        if self._nonce[:12] in restored:
            raise RenderError(
                "the chat template cuts a text that spells out a control token; leave it out"
            )
        return restored

    def _cover_text(self, text: str) -> str:
        own = self._tokenizer
        for sign in own._edge_signs:
            if sign in text:
                break
        else:
            return text
        text = own._pattern.sub(lambda found: self._stand_in(found[0]), text)
        kept = text.rstrip()
        for length in range(min(own._longest, len(kept)), 0, -1):
            if kept[-length:] in own._starts:
                piece = kept[-length:]
                text = kept[:-length] + self._stand_in(piece) + text[len(kept) :]
                break
        kept = text.lstrip()
        for length in range(min(own._longest, len(kept)), 0, -1):
            if kept[:length] in own._ends:
                lead = text[: len(text) - len(kept)]
                text = lead + self._stand_in(kept[:length]) + kept[length:]
                break
        return text

    def _stand_in(self, piece: str) -> str:
        index = self._indices.setdefault(piece, len(self._indices))
        return f"{self._nonce}{index}{self._nonce}"


def _encodable(text: str) -> str:
    """The text; halves of surrogate pairs, which JSON can spell and no tokenizer can, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _refuse_unusual(token: tokenizers.AddedToken, backend: tokenizers.Tokenizer) -> None:
    unusual = {
        "strips the space beside it": token.lstrip or token.rstrip,
        "matches whole words only": token.single_word,
        "is looked for in normalised text": token.normalized and _normalises(backend),
        "is made of letters, digits or spaces alone": token.content.isalnum()
        or not token.content.strip(),
    }
    for reason, applies in unusual.items():
        if applies:
            raise ContractError(
                f"the tokenizer's added token {token.content!r} {reason}, which turnleaf cannot "
                "tell from ordinary text; use another checkpoint"
            )


def _normalises(backend: tokenizers.Tokenizer) -> bool:
    return state_of(backend.normalizer) not in ({}, {"type": "Sequence", "normalizers": []})


def _without_added_tokens(backend: tokenizers.Tokenizer, added: set[int]) -> tokenizers.Tokenizer:
    """The same tokenizer, unable to produce an added id."""
    known = {id_ for id_ in added if backend.model.id_to_token(id_) is not None}
    if not known:
        plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        return plain
    document = json.loads(backend.to_str())
    model = document["model"]
    if model["type"] != "BPE":
        raise ContractError(
            f"the tokenizer's model is {model['type']}; only byte-pair encoding is supported"
        )
    model["vocab"] = {token: id_ for token, id_ in model["vocab"].items() if id_ not in known}
    document |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library has no error class of its own
        raise ContractError(
            f"the tokenizer merges ordinary text into an added token ({error}); use another "
            "checkpoint"
        ) from error
