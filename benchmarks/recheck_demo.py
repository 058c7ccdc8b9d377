"""Recheck a run of `turnleaf demo` without turnleaf.

Reads the run's `samples.jsonl`, the engine's `ledger.jsonl` and `weights/<version>.npz`, and
computes anew what was trained:

- every loss mask, from the ledger alone: a position is trained if an engine call sampled that token
  there, behind exactly those tokens, and in one sample of its rollout only;
- every log-probability, from the weights that sampled the token, with a forward pass of its own;
- every advantage, from the rewards: one vote per rollout, however many leaves it has.

Nothing of turnleaf is imported, so that a mistake there cannot hide here. Exits with 1 when
something differs, and names the first of it.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

NORM_EPSILON = 1e-5  # the policy's RMS norms
AT_ONCE = 64  # sequences of one length
ADVANTAGE_LIMIT = 1e-6


class Wrong(Exception):
    """What does not add up, in one sentence that says where."""


class Sample(NamedTuple):
    """A line of samples.jsonl: one leaf. versions: of the weights of each trained token."""

    line: int
    step: object
    group: object
    rollout: object
    leaf: int
    reward: float
    advantage: float
    turns: tuple
    trained_turns: tuple
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    prompt_length: int
    versions: list

    @property
    def run(self):
        """What names its rollout in the whole run."""
        return self.step, self.group, self.rollout

    def at(self, position=None):
        """Where something is, for a reader."""
        place = f"samples.jsonl line {self.line}, rollout {self.rollout!r}, leaf {self.leaf}"
        return place if position is None else f"{place}, position {position}"


class Call(NamedTuple):
    """A line of ledger.jsonl: one engine call.

    versions: of the weights of each output token. lost: whether nobody got an answer that ended by
    itself, so that the ids may be in no sample.
    """

    line: int
    rid: str
    turn: str
    key: str
    input: np.ndarray
    output: np.ndarray
    logprobs: np.ndarray
    versions: list
    answered: bool
    lost: bool

    @property
    def span(self):
        return slice(len(self.input), len(self.input) + len(self.output))

    def is_in(self, tokens):
        """Whether the tokens hold its output right behind its input."""
        whole = tokens[: self.span.stop]
        return np.array_equal(whole, np.concatenate([self.input, self.output]))


def lines(path):
    """The objects of a file, with their lines' numbers from 1 on."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise Wrong(f"{path.name} line {number} is not JSON: {error}") from None


def expanded(spans):
    """[(version, count), …] → a version for each token."""
    return [str(version) for version, count in spans for _ in range(count)]


def read_samples(path):
    samples = []
    for line, value in lines(path):
        try:
            sample = Sample(
                line=line,
                step=value["step"],
                group=value["group"],
                rollout=value["rollout"],
                leaf=value["leaf"],
                reward=float(value["reward"]),
                advantage=float(value["advantage"]),
                turns=tuple(value["turns"]),
                trained_turns=tuple(value["trained_turns"]),
                tokens=np.array(value["tokens"], dtype=np.int64),
                mask=np.array(value["loss_mask"], dtype=np.int64),
                logprobs=np.array(value["logprobs"], dtype=np.float64),
                prompt_length=value["prompt_length"],
                versions=expanded(value["weight_versions"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Wrong(f"samples.jsonl line {line} is no sample: {error!r}") from None
        check_form(sample)
        samples.append(sample)
    if not samples:
        raise Wrong("samples.jsonl holds no samples")
    return samples


def check_form(sample):
    shapes = {len(sample.tokens), len(sample.mask), len(sample.logprobs)}
    if len(shapes) != 1 or not np.isin(sample.mask, (0, 1)).all():
        raise Wrong(f"{sample.at()}: tokens, loss_mask (0 or 1) and logprobs do not fit together")
    trained = np.flatnonzero(sample.mask)
    if not len(trained) or trained[0] != sample.prompt_length or not sample.prompt_length:
        raise Wrong(f"{sample.at()}: prompt_length is not where the first trained token is")
    if len(sample.versions) != len(trained):
        raise Wrong(
            f"{sample.at()}: weight_versions count {len(sample.versions)} tokens, but "
            f"{len(trained)} are trained"
        )


def read_ledger(path):
    calls = []
    for line, value in lines(path):
        try:
            call = Call(
                line=line,
                rid=value["rid"],
                turn=value["turn_id"],
                key=value["routing_key"],
                input=np.array(value["input_ids"], dtype=np.int64),
                output=np.array(value["output_ids"], dtype=np.int64),
                logprobs=np.array(value["logprobs"], dtype=np.float64),
                versions=expanded((s["version"], s["count"]) for s in value["weight_versions"]),
                answered=value["answered"],
                lost=not value["answered"] or value["finish"] == "abort",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Wrong(f"ledger.jsonl line {line} is no engine call: {error!r}") from None
        if not len(call.output) == len(call.logprobs) == len(call.versions):
            raise Wrong(f"ledger.jsonl line {line} (call {call.rid}): its counts do not fit")
        calls.append(call)
    return calls


def by_rollout(samples, calls):
    """[(a rollout's samples in the order of its leaves, its engine calls), …].

    Its turns' ids lead to a routing key, and that to all of its calls. A rollout without samples
    has an empty list of them.
    """
    key_of = {call.turn: call.key for call in calls}
    calls_of = defaultdict(list)
    for call in calls:
        if not call.key.startswith("eval-"):
            calls_of[call.key].append(call)
    samples_of = defaultdict(list)
    for sample in samples:
        samples_of[sample.run].append(sample)
    rollouts, taken = [], {}
    for leaves in samples_of.values():
        leaves.sort(key=lambda sample: sample.leaf)
        for index, sample in enumerate(leaves):
            if sample.leaf != index:
                raise Wrong(f"{sample.at()}: leaf {index} of this rollout is missing or doubled")
            for turn in sample.trained_turns:
                if turn not in key_of:
                    raise Wrong(f"{sample.at()}: the ledger knows no call of turn {turn}")
        keys = {key_of[turn] for leaf in leaves for turn in leaf.turns if turn in key_of}
        if len(keys) != 1:
            raise Wrong(f"{leaves[0].at()}: its turns are of the rollouts {sorted(keys)}")
        (key,) = keys
        if key not in calls_of or key in taken:
            other = taken.get(key, "an evaluation")
            raise Wrong(f"{leaves[0].at()}: routing key {key!r} is that of {other}, too")
        taken[key] = leaves[0].at()
        rollouts.append((leaves, calls_of[key]))
    return rollouts + [([], of) for key, of in calls_of.items() if key not in taken]


def expected_masks(samples, calls):
    """What the ledger says of one rollout: which call sampled each position that is to be trained.

    Returns a list of calls or None for each sample, and the calls that are in no sample's mask. An
    output is trained in the first leaf that holds it behind its input, and nowhere else.
    """
    named = {turn for sample in samples for turn in sample.trained_turns}
    owners = [[None] * len(sample.tokens) for sample in samples]
    left_out = []
    # Longest first: of two outputs to one prompt, one may be the beginning of the other.
    for call in sorted(calls, key=lambda call: (not call.answered, -len(call.output))):
        free = (
            owner
            for sample, owner in zip(samples, owners, strict=True)
            if call.is_in(sample.tokens) and not any(owner[call.span])
        )
        owner = next(free, None) if call.answered and call.turn in named else None
        if owner is None:
            left_out.append(call)
        else:
            owner[call.span] = [call] * len(call.output)
    return owners, left_out


def check_masks(rollouts):
    """All masks against the ledger. Returns each sample's owners, by line, and what was counted."""
    owners_of, counted = {}, defaultdict(int)
    for samples, calls in rollouts:
        owners, left_out = expected_masks(samples, calls)
        for sample, owner in zip(samples, owners, strict=True):
            expected = np.array([call is not None for call in owner], dtype=np.int64)
            wrong = np.flatnonzero(expected != sample.mask)
            if len(wrong):
                raise Wrong(
                    f"{sample.at(wrong[0])}: loss_mask is {sample.mask[wrong[0]]}, but by the "
                    f"ledger it is {expected[wrong[0]]}"
                )
            turns = {call.turn for call in owner if call is not None}
            if turns != set(sample.trained_turns):
                odd = min(turns ^ set(sample.trained_turns))
                raise Wrong(f"{sample.at()}: trained_turns and the ledger differ in turn {odd}")
            owners_of[sample.line] = owner
            counted["positions"] += len(owner)
            counted["trained"] += int(expected.sum())
        counted["sampled"] += sum(len(call.output) for call in calls)
        for call in left_out:
            if not call.lost:
                raise Wrong(
                    f"ledger.jsonl line {call.line}, call {call.rid} of rollout {call.key!r}: "
                    f"{len(call.output)} sampled ids are trained in no sample"
                )
            counted["lost"] += len(call.output)
    return owners_of, counted


class Weights(NamedTuple):
    """What `weights/<version>.npz` holds.

    Besides the sizes it is one vector. In this order, each row by row: embedding [ids + 1, width],
    whose last row stands for every id that is not in the vocabulary; positions [positions, width];
    for each layer the gain of a norm [width], queries, keys and values [width, 3 width], the output
    of attention [width, width], the gain of a norm [width], up [width, hidden], down
    [hidden, width]; the gain of a norm [width]; the head [width, ids].
    """

    row_of: dict
    heads: int
    embedding: np.ndarray
    position: np.ndarray
    layers: list
    gain: np.ndarray
    head: np.ndarray


def read_weights(path):
    with np.load(path, allow_pickle=False) as stored:
        if int(stored["format"]) != 1:
            raise Wrong(f"weights/{path.name} has a format unknown here")
        ids = stored["vocabulary"].tolist()
        width, hidden = int(stored["width"]), int(stored["hidden"])
        rest = stored["vector"].astype(np.float64)
        positions, layers, heads = (int(stored[n]) for n in ("positions", "layers", "heads"))

    def take(*shape):
        nonlocal rest
        count = int(np.prod(shape))
        if len(rest) < count:
            raise Wrong(f"weights/{path.name} has too few parameters")
        taken, rest = rest[:count].reshape(shape), rest[count:]
        return taken

    weights = Weights(
        row_of={token: row for row, token in enumerate(ids)},
        heads=heads,
        embedding=take(len(ids) + 1, width),
        position=take(positions, width),
        layers=[
            (
                take(width),
                take(width, 3, heads, width // heads),
                take(heads, width // heads, width),
                take(width),
                take(width, hidden),
                take(hidden, width),
            )
            for _ in range(layers)
        ],
        gain=take(width),
        head=take(width, len(ids)),
    )
    if len(rest):
        raise Wrong(f"weights/{path.name} has {len(rest)} parameters too many")
    return weights


def normed(x, gain):
    return gain * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + NORM_EPSILON)


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def log_probabilities(weights, sequences, temperature):
    """float64[sequences, tokens - 1]: of every token but the first, given those before it.

    sequences: int[sequences, tokens]. An id outside the vocabulary has -inf.
    """
    unknown = len(weights.row_of)
    rows = np.array([[weights.row_of.get(t, unknown) for t in ids] for ids in sequences.tolist()])
    tokens = rows.shape[1]
    future = np.arange(tokens)[None, :] > np.arange(tokens)[:, None]
    x = weights.embedding[rows] + weights.position[:tokens]
    for attention_gain, qkv, out, mlp_gain, up, down in weights.layers:
        projected = np.tensordot(normed(x, attention_gain), qkv, axes=1)
        query, key, value = (projected[:, :, part].swapaxes(1, 2) for part in range(3))
        scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[-1])
        mixed = softmax(np.where(future, -np.inf, scores)) @ value
        x = x + np.tensordot(mixed.swapaxes(1, 2), out, axes=2)
        x = x + np.maximum(normed(x, mlp_gain) @ up, 0.0) @ down
    logits = normed(x[:, :-1], weights.gain) @ weights.head / temperature
    peak = logits.max(axis=-1, keepdims=True)
    scores = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
    scores = np.concatenate([scores, np.full((*scores.shape[:2], 1), -np.inf)], axis=-1)
    return np.take_along_axis(scores, rows[:, 1:, None], axis=-1)[..., 0]


def check_logprobs(folder, samples, owners_of, *, temperature, limit):
    """All log-probabilities against the ledger's and the weights'. Returns what was counted."""
    to_score = defaultdict(list)
    for sample in samples:
        owner = owners_of[sample.line]
        trained = np.flatnonzero(sample.mask)
        # The ledger has them as sent, in double precision; a sample holds them in single.
        offered = [owner[p].logprobs[p - len(owner[p].input)] for p in trained]
        versions = [owner[p].versions[p - len(owner[p].input)] for p in trained]
        for place, (position, version) in enumerate(zip(trained, versions, strict=True)):
            if sample.versions[place] != version:
                raise Wrong(
                    f"{sample.at(position)}: sampled by weights {version}, not "
                    f"{sample.versions[place]}"
                )
            if np.float32(sample.logprobs[position]) != np.float32(offered[place]):
                raise Wrong(
                    f"{sample.at(position)}: log-probability {sample.logprobs[position]:.6f}, but "
                    f"the engine's was {offered[place]:.6f}"
                )
        unsampled = np.flatnonzero((sample.mask == 0) & (sample.logprobs != 0))
        if len(unsampled):
            raise Wrong(f"{sample.at(unsampled[0])}: a log-probability that nobody sampled")
        for version in set(versions):
            here = trained[[v == version for v in versions]]
            to_score[version, len(sample.tokens)].append((sample, here))

    counted, worst, loaded = 0, 0.0, {}
    for (version, length), wanted in sorted(to_score.items(), key=lambda item: item[0]):
        if version not in loaded:
            path = folder / "weights" / f"{version}.npz"
            if not path.is_file():
                raise Wrong(f"{wanted[0][0].at()}: there is no weights/{path.name}")
            loaded = {version: read_weights(path)}
        if length > len(loaded[version].position):
            raise Wrong(f"{wanted[0][0].at()}: longer than the policy's longest sequence")
        for start in range(0, len(wanted), AT_ONCE):
            batch = wanted[start : start + AT_ONCE]
            ids = np.stack([sample.tokens for sample, _ in batch])
            scores = log_probabilities(loaded[version], ids, temperature)
            for (sample, here), score in zip(batch, scores, strict=True):
                apart = np.abs(sample.logprobs[here] - score[here - 1])
                if not (apart <= limit).all():
                    first = here[~(apart <= limit)][0]
                    raise Wrong(
                        f"{sample.at(first)}: log-probability {sample.logprobs[first]:.6f}, but "
                        f"weights {version} give {score[first - 1]:.6f}"
                    )
                counted += len(here)
                worst = max(worst, float(apart.max()))
    return {"tokens": counted, "weights": len({version for version, _ in to_score}), "worst": worst}


def check_advantages(samples):
    """All advantages against the rewards. Returns the number of groups."""
    reward_of, groups = {}, defaultdict(set)
    for sample in samples:
        if reward_of.setdefault(sample.run, sample.reward) != sample.reward:
            raise Wrong(f"{sample.at()}: another reward than leaf 0 of its rollout")
        groups[sample.step, sample.group].add(sample.run)
    for sample in samples:
        rewards = [reward_of[run] for run in groups[sample.step, sample.group]]
        expected = sample.reward - sum(rewards) / len(rewards)
        if not abs(sample.advantage - expected) <= ADVANTAGE_LIMIT:
            raise Wrong(
                f"{sample.at()}: advantage {sample.advantage:.6f}, but its group's "
                f"{len(rewards)} rewards give {expected:.6f}"
            )
    return len(groups)


def check_summary(path, samples):
    """What summary.json counts against the samples."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    leaves = Counter(sample.run for sample in samples)
    trained = sum(int(sample.mask.sum()) for sample in samples)
    counted = {
        "leaves": len(samples),
        "forks": sum(number > 1 for number in leaves.values()),
        "trained_tokens": trained,
        "masked_tokens": sum(len(sample.tokens) for sample in samples) - trained,
    }
    for name, value in counted.items():
        if summary.get(name) != value:
            raise Wrong(
                f"summary.json: {name} is {summary.get(name)}, but the samples have {value}"
            )
    if not len(leaves) <= summary["rollouts"] <= len(leaves) + summary["failures"]:
        raise Wrong(
            f"summary.json: {summary['rollouts']} rollouts, but {len(leaves)} have samples and "
            f"{summary['failures']} failed"
        )


def recheck(folder, *, temperature, limit):
    """Print a line for each check that holds; raises Wrong at the first that does not."""
    samples = read_samples(folder / "samples.jsonl")
    calls = read_ledger(folder / "ledger.jsonl")
    rollouts = by_rollout(samples, calls)
    report(
        "samples",
        f"{len(samples)} leaves of {len({sample.run for sample in samples})} rollouts; "
        f"{sum(len(of) for _, of in rollouts)} engine calls",
    )
    owners_of, counted = check_masks(rollouts)
    report(
        "masks",
        f"{counted['positions']} positions equal; of {counted['sampled']} sampled ids "
        f"{counted['trained']} are trained once, {counted['lost']} were lost",
    )
    scored = check_logprobs(folder, samples, owners_of, temperature=temperature, limit=limit)
    report(
        "log-probabilities",
        f"{scored['tokens']} by {scored['weights']} weights; largest difference "
        f"{scored['worst']:.1e} (limit {limit:.0e})",
    )
    report("advantages", f"{check_advantages(samples)} groups, one vote per rollout")
    check_summary(folder / "summary.json", samples)
    report("summary", "counts the same leaves, forks and tokens")


def report(check, text):
    print(f"{check:<18}{text}")


def main():
    parser = argparse.ArgumentParser(description="Recheck a run of `turnleaf demo`.")
    parser.add_argument("run", type=Path, help="the run's folder: runs/<time>")
    parser.add_argument("--temperature", type=float, default=1.0, help="at which it sampled")
    parser.add_argument("--limit", type=float, default=1e-4, help="for log-probabilities")
    arguments = parser.parse_args()
    try:
        recheck(arguments.run, temperature=arguments.temperature, limit=arguments.limit)
    except (Wrong, OSError) as wrong:
        print(f"WRONG: {wrong}")
        raise SystemExit(1) from None
    print("everything holds")


if __name__ == "__main__":
    main()
