"""Sampling from a policy: sequences of any age side by side, each with its own keys and values."""

import attrs
import numpy as np

from turnleaf.adapters.mock._policy import (
    Array,
    Policy,
    Rows,
    attend,
    log_softmax,
    normalised,
    split_heads,
)

__all__ = ["Generation", "Sampler"]


@attrs.define(eq=False)
class Generation:
    """A sequence that is being sampled.

    rows: the prompt, then what was sampled, as rows of the policy's vocabulary. logprobs: natural
    log-probabilities of what was sampled, under the temperature; of 0, which takes the likeliest
    token, under temperature 1, as SGLang's are. seed: with one, the draw at each position of the
    sequence is the seed's alone, so that an interrupted generation can be continued.
    """

    rows: list[int]
    temperature: float = 1.0
    seed: int | None = None
    logprobs: list[float] = attrs.field(init=False, factory=list)


class Sampler:
    """Samples one token for every generation in each step.

    What is computed for one generation does not depend on the others. Belongs to one thread at a
    time.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._rng = np.random.default_rng(seed)
        self._joining: list[Generation] = []
        self._running: list[Generation] = []
        self._cache = _empty_cache(policy)

    def join(self, generation: Generation) -> None:
        """Sample for it from the next step on."""
        self._joining.append(generation)

    def leave(self, generation: Generation) -> None:
        """Sample no more for it."""
        if generation in self._joining:
            self._joining.remove(generation)
            return
        freed = self._running.index(generation)
        last = self._running.pop()
        if last is not generation:
            self._running[freed] = last
            used = len(last.rows)
            self._cache[:, :, freed, :, :used] = self._cache[:, :, len(self._running), :, :used]

    def replace(self, policy: Policy) -> None:
        """Sample with other weights of the same shape from the next step on.

        Keys and values are computed anew, so that each log-probability is that of one policy over
        the whole sequence. Raises ValueError for another shape.
        """
        if policy.shape != self._policy.shape:
            raise ValueError("the new weights have another shape or vocabulary")
        self._policy = policy
        self._joining = self._running + self._joining
        self._running = []

    def step(self) -> None:
        """Append a token and its log-probability to every generation."""
        old, new = self._running, self._joining
        self._running, self._joining = old + new, []
        if len(self._running) > self._cache.shape[2]:
            self._cache = _grown(self._cache, 2 * len(self._running))
        logits = []
        if old:
            latest = np.array([generation.rows[-1:] for generation in old])
            ends = np.array([len(generation.rows) for generation in old])
            logits.append(self._logits(slice(0, len(old)), latest, ends - 1, ends))
        if new:
            ends = np.array([len(generation.rows) for generation in new])
            padded = np.zeros((len(new), ends.max()), dtype=np.intp)
            for row, generation in zip(padded, new, strict=True):
                row[: len(generation.rows)] = generation.rows
            slots = slice(len(old), len(self._running))
            logits.append(self._logits(slots, padded, np.zeros_like(ends), ends))
        if logits:
            self._draw(np.concatenate(logits))

    def _logits(self, slots: slice, rows: Rows, starts: Rows, ends: Rows) -> Array:
        """What follows each of the slots' sequences: float[sequences, vocabulary].

        rows: [sequences, tokens], those from each start on, padded; their keys and values are
        kept. ends: length of each sequence.
        """
        p, shape = self._policy.parameters, self._policy.shape
        sequence = np.arange(len(rows))[:, None]
        positions = starts[:, None] + np.arange(rows.shape[1])
        last = (ends - starts)[:, None] - 1
        seen = int(ends.max())
        x = p["embedding"][rows] + p["position"][positions]
        for layer in range(shape.layers):
            normed, _ = normalised(x, p[f"{layer}.attention_norm"])
            heads = [
                split_heads(part, shape.heads)
                for part in np.split(normed @ p[f"{layer}.qkv"], 3, axis=-1)
            ]
            kept = self._cache[layer, :, slots]
            kept[0, sequence, :, positions] = heads[1].swapaxes(1, 2)
            kept[1, sequence, :, positions] = heads[2].swapaxes(1, 2)
            queries, asked = heads[0], positions
            if layer == shape.layers - 1:
                # Only what follows the last token is asked for; the others' keys are enough.
                queries, asked = (
                    np.take_along_axis(queries, last[:, None, :, None], axis=2),
                    positions[sequence, last],
                )
                x = x[sequence, last]
            hidden = np.arange(seen) > asked[:, None, :, None]
            keys, values = kept[:, :, :, :seen]
            mixed, _ = attend(queries, keys, values, hidden)
            x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ p[f"{layer}.mix"]
            normed, _ = normalised(x, p[f"{layer}.mlp_norm"])
            x = x + np.maximum(normed @ p[f"{layer}.up"], 0) @ p[f"{layer}.down"]
        normed, _ = normalised(x[:, 0], p["norm"])
        return normed @ p["head"]

    def _draw(self, logits: Array) -> None:
        temperatures = np.array([generation.temperature for generation in self._running])
        scaled = logits / np.where(temperatures > 0, temperatures, 1)[:, None]
        logprobs = log_softmax(scaled.astype(np.float64))
        cumulative = np.exp(logprobs).cumsum(axis=-1)
        cumulative /= cumulative[:, -1:]
        drawn = self._rng.random(len(logprobs))
        for slot, generation in enumerate(self._running):
            if generation.seed is not None:
                here = generation.seed, len(generation.rows)
                drawn[slot] = np.random.default_rng(here).random()
        chosen = (cumulative <= drawn[:, None]).sum(axis=-1)
        chosen = np.where(temperatures > 0, chosen, logits.argmax(axis=-1))
        for generation, row, scores in zip(self._running, chosen.tolist(), logprobs, strict=True):
            generation.rows.append(row)
            generation.logprobs.append(float(scores[row]))


def _empty_cache(policy: Policy) -> Array:
    """Keys and values: [layers, 2, slots, heads, positions, width of a head]."""
    shape = policy.shape
    size = shape.layers, 2, 0, shape.heads, shape.positions, shape.width // shape.heads
    return np.zeros(size, policy.vector.dtype)


def _grown(cache: Array, slots: int) -> Array:
    size = list(cache.shape)
    size[2] = slots
    grown = np.zeros(size, cache.dtype)
    grown[:, :, : cache.shape[2]] = cache
    return grown
