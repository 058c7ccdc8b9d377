"""Leaves as text, cut where the loss mask changes."""

from itertools import pairwise

import attrs
import numpy as np

from turnleaf.adapters.mock import Tokenizer
from turnleaf.core import Leaf

__all__ = ["Span", "spans"]


@attrs.frozen
class Span:
    """Consecutive tokens of a leaf that are all trained or all masked, decoded together.

    Bytes that are no whole UTF-8 character within the span appear as U+FFFD.
    """

    trained: bool
    tokens: int
    text: str


def spans(leaf: Leaf, tokenizer: Tokenizer) -> list[Span]:
    """The whole leaf, in order."""
    changes = np.flatnonzero(np.diff(leaf.loss_mask)) + 1
    ends = [0, *changes.tolist(), len(leaf.tokens)]
    return [
        Span(
            trained=bool(leaf.loss_mask[start]),
            tokens=end - start,
            text=tokenizer.decode(leaf.tokens[start:end].tolist()),
        )
        for start, end in pairwise(ends)
    ]
