"""An engine that samples what a script says, and keeps a ledger of it."""

import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import numpy as np
import numpy.typing as npt

from turnleaf.adapters.mock._calls import (
    Answer,
    Call,
    Failure,
    Outcome,
    Streaming,
    finish_reason_body,
)
from turnleaf.adapters.mock._ledger import Ledger, LedgerEntry, turn_of
from turnleaf.adapters.mock._replay_data import (
    filters,
    int32_base64,
    kept_ids,
    routed_experts,
    speculation_fields,
    top_p_fields,
)
from turnleaf.adapters.mock._script import Reply, ReplyFunction, Script, parse_reply, parse_script
from turnleaf.adapters.mock._scripted_sample import (
    NOTHING,
    ScriptedSample,
    drop_after,
    event_ends,
    so_far,
    stopped,
)
from turnleaf.core import ContractError, Speculation, TokenIds, WeightSpan
from turnleaf.gateway.engines import PROBE, wants_top_p_ids

__all__ = ["ScriptedEngine", "Tokenizer"]

_REMEMBERED_SEQUENCES = 64


class Tokenizer(Protocol):
    """Text ⇄ ids, control tokens included."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


_PROBE_REPLY = Reply(ids=(0,), finish="length")


class ScriptedEngine:
    """Plays a script to whoever asks, as an SGLang engine would.

    script: replies per rollout, found by the routing key. repeat: the last reply is played on
    when the list is over; otherwise a further call is refused with a 400 that names the rollout
    (a 500 would be retried). stop_token_id: what ends an output and, anywhere in it, cuts it;
    without one nothing is appended. seed: of the made-up log-probabilities. weight_version: may
    be set at any time; calls report what it is when they end. calls: every call that arrived.
    routed_experts_shape: (layers, top_k) of the experts that it makes up for whoever asks; None for
    an engine that knows none. knows_top_p_ids: whether it sends the ids that top-p kept, as SGLang
    does with slime's patch. streaming: may be set at any time. A worker's probe is answered
    with one id unless the script has a reply to it.

    Raises ContractError when the script is not valid.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        stop_token_id: int | None = None,
        repeat: bool = False,
        seed: int = 0,
        ledger: Ledger | None = None,
        routed_experts_shape: tuple[int, int] | None = None,
        knows_top_p_ids: bool = True,
        streaming: Streaming = "cumulative",
    ) -> None:
        self._tokenizer = tokenizer
        self._script = self._parsed(script)
        self._stop_token_id = stop_token_id
        self._repeat = repeat
        self._seed = seed
        self._experts_shape = routed_experts_shape
        self._knows_top_p_ids = knows_top_p_ids
        self.ledger = Ledger() if ledger is None else ledger
        self.streaming: Streaming = streaming
        self.model_path = "scripted"
        self.weight_version = "default"
        self.calls: list[Call] = []
        self._played: Counter[str] = Counter()
        self._running: list[Call] = []
        self._unpaused = anyio.Event()
        self._unpaused.set()
        self._sequences: deque[TokenIds] = deque(maxlen=_REMEMBERED_SEQUENCES)

    def play(self, script: Script) -> None:
        """Begin another script, with an empty ledger and no calls."""
        self._script = self._parsed(script)
        self._played.clear()
        self.ledger = Ledger()
        self.calls = []

    async def generate(self, call: Call) -> Outcome:
        """Play the next reply to a call."""
        self.calls.append(call)
        number = self._played[call.routing_key]
        self._played[call.routing_key] += 1
        replies = self._script.get(call.routing_key, self._script.get("*", []))
        repeat = self._repeat or call.routing_key == PROBE
        if number >= len(replies) and not (replies and repeat):
            return Failure(
                400,
                f"the script has {len(replies)} replies for rollout {call.routing_key!r}, "
                f"but this is its call {number + 1}",
            )
        try:
            reply = self._next_reply(call, replies[min(number, len(replies) - 1)], number)
        except ContractError as error:
            return Failure(400, str(error))
        if reply.fail is not None:
            return Failure(reply.fail, f"the script has rollout {call.routing_key!r} fail here")
        complete = stopped(
            self._scripted(call, reply, number),
            call.sampling,
            stop_token_id=self._stop_token_id,
            decode=None if self._tokenizer is None else self._tokenizer.decode,
        )
        with self._registered(call):
            begun = await self._play(call, reply, complete)
        return self._conclude(call, reply, so_far(call, reply, complete) if begun else NOTHING)

    def _next_reply(self, call: Call, scripted: Reply | ReplyFunction, number: int) -> Reply:
        if isinstance(scripted, Reply):
            return scripted
        where = f"the reply of the script's function to {call.routing_key!r}"
        reply = parse_reply(scripted(call.input_ids, number), where)
        self._check(reply, call.routing_key)
        return reply

    def _parsed(self, script: Script) -> dict[str, list[Reply | ReplyFunction]]:
        parsed = parse_script({PROBE: [_PROBE_REPLY], **script})
        for rollout, replies in parsed.items():
            for reply in replies:
                if isinstance(reply, Reply):
                    self._check(reply, rollout)
        return parsed

    def _check(self, reply: Reply, rollout: str) -> None:
        if reply.text is not None and self._tokenizer is None:
            raise ContractError(
                f"the script of {rollout!r} has a text, but the engine has no tokenizer"
            )
        if reply.logprobs is not None and len(reply.logprobs) != len(self._ids(reply)):
            raise ContractError(
                f"the script of {rollout!r} has {len(reply.logprobs)} log-probabilities for "
                f"{len(self._ids(reply))} ids"
            )

    def _ids(self, reply: Reply) -> list[int]:
        if reply.text is None or self._tokenizer is None:
            return list(reply.ids or ())
        return self._tokenizer.encode(reply.text)

    def abort(self, rid: str) -> None:
        """Abort the calls with that rid; unknown ones are ignored, as SGLang does."""
        for call in self._running:
            if call.rid == rid:
                call.abort()

    def abort_all(self) -> None:
        """Abort every call."""
        for call in self._running:
            call.abort()

    def pause(self, *, abort: bool = True) -> None:
        """Start no calls, and abort those that run or let them."""
        self._unpaused = anyio.Event()
        if abort:
            self.abort_all()

    def resume(self) -> None:
        """Start calls again."""
        self._unpaused.set()

    async def update_weights(self, path: Path, version: str | None) -> None:
        """Take the name of the new weights; a script needs none."""
        self.weight_version = self.weight_version if version is None else version

    @contextmanager
    def _registered(self, call: Call) -> Iterator[None]:
        self._running.append(call)
        try:
            yield
        finally:
            self._running.remove(call)

    async def _play(self, call: Call, reply: Reply, complete: ScriptedSample) -> bool:
        """Return when the reply is due or the call is interrupted: whether sampling began."""
        begun = False
        async with anyio.create_task_group() as tasks:

            async def end_when_interrupted() -> None:
                await call.ended()
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_when_interrupted)
            await self._unpaused.wait()
            begun = True
            await anyio.sleep(reply.delay)
            await self._stream(call, reply, complete)
            if reply.hang:
                await anyio.sleep_forever()
            tasks.cancel_scope.cancel()
        return begun

    async def _stream(self, call: Call, reply: Reply, complete: ScriptedSample) -> None:
        """Send every event but the last one."""
        if call.tell is None:
            return
        for end in event_ends(reply, complete):
            meta_info = {
                "id": call.rid,
                "finish_reason": None,
                "prompt_tokens": len(call.input_ids),
                "completion_tokens": end,
                "cached_tokens": self._cached_tokens(call.input_ids),
                "weight_version": self.weight_version,
            }
            event = self._body(call, reply, complete.cut(end, "length", None), meta_info)
            call.told = end
            await call.tell(event)

    def _body(
        self, call: Call, reply: Reply, sample: ScriptedSample, meta_info: dict[str, Any]
    ) -> dict[str, Any]:
        """A reply of SGLang, or a stream's event, with what it holds of the sample."""
        begin = 0
        if call.tell is not None and self.streaming == "incremental":
            begin = call.told
        ids = sample.ids[begin:]
        tail = [] if begin else call.input_ids[len(call.input_ids) - reply.prompt_tail :].tolist()
        entries = {
            "output_token_logprobs": sample.entries(begin, len(sample.ids)),
            "input_token_logprobs": [],
        }
        return {
            "text": "" if self._tokenizer is None else self._tokenizer.decode(ids),
            "output_ids": tail + ids,
            "meta_info": meta_info | entries,
        }

    def _scripted(self, call: Call, reply: Reply, number: int) -> ScriptedSample:
        ids = self._ids(reply)
        matched = reply.matched
        if reply.finish == "stop" and self._stop_token_id is not None:
            if ids[-1:] != [self._stop_token_id] and matched is None:
                ids.append(self._stop_token_id)
            matched = self._stop_token_id if matched is None else matched
        seeds = [self._seed, zlib.crc32(call.input_ids.tobytes()), number]
        made_up = -np.random.default_rng(seeds).exponential(0.5, len(ids)).astype(np.float32)
        given = list(reply.logprobs or ())
        logprobs = given + [float(value) for value in made_up[len(given) :]]
        return ScriptedSample(ids, logprobs, reply.finish, matched)

    def _conclude(self, call: Call, reply: Reply, sample: ScriptedSample) -> Outcome:
        completion_tokens = len(sample.ids) + reply.mismatch
        answered = not call.gone and drop_after(reply) is None
        cached_tokens = self._cached_tokens(call.input_ids)
        output = np.array(sample.ids, dtype=np.int32)
        path = np.concatenate([call.input_ids, output])
        top_p_ids = self._top_p_ids(call, path) if sample.ids else None
        seen = sample.ids or sample.finish != "abort"
        experts = self._routed_experts(call, path) if seen else None
        speculation = None if reply.speculation is None else Speculation(*reply.speculation)
        if sample.ids:
            self.ledger.append(
                LedgerEntry(
                    rid=call.rid,
                    turn_id=turn_of(call.rid),
                    routing_key=call.routing_key,
                    input_ids=call.input_ids,
                    output_ids=sample.ids,
                    logprobs=sample.logprobs,
                    weight_versions=(WeightSpan(self.weight_version, len(sample.ids)),),
                    finish=sample.finish,
                    completion_tokens=completion_tokens,
                    answered=answered,
                    told=call.told,
                    spoiled=reply.spoil is not None,
                    speculation=speculation,
                    top_p_ids=top_p_ids,
                    routed_experts=experts,
                )
            )
        self._sequences.append(path)
        if not answered:
            return None
        meta_info: dict[str, Any] = {
            "id": call.rid,
            "finish_reason": finish_reason_body(sample.finish, sample.matched, len(sample.ids)),
            "prompt_tokens": len(call.input_ids),
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
            "e2e_latency": reply.delay,
            "weight_version": self.weight_version,
        }
        if top_p_ids is not None:
            meta_info |= top_p_fields(top_p_ids)
        if experts is not None:
            meta_info["routed_experts"] = int32_base64(experts[call.experts_from :])
        if speculation is not None:
            meta_info |= speculation_fields(speculation)
        body = self._body(call, reply, sample, meta_info)
        said = body["meta_info"] | dict(reply.spoil or {})
        body["meta_info"] = {name: value for name, value in said.items() if value is not None}
        return Answer(body)

    def _top_p_ids(self, call: Call, path: TokenIds) -> list[list[int]] | None:
        if not (
            self._knows_top_p_ids and wants_top_p_ids(call.sampling) and filters(call.sampling)
        ):
            return None
        return kept_ids(path, since=len(call.input_ids), seed=self._seed)

    def _routed_experts(self, call: Call, path: TokenIds) -> npt.NDArray[np.int32] | None:
        if self._experts_shape is None or call.experts_from is None:
            return None
        return routed_experts(path[:-1], self._experts_shape, seed=self._seed)

    def _cached_tokens(self, input_ids: TokenIds) -> int:
        """The longest prefix that an earlier call left; the last prompt token is always computed,
        since the first output depends on it."""
        return max((_common(input_ids[:-1], earlier) for earlier in self._sequences), default=0)


def _common(one: TokenIds, other: TokenIds) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
