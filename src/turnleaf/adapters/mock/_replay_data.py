"""Made-up choices of a sampler: which experts a token was routed to, which ids top-p kept.

Both follow from the tokens up to a position alone, as they do in a model whose weights stay: two
calls that share a prefix agree on it, and rows of another branch or position are told apart.
"""

import base64
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from turnleaf.core import Speculation, TokenIds

__all__ = [
    "filters",
    "int32_base64",
    "kept_ids",
    "routed_experts",
    "speculation_fields",
    "top_p_fields",
]

_EXPERTS = 384  # more than a byte counts
_MOST_KEPT = 4
_VOCABULARY = 1000


def routed_experts(
    path: TokenIds, shape: tuple[int, int], *, seed: int = 0
) -> npt.NDArray[np.int32]:
    """int32[len(path), layers, top_k], from 1 on: expert 0 is what a broken capture says."""
    layers, top_k = shape
    drawn = np.array(_digests(path, seed), dtype=np.uint64)[:, None, None]
    offsets = np.arange(layers * top_k, dtype=np.uint64).reshape(1, layers, top_k)
    mixed = (drawn + offsets * np.uint64(2_654_435_761)) % np.uint64(_EXPERTS - 1)
    return (mixed + np.uint64(1)).astype(np.int32)


def kept_ids(path: TokenIds, *, since: int, seed: int = 0) -> list[list[int]]:
    """The ids kept at each position of the path from `since` on; its own is among them."""
    kept = []
    digests = _digests(path, seed)
    for token_id, digest in zip(path[since:].tolist(), digests[since:], strict=True):
        draw = random.Random(digest)
        others = draw.sample(range(_VOCABULARY), draw.randrange(_MOST_KEPT))
        ids = [token_id, *(other for other in others if other != token_id)]
        draw.shuffle(ids)
        kept.append(ids)
    return kept


def filters(sampling: Mapping[str, Any]) -> bool:
    """Whether SGLang's sampler leaves ids out at all; otherwise there are none to report."""
    top_p, min_p = float(sampling.get("top_p", 1)), float(sampling.get("min_p", 0))
    top_k, temperature = int(sampling.get("top_k", -1)), float(sampling.get("temperature", 1))
    return top_p != 1 or top_k > 0 or min_p > 0 or temperature == 0


def top_p_fields(kept: list[list[int]]) -> dict[str, str]:
    """Of `meta_info`, as slime's patched SGLang sends them."""
    return {
        "top_p_token_ids": int32_base64(np.array([i for ids in kept for i in ids])),
        "top_p_token_offsets": int32_base64(np.cumsum([0, *map(len, kept)])),
    }


def speculation_fields(speculation: Speculation) -> dict[str, int]:
    """Of `meta_info`, as SGLang 0.5.15 names them."""
    return {
        "spec_num_correct_drafts": speculation.accepted,
        "spec_num_proposed_drafts": speculation.drafted,
        "spec_verify_ct": speculation.verifications,
    }


def int32_base64(values: npt.NDArray[Any]) -> str:
    """The array, flat, as SGLang sends it."""
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


def _digests(path: TokenIds, seed: int) -> list[int]:
    """At each position, a number for the tokens up to it."""
    digests, digest = [], seed
    for token_id in path.tolist():
        digest = zlib.crc32(token_id.to_bytes(4, "little"), digest)
        digests.append(digest)
    return digests
