"""Scoring sequences with a policy and learning from them: gradients by hand, and Adam."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from turnleaf.adapters.mock._policy import (
    Array,
    Policy,
    Rows,
    attend,
    log_softmax,
    normalised,
    split_heads,
)

__all__ = ["Learner", "TrainingSample", "UpdateReport", "loss_and_gradient", "sequence_logprobs"]

_AT_ONCE = 16  # sequences; more no longer fit a core's cache
_ADAM_EPSILON = 1e-8


@attrs.frozen(eq=False)
class TrainingSample:
    """One token sequence to learn from; a leaf has the same fields.

    tokens: int[n], ids. loss_mask: bool[n], which of them are trained; never the first.
    logprobs: float[n], those of the trained tokens when they were sampled. weight: of each trained
    token in the loss: the rollout's advantage / the rollout's trained tokens, in the usual case.
    """

    tokens: npt.NDArray[np.integer[Any]]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: Array
    weight: float


@attrs.frozen
class UpdateReport:
    """What an update did. loss, gradient_norm: before it. tokens: trained. clipped: of these, how
    many had no gradient. max_logprob_difference: between the policy before the update and the
    sample's own log-probabilities."""

    loss: float
    gradient_norm: float
    tokens: int
    clipped: int
    max_logprob_difference: float


class Learner:
    """Adam on a policy, whose parameters it changes in place.

    temperature: at which the samples were taken. clip: how far the probability of a token may move
    from the sampled one in the direction of its weight (PPO's clip, so that a batch can be used
    more than once); None: the loss is the weighted negative log-likelihood.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        temperature: float = 1.0,
        clip: float | None = None,
    ) -> None:
        self.policy = policy
        self.learning_rate = learning_rate
        self._betas = betas
        self._temperature = temperature
        self._clip = clip
        self._mean = np.zeros_like(policy.vector)
        self._square = np.zeros_like(policy.vector)
        self._updates = 0

    def update(self, samples: Sequence[TrainingSample]) -> UpdateReport:
        """One step down the gradient of the samples' loss; raises as `loss_and_gradient` does."""
        gradient, report = loss_and_gradient(
            self.policy, samples, temperature=self._temperature, clip=self._clip
        )
        self._updates += 1
        first, second = self._betas
        self._mean += (1 - first) * (gradient - self._mean)
        self._square += (1 - second) * (gradient**2 - self._square)
        mean = self._mean / (1 - first**self._updates)
        root = np.sqrt(self._square / (1 - second**self._updates))
        self.policy.vector -= self.learning_rate * mean / (root + _ADAM_EPSILON)
        return report


def sequence_logprobs(
    policy: Policy,
    sequences: Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]],
    temperature: float = 1.0,
) -> list[Array]:
    """Natural log-probability of every token of each sequence of ids, in the sequence.

    float[n] each: nan for the first token, which follows nothing, and -inf for ids that the policy
    does not know. Raises ValueError for a sequence that is empty or too long.
    """
    results: list[Array] = [np.empty(0)] * len(sequences)
    for numbers, rows in _batches(policy, sequences):
        logits, _ = _forward(policy, rows)
        logprobs = log_softmax(logits[:, :-1] / logits.dtype.type(temperature))
        unknown = np.full((*logprobs.shape[:2], 1), -np.inf, logprobs.dtype)
        logprobs = np.concatenate([logprobs, unknown], axis=-1)
        chosen = np.take_along_axis(logprobs, rows[:, 1:, None], axis=-1)[..., 0]
        for number, scores in zip(numbers, chosen, strict=True):
            results[number] = np.concatenate([[np.nan], scores[: len(sequences[number]) - 1]])
    return results


def loss_and_gradient(
    policy: Policy,
    samples: Sequence[TrainingSample],
    *,
    temperature: float = 1.0,
    clip: float | None = None,
) -> tuple[Array, UpdateReport]:
    """The gradient of the samples' loss in the policy's parameters, as a vector like theirs.

    With p a token's probability at the temperature, q the one it was sampled with and w its
    weight, the loss is, summed over the trained tokens,

        clip None   -w log p
        clip c      -min(w r, w clip(r, 1 - c, 1 + c)) with r = p / q

    whose gradients are the same where p = q. Raises ValueError when a sample is empty, too long,
    or trains its first token or an id that the policy does not know.
    """
    gradient = np.zeros_like(policy.vector)
    views = policy.views(gradient)
    loss = difference = 0.0
    tokens = clipped = 0
    for numbers, rows in _batches(policy, [sample.tokens for sample in samples]):
        mask, old, weight = _trained(rows, [samples[number] for number in numbers])
        where, position = np.nonzero(mask)
        target = rows[where, position]
        if (position == 0).any() or (target == len(policy.shape.vocabulary)).any():
            raise ValueError("a sample trains its first token, or one that the policy cannot say")
        logits, layers = _forward(policy, rows)
        logprobs = log_softmax(logits[where, position - 1] / logits.dtype.type(temperature))
        each = np.arange(len(target))
        chosen = logprobs[each, target].astype(np.float64)
        moved, weight = chosen - old[mask], weight[mask]
        if clip is None:
            loss -= float(weight @ chosen)
            slope = -weight
        else:
            ratio = np.exp(moved)
            bounded = weight * np.clip(ratio, 1 - clip, 1 + clip)
            free = weight * ratio <= bounded
            loss -= float(np.minimum(weight * ratio, bounded).sum())
            slope = np.where(free, -weight * ratio, 0.0)
            clipped += int(np.count_nonzero(~free))
            difference = max(difference, float(np.abs(moved).max(initial=0.0)))
        tokens += len(target)
        towards = -np.exp(logprobs)
        towards[each, target] += 1
        upstream = np.zeros_like(logits)
        upstream[where, position - 1] = towards * (slope / temperature)[:, None]
        _backward(policy, rows, upstream, layers, views)
    norm = float(np.linalg.norm(gradient))
    return gradient, UpdateReport(loss, norm, tokens, clipped, difference)


def _batches(
    policy: Policy, sequences: Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]]
) -> Iterator[tuple[list[int], Rows]]:
    """Sequences of about the same length: their numbers, and their rows, padded at the end."""
    lengths = [len(sequence) for sequence in sequences]
    if lengths and not 0 < min(lengths) <= max(lengths) <= policy.shape.positions:
        raise ValueError(
            f"sequences have from {min(lengths)} to {max(lengths)} tokens, but the policy takes "
            f"from 1 to {policy.shape.positions}"
        )
    order = sorted(range(len(sequences)), key=lengths.__getitem__)
    for start in range(0, len(order), _AT_ONCE):
        numbers = order[start : start + _AT_ONCE]
        rows = np.zeros((len(numbers), lengths[numbers[-1]]), dtype=np.intp)
        for row, number in zip(rows, numbers, strict=True):
            row[: lengths[number]] = policy.rows(sequences[number])
        yield numbers, rows


def _trained(
    rows: Rows, samples: Sequence[TrainingSample]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mask, old log-probabilities and weights, padded like the rows."""
    mask = np.zeros(rows.shape, dtype=np.bool_)
    old = np.zeros(rows.shape)
    weight = np.zeros(rows.shape)
    for index, sample in enumerate(samples):
        length = len(sample.tokens)
        mask[index, :length] = sample.loss_mask
        old[index, :length] = sample.logprobs
        weight[index] = sample.weight
    return mask, old, weight


@attrs.frozen(eq=False)
class _Norm:
    """A norm's input, the reciprocal of its root mean square, and its output."""

    x: Array
    scale: Array
    y: Array


@attrs.frozen(eq=False)
class _Layer:
    """What the backward pass needs of a layer's forward pass."""

    attention_norm: _Norm
    queries: Array
    keys: Array
    values: Array
    attention: Array
    mixed: Array
    mlp_norm: _Norm
    up: Array


def _forward(policy: Policy, rows: Rows) -> tuple[Array, tuple[list[_Layer], _Norm]]:
    """Logits, float[sequences, tokens, vocabulary], of what follows each token."""
    p, shape = policy.parameters, policy.shape
    tokens = rows.shape[1]
    hidden = ~np.tri(tokens, dtype=np.bool_)
    x = p["embedding"][rows] + p["position"][:tokens]
    layers = []
    for layer in range(shape.layers):
        attention_norm = _norm(x, p[f"{layer}.attention_norm"])
        queries, keys, values = (
            split_heads(part, shape.heads)
            for part in np.split(attention_norm.y @ p[f"{layer}.qkv"], 3, axis=-1)
        )
        mixed, attention = attend(queries, keys, values, hidden)
        mixed = _merge_heads(mixed)
        x = x + mixed @ p[f"{layer}.mix"]
        mlp_norm = _norm(x, p[f"{layer}.mlp_norm"])
        up = np.maximum(mlp_norm.y @ p[f"{layer}.up"], 0)
        x = x + up @ p[f"{layer}.down"]
        layers.append(_Layer(attention_norm, queries, keys, values, attention, mixed, mlp_norm, up))
    norm = _norm(x, p["norm"])
    return norm.y @ p["head"], (layers, norm)


def _backward(
    policy: Policy,
    rows: Rows,
    upstream: Array,
    saved: tuple[list[_Layer], _Norm],
    gradient: dict[str, Array],
) -> None:
    """Add the parameters' gradient, given the loss's in the logits."""
    p, shape = policy.parameters, policy.shape
    layers, norm = saved
    dx = _linear_backward(upstream, norm.y, "head", p, gradient)
    dx = _norm_backward(dx, norm, "norm", p, gradient)
    for layer in reversed(range(shape.layers)):
        kept = layers[layer]
        dup = _linear_backward(dx, kept.up, f"{layer}.down", p, gradient)
        dup *= kept.up > 0
        dnormed = _linear_backward(dup, kept.mlp_norm.y, f"{layer}.up", p, gradient)
        dx = dx + _norm_backward(dnormed, kept.mlp_norm, f"{layer}.mlp_norm", p, gradient)

        dmixed = _linear_backward(dx, kept.mixed, f"{layer}.mix", p, gradient)
        dqkv = _attention_backward(split_heads(dmixed, shape.heads), kept)
        dnormed = _linear_backward(dqkv, kept.attention_norm.y, f"{layer}.qkv", p, gradient)
        dx = dx + _norm_backward(
            dnormed, kept.attention_norm, f"{layer}.attention_norm", p, gradient
        )
    one_hot = np.eye(len(shape.vocabulary) + 1, dtype=dx.dtype)[rows]
    gradient["embedding"] += _flat(one_hot).T @ _flat(dx)
    gradient["position"][: rows.shape[1]] += dx.sum(axis=0)


def _linear_backward(
    dy: Array, x: Array, name: str, p: dict[str, Array], gradient: dict[str, Array]
) -> Array:
    gradient[name] += _flat(x).T @ _flat(dy)
    dx: Array = dy @ p[name].T
    return dx


def _norm(x: Array, gain: Array) -> _Norm:
    y, scale = normalised(x, gain)
    return _Norm(x, scale, y)


def _norm_backward(
    dy: Array, norm: _Norm, name: str, p: dict[str, Array], gradient: dict[str, Array]
) -> Array:
    gradient[name] += np.einsum("std,std->d", dy, norm.x * norm.scale)
    dy = dy * p[name]
    along = np.einsum("std,std->st", dy, norm.x)[..., None] / norm.x.shape[-1]
    dx: Array = norm.scale * dy - norm.x * (norm.scale**3 * along)
    return dx


def _attention_backward(dmixed: Array, kept: _Layer) -> Array:
    """The gradient in queries, keys and values side by side, given that in the heads' outputs."""
    dscores = dmixed @ kept.values.swapaxes(-1, -2)
    dscores -= np.einsum("shqk,shqk->shq", dscores, kept.attention)[..., None]
    dscores *= kept.attention
    dscores *= dscores.dtype.type(kept.queries.shape[-1] ** -0.5)
    parts = (
        dscores @ kept.keys,
        dscores.swapaxes(-1, -2) @ kept.queries,
        kept.attention.swapaxes(-1, -2) @ dmixed,
    )
    return np.concatenate([_merge_heads(part) for part in parts], axis=-1)


def _merge_heads(x: Array) -> Array:
    """[sequences, heads, tokens, d] → [sequences, tokens, heads · d]."""
    sequences, heads, tokens, width = x.shape
    return x.swapaxes(1, 2).reshape(sequences, tokens, heads * width)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
