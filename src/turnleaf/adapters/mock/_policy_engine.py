"""An engine that samples with a policy: what runs is sampled together, one token in each step."""

import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs

from turnleaf.adapters.mock._calls import (
    Answer,
    Call,
    Failure,
    Outcome,
    Streaming,
    finish_reason_body,
)
from turnleaf.adapters.mock._ledger import Ledger, LedgerEntry, turn_of
from turnleaf.adapters.mock._policy import Policy
from turnleaf.adapters.mock._policy_sampling import Generation, Sampler
from turnleaf.adapters.mock._policy_training import sequence_logprobs
from turnleaf.core import ContractError, FinishReason, WeightSpan

__all__ = ["PolicyEngine"]

_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "stop": ([], ""),
    "stop_regex": ([], ""),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "n": (1,),
}
"""Sampling parameters that are refused, unless they are null or have no effect."""


@attrs.define(eq=False)
class _Sampling:
    """A call under way. limit: the sequence's length at which it is cut. versions: of the weights
    that sampled each output token."""

    call: Call
    generation: Generation
    limit: int
    stop_rows: frozenset[int]
    versions: list[str] = attrs.field(init=False, factory=list)
    finish: FinishReason | None = attrs.field(init=False, default=None)

    def advance(self, version: str) -> bool:
        """Take note of a sampled token; whether it was the last. SGLang's order of checks."""
        self.versions.append(version)
        if len(self.generation.rows) >= self.limit:
            self.finish = "length"
        elif self.generation.rows[-1] in self.stop_rows:
            self.finish = "stop"
        return self.finish is not None


class PolicyEngine:
    """Samples with a policy, as an SGLang engine would with a checkpoint.

    stop_token_id: what ends an output, besides a request's `stop_token_ids` (not with
    `ignore_eos`). seed: of every draw that has no `sampling_seed` of its own. Of the sampling
    parameters, those that change probabilities in another way than `temperature` are refused with
    a 400 that names them. Replies have no text: the policy knows ids only.

    An update of weights takes effect between two steps, also for the calls that are running; the
    log-probability of a token is that of the weights that sampled it, over the whole sequence.

    Nothing is streamed. Samples only while `sampling()` is open.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        stop_token_id: int,
        seed: int = 0,
        ledger: Ledger | None = None,
        model_path: str = "policy",
        weight_version: str = "default",
    ) -> None:
        self._policy = policy
        self._sampler = Sampler(policy, seed)
        self._stop_token_id = stop_token_id
        self.ledger = Ledger() if ledger is None else ledger
        self.model_path = model_path
        self.weight_version = weight_version
        self.streaming: Streaming = None
        self._waiting: list[_Sampling] = []
        self._running: list[_Sampling] = []
        self._between_steps = anyio.Lock()
        self._paused = False
        self._due = anyio.Event()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Sample for the calls that come, until the context is left."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sample)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def generate(self, call: Call) -> Outcome:
        """Sample for a call, or score its prompt."""
        started = anyio.current_time()
        try:
            sampling = self._begun(call)
        except ValueError as error:
            return Failure(400, str(error))
        if len(sampling.generation.rows) < sampling.limit:
            self._waiting.append(sampling)
            self._due.set()
            await call.ended()
        scored: list[list[Any]] = []
        if sampling.finish is None or call.logprob_start_len == 0:
            async with self._between_steps:
                self._end(sampling)
                if call.logprob_start_len == 0:
                    scored = await anyio.to_thread.run_sync(_scored, self._policy, call)
        return self._conclude(sampling, scored, anyio.current_time() - started)

    def abort(self, rid: str) -> None:
        """Abort the calls with that rid; unknown ones are ignored, as SGLang does."""
        for sampling in self._waiting + self._running:
            if sampling.call.rid == rid:
                sampling.call.abort()

    def abort_all(self) -> None:
        """Abort every call."""
        for sampling in self._waiting + self._running:
            sampling.call.abort()

    def pause(self, *, abort: bool = True) -> None:
        """Sample nothing until `resume`; end the calls that run, or keep them."""
        self._paused = True
        if abort:
            self.abort_all()

    def resume(self) -> None:
        """Sample again."""
        self._paused = False
        self._due.set()

    async def update_weights(self, path: Path, version: str | None) -> None:
        """Sample with the weights in a file from the next step on; without a version the old name
        stays. Raises ContractError when the file holds no weights, or some of another shape."""
        policy = await anyio.to_thread.run_sync(Policy.load, path)
        async with self._between_steps:
            try:
                self._sampler.replace(policy)
            except ValueError as error:
                raise ContractError(f"the weights {path} cannot be used: {error}") from None
            self._policy = policy
            self.model_path = str(path)
            self.weight_version = self.weight_version if version is None else version

    async def _sample(self) -> None:
        while True:
            await self._due.wait()
            async with self._between_steps:
                if self._paused or not (self._waiting or self._running):
                    self._due = anyio.Event()
                    continue
                # Here, and not when they come: the sampler is another thread's during a step.
                for sampling in self._waiting:
                    self._sampler.join(sampling.generation)
                self._running += self._waiting
                self._waiting = []
                await anyio.to_thread.run_sync(self._sampler.step)
                for sampling in tuple(self._running):
                    if sampling.advance(self.weight_version):
                        self._end(sampling)
                        sampling.call.complete()

    def _end(self, sampling: _Sampling) -> None:
        if sampling in self._waiting:
            self._waiting.remove(sampling)
        elif sampling in self._running:
            self._running.remove(sampling)
            self._sampler.leave(sampling.generation)

    def _begun(self, call: Call) -> _Sampling:
        """Raises ValueError, naming the parameter, for a call that cannot be answered."""
        given = {name: value for name, value in call.sampling.items() if value is not None}
        for name, neutral in _NEUTRAL.items():
            if name in given and given[name] not in neutral:
                raise ValueError(f"sampling_params.{name}: the policy samples without")
        temperature = given.get("temperature", 1.0)
        if type(temperature) not in (int, float) or not 0 <= temperature < math.inf:
            raise ValueError(f"sampling_params.temperature: {temperature!r} is no temperature")
        seed = given.get("sampling_seed")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise ValueError(f"sampling_params.sampling_seed: {seed!r} is no seed")
        stop_ids = given.get("stop_token_ids", [])
        if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
            raise ValueError("sampling_params.stop_token_ids: not a list of ids")
        if not given.get("ignore_eos"):
            stop_ids = [*stop_ids, self._stop_token_id]
        rows = self._policy.rows(call.input_ids)
        asked = given.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
        room = self._policy.shape.positions - len(rows)
        if room < min(asked, 1):
            raise ValueError(
                f"input_ids: {len(rows)} tokens leave no room for an output in the "
                f"{self._policy.shape.positions} that the policy takes"
            )
        unknown = len(self._policy.shape.vocabulary)
        return _Sampling(
            call=call,
            generation=Generation(rows, float(temperature), seed),
            limit=len(rows) + min(asked, room),
            stop_rows=frozenset(self._policy.rows(stop_ids)) - {unknown},
        )

    def _conclude(self, sampling: _Sampling, scored: list[list[Any]], seconds: float) -> Outcome:
        call, generation = sampling.call, sampling.generation
        vocabulary = self._policy.shape.vocabulary
        ids = [vocabulary[row] for row in generation.rows[len(call.input_ids) :]]
        interrupted = call.aborted or call.gone
        finish = sampling.finish or ("abort" if interrupted else "length")
        spans = [
            WeightSpan(version, len([*tokens])) for version, tokens in groupby(sampling.versions)
        ]
        if ids:
            self.ledger.append(
                LedgerEntry(
                    rid=call.rid,
                    turn_id=turn_of(call.rid),
                    routing_key=call.routing_key,
                    input_ids=call.input_ids,
                    output_ids=ids,
                    logprobs=generation.logprobs,
                    weight_versions=spans,
                    finish=finish,
                    completion_tokens=len(ids),
                    answered=not call.gone,
                )
            )
        if call.gone:
            return None
        matched = ids[-1] if finish == "stop" else None
        meta_info = {
            "id": call.rid,
            "finish_reason": finish_reason_body(finish, matched, len(ids)),
            "prompt_tokens": len(call.input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "e2e_latency": seconds,
            "weight_version": spans[-1].version if spans else self.weight_version,
            "output_token_logprobs": [
                [logprob, token_id, None]
                for logprob, token_id in zip(generation.logprobs, ids, strict=True)
            ],
            "input_token_logprobs": scored,
        }
        if len(spans) > 1:
            meta_info["weight_versions"] = [*_half_open(spans)]
        return Answer({"text": "", "output_ids": ids, "meta_info": meta_info})


def _scored(policy: Policy, call: Call) -> list[list[Any]]:
    """`input_token_logprobs`, at temperature 1 as SGLang's are; null for the first token and for
    one that the policy does not know."""
    (logprobs,) = sequence_logprobs(policy, [call.input_ids])
    return [
        [logprob if math.isfinite(logprob) else None, token_id, None]
        for logprob, token_id in zip(logprobs.tolist(), call.input_ids.tolist(), strict=True)
    ]


def _half_open(spans: list[WeightSpan]) -> Iterator[dict[str, Any]]:
    start = 0
    for span in spans:
        yield {"version": span.version, "start": start, "end": start + span.count}
        start += span.count
