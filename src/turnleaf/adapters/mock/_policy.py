"""A decoder-only transformer in numpy, small enough to learn on one core.

Pre-norm blocks of causal attention and a ReLU MLP, learned positions, RMS norms, no biases. Its
vocabulary is a few token ids of a real tokenizer, each with a row of its own; any other id in a
prompt shares one more row, and can never be sampled.

Everything follows the dtype of the parameters: float32 in use, float64 where gradients are checked.
"""

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from turnleaf.core import ContractError

__all__ = ["Array", "Policy", "Rows", "Shape", "attend", "log_softmax", "normalised", "split_heads"]

Array = npt.NDArray[np.floating[Any]]
Rows = npt.NDArray[np.intp]
"""Tokens by their rows in the vocabulary."""

_NORM_EPSILON = 1e-5
_INITIAL_STD = 0.1
_FORMAT = 1


def _ids(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@attrs.frozen
class Shape:
    """What a policy is made of.

    vocabulary: the token ids that it knows. width, hidden: of the residual stream and of the MLP.
    positions: the longest sequence, in tokens.

    Raises ValueError when these contradict each other.
    """

    vocabulary: tuple[int, ...] = attrs.field(converter=_ids)
    layers: int = 2
    width: int = 64
    heads: int = 4
    hidden: int = 128
    positions: int = 192

    def __attrs_post_init__(self) -> None:
        if not self.vocabulary or len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError("a policy's vocabulary is a list of different token ids")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, in the order in which they are stored."""
        size = len(self.vocabulary)
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (size + 1, self.width),
            "position": (self.positions, self.width),
        }
        for layer in range(self.layers):
            shapes |= {
                f"{layer}.attention_norm": (self.width,),
                f"{layer}.qkv": (self.width, 3 * self.width),
                f"{layer}.mix": (self.width, self.width),
                f"{layer}.mlp_norm": (self.width,),
                f"{layer}.up": (self.width, self.hidden),
                f"{layer}.down": (self.hidden, self.width),
            }
        return shapes | {"norm": (self.width,), "head": (self.width, size)}


class Policy:
    """Parameters in one vector, with a view for each.

    shape: what they form. vector: float[n], all of them; `Policy` does not copy it.

    Raises ValueError when the vector has another length.
    """

    def __init__(self, shape: Shape, vector: Array) -> None:
        self.shape = shape
        self.vector = vector
        self.parameters = self.views(vector)
        self._row_of = {token: row for row, token in enumerate(shape.vocabulary)}

    @classmethod
    def random(cls, shape: Shape, seed: int, dtype: npt.DTypeLike = np.float32) -> Self:
        """Untrained parameters, the same for a seed."""
        rng = np.random.default_rng(seed)
        deep = _INITIAL_STD / math.sqrt(2 * shape.layers)
        parts: list[Array] = []
        for name, dimensions in shape.parameters().items():
            if name.endswith("norm"):
                parts.append(np.ones(dimensions).ravel())
            else:
                std = deep if name.endswith((".mix", ".down")) else _INITIAL_STD
                parts.append(rng.normal(0.0, std, dimensions).ravel())
        return cls(shape, np.concatenate(parts).astype(dtype))

    def views(self, vector: Array) -> dict[str, Array]:
        """A vector of the parameters' length, by name: their values, or their gradient."""
        views, start = {}, 0
        for name, dimensions in self.shape.parameters().items():
            end = start + math.prod(dimensions)
            views[name] = vector[start:end].reshape(dimensions)
            start = end
        if vector.shape != (start,):
            raise ValueError(f"the policy has {start} parameters, but they come as {vector.shape}")
        return views

    def copy(self) -> "Policy":
        """The same, with parameters of its own."""
        return Policy(self.shape, self.vector.copy())

    def rows(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[int]:
        """The vocabulary's row of each id; unknown ids have the row behind the last."""
        unknown = len(self.shape.vocabulary)
        return [self._row_of.get(int(token), unknown) for token in ids]

    def save(self, path: Path) -> None:
        """Write an .npz file, whole or not at all."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with draft.open("wb") as file:
            np.savez(file, format=_FORMAT, vector=self.vector, **attrs.asdict(self.shape))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises ContractError, naming the file, when it is not that."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                if stored["format"] != _FORMAT:
                    raise ValueError(f"its format is {stored['format']}, not {_FORMAT}")
                fields = {field.name: stored[field.name].tolist() for field in attrs.fields(Shape)}
                vector = stored["vector"]
                if not np.isfinite(vector).all():
                    raise ValueError("a parameter is not finite")
                return cls(Shape(**fields), vector)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ContractError(f"the weights {path} cannot be read: {error}") from None


def normalised(x: Array, gain: Array) -> tuple[Array, Array]:
    """RMS norm over the last axis, and the reciprocal of the root mean square."""
    scale = 1.0 / np.sqrt(np.einsum("...i,...i->...", x, x) / x.shape[-1] + _NORM_EPSILON)
    scale = scale[..., None]
    return x * scale * gain, scale


def split_heads(x: Array, heads: int) -> Array:
    """[sequences, tokens, width] → [sequences, heads, tokens, width / heads]."""
    sequences, tokens, width = x.shape
    return x.reshape(sequences, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def attend(
    queries: Array, keys: Array, values: Array, hidden: npt.NDArray[np.bool_]
) -> tuple[Array, Array]:
    """Attention of [sequences, heads, tokens, d] queries, and its weights.

    hidden: which keys a query does not see, against [sequences, heads, queries, keys].
    """
    scores = queries @ keys.swapaxes(-1, -2)
    scores *= scores.dtype.type(1.0 / math.sqrt(queries.shape[-1]))
    np.copyto(scores, -np.inf, where=hidden)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ values, scores


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
