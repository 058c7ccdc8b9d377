"""Tokens of the words that texts are made of, remembered.

A tokenizer first cuts a text into words, with a regular expression, and then works on each word
alone. Most words were seen before: an agent's tools say the same over and over.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

import tokenizers

__all__ = ["WordMemory", "state_of"]

_MOST_TEXT = 2**14
"""Characters of a text that is worth it; longer ones a tokenizer encodes without Python's lock."""
_MOST_WORDS = 2**15
_MOST_LEARNED = 64
"""New words of a text; one with more is left to the tokenizer, which takes less for many."""
_LONGEST_WORD = 32  # characters of a word that is remembered
_ASCII = tuple(map(chr, range(0x80)))
_NEVER = r"\U0010FFFF"  # in no ASCII text
_SAMPLES = tuple(
    f"It's {sign}  {sign}{sign}word{sign}WORD's\n{sign} \n 12345{sign}\t" for sign in _ASCII
)
# What these mean to Python is what they mean to the tokenizers' Oniguruma, within ASCII.
_TRANSLATED = re.compile(
    r"(?P<property>\\p\{(?P<name>[A-Z][a-z]?)\})"
    r"|\\[rnsS/]|\(\?i:|\(\?!|\(\?:|\[\^|[\[\])|]|(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})(?![*+?{])"
    r"|[ '/A-Za-z0-9]"
)


class WordMemory:
    """Encodes ASCII texts as a tokenizer without added tokens does.

    Use `of`, which knows for which tokenizers that can be said.
    """

    def __init__(self, words: re.Pattern[str], encoder: tokenizers.Tokenizer) -> None:
        self._words = words
        self._encoder = encoder
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "WordMemory | None":
        """The memory for a tokenizer; None unless it cuts texts with one known kind of pattern."""
        steps: list[dict[str, Any]] = state_of(tokenizer.pre_tokenizer).get("pretokenizers") or []
        normalizer = state_of(tokenizer.normalizer)
        if len(steps) != 2 or normalizer not in ({}, {"type": "NFC"}):
            return None
        split, signs = steps
        pattern = (split.get("pattern") or {}).get("Regex")
        known = (
            split["type"] == "Split"
            and split["behavior"] == "Isolated"
            and not split["invert"]
            and signs["type"] == "ByteLevel"
            and not signs["use_regex"]
            and not signs["add_prefix_space"]
            and isinstance(tokenizer.model, tokenizers.models.BPE)
            and not tokenizer.model.dropout
        )
        words = _within_ascii(pattern) if known and pattern else None
        if words is None:
            return None
        encoder = tokenizers.Tokenizer(tokenizer.model)
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        memory = cls(words, encoder)
        agrees = all(
            memory.encode(sample) == tokenizer.encode(sample, add_special_tokens=False).ids
            for sample in _SAMPLES
        )
        return memory if agrees else None

    def encode(self, text: str) -> list[int] | None:
        """The tokens; None for a text that is left to the tokenizer."""
        if len(text) > _MOST_TEXT or not text.isascii():
            return None
        words = self._words.findall(text)
        if sum(map(len, words)) != len(text):
            return None  # the pattern leaves something out
        known = self._ids
        try:
            found = list(map(known.__getitem__, words))
        except KeyError:
            unknown = [word for word in dict.fromkeys(words) if word not in known]
            learned = self._learn(unknown[:_MOST_LEARNED])
            if len(unknown) > _MOST_LEARNED:
                return None
            try:
                found = [learned.get(word) or known[word] for word in words]
            except KeyError:
                return None  # another thread made it forget, or a word has no tokens
        return list(chain.from_iterable(found))

    def _learn(self, words: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The tokens of words, which are remembered unless they are long."""
        encoding = self._encoder.encode(words, is_pretokenized=True, add_special_tokens=False)
        learned: dict[str, tuple[int, ...]] = {}
        numbered = zip(encoding.word_ids, encoding.ids, strict=True)
        for number, pairs in groupby(numbered, lambda pair: pair[0]):
            learned[words[number]] = tuple(id_ for _, id_ in pairs)
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        self._ids |= {word: ids for word, ids in learned.items() if len(word) <= _LONGEST_WORD}
        return learned


def state_of(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file has it; nothing where there is none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _within_ascii(pattern: str) -> re.Pattern[str] | None:
    """What a tokenizer's pattern says of ASCII texts; None if it has anything that is not known."""
    translated, at, inside = [], 0, False
    while at < len(pattern):
        found = _TRANSLATED.match(pattern, at)
        if found is None:
            return None
        part, at = found[0], found.end()
        if part in ("[", "[^"):
            if inside:
                return None
            inside = True
        elif part == "]":
            inside = False
        if found["property"]:
            part = _members(found["name"])
            part = part if inside else f"[{part}]"
        translated.append(part)
    try:
        return re.compile("".join(translated), re.ASCII)
    except re.error:
        return None


def _members(category: str) -> str:
    """The ASCII characters of a Unicode category, within brackets."""
    members = (sign for sign in _ASCII if unicodedata.category(sign).startswith(category))
    return "".join(map(re.escape, members)) or _NEVER
