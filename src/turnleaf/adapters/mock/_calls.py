"""What every engine here is asked and answers, whatever it samples with."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import anyio
import attrs

from turnleaf.core import FinishReason, TokenIds

__all__ = ["Answer", "Call", "Failure", "MockEngine", "Outcome", "Streaming", "finish_reason_body"]


@attrs.define(eq=False)
class Call:
    """One `/generate` request.

    logprob_start_len: the position from which log-probabilities of the prompt are asked for; -1
    for none. experts_from: the same of routed experts; None for none. tell: sends an event of the
    stream that was asked for, all but the last one; None for an unstreamed call. told: how many
    output tokens the events held whose sending began. aborted, gone: it was aborted; its client
    went away.
    """

    rid: str
    routing_key: str
    input_ids: TokenIds
    sampling: Mapping[str, Any]
    logprob_start_len: int = -1
    experts_from: int | None = None
    tell: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    told: int = 0
    aborted: bool = False
    gone: bool = False
    _ended: anyio.Event = attrs.field(init=False, factory=anyio.Event)

    def abort(self) -> None:
        """End the sampling and answer with what there is."""
        self.aborted = True
        self._ended.set()

    def lose_client(self) -> None:
        """End the sampling; there is nobody to answer."""
        self.gone = True
        self._ended.set()

    def complete(self) -> None:
        """All is sampled."""
        self._ended.set()

    async def ended(self) -> None:
        """Wait until any of these happens."""
        await self._ended.wait()


@attrs.frozen
class Answer:
    """A reply in SGLang's shape; the last event of a streamed call."""

    body: dict[str, Any]


@attrs.frozen
class Failure:
    """An error instead of a reply."""

    status: int
    message: str


Outcome = Answer | Failure | None
"""None: the connection ends without an answer."""


Streaming = Literal["incremental", "cumulative"] | None
"""What each event of a stream holds: what is new, as SGLang's do that was started with
`--incremental-streaming-output`, or everything until then; None: streams are refused."""


class MockEngine(Protocol):
    """What the HTTP app serves. model_path, weight_version: of the weights that sample now."""

    model_path: str
    weight_version: str
    streaming: Streaming

    async def generate(self, call: Call) -> Outcome:
        """Sample for a call until it is complete, aborted, or its client is gone."""
        ...

    def abort(self, rid: str) -> None:
        """Abort the calls with that rid; unknown ones are ignored, as SGLang does."""
        ...

    def abort_all(self) -> None:
        """Abort every call."""
        ...

    def pause(self, *, abort: bool = True) -> None:
        """What a trainer does before it updates weights: abort every call, or hold it up where it
        is; start none."""
        ...

    def resume(self) -> None:
        """Start calls again, and go on with those that were held up."""
        ...

    async def update_weights(self, path: Path, version: str | None) -> None:
        """Sample with the weights in a file from now on; without a version the old name stays.

        Raises ContractError when the file cannot be used.
        """
        ...


def finish_reason_body(
    finish: FinishReason, matched: str | int | None, length: int
) -> dict[str, Any]:
    """`meta_info.finish_reason` of a reply with that many tokens."""
    match finish:
        case "stop":
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": length}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
