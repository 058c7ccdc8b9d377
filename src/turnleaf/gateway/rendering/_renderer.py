"""Messages to token ids and back, under one checkpoint's own tokenizer and chat template."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from turnleaf.core import ContractError, FinishReason, TokenIds
from turnleaf.gateway.rendering import parsers
from turnleaf.gateway.rendering._continuation import Continuation, Continuations
from turnleaf.gateway.rendering._control import ControlledTokenizer
from turnleaf.gateway.rendering._dialect import Message, Tool
from turnleaf.gateway.rendering._errors import RenderError
from turnleaf.gateway.rendering._loading import load_checkpoint
from turnleaf.gateway.rendering._template import Template, without_reasoning
from turnleaf.gateway.rendering.parsers import (
    CallFrame,
    CallParser,
    MessageParser,
    ParsedCall,
    Piece,
    ReasoningParser,
    Segments,
)

__all__ = ["Parsed", "Rendered", "Renderer"]


@attrs.frozen
class Parsed:
    """What an agent is given of an output.

    content, reasoning: text as sampled. calls: in order. malformed: how many regions look like a
    tool call but are cut, break its format, or are more than the template can show in one reply;
    they stayed in `content`.
    """

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    malformed: int


@attrs.frozen(eq=False)
class Rendered:
    """Tokens of a prompt.

    ids: int32[n]. shows_reasoning: they hold reasoning of a message, which the template may omit
    once there are further messages.
    """

    ids: TokenIds
    shows_reasoning: bool


@attrs.frozen(eq=False)
class Renderer:
    """Renders conversations, continues them from sampled tokens, and reads outputs.

    Holds no state of a rollout and may be used from several threads.

    max_context: tokens that the model can hold; None if the checkpoint does not say.
    stop_ids: the tokens that end a turn.
    """

    max_context: int | None
    stop_ids: frozenset[int]
    _tokenizer: ControlledTokenizer
    _template: Template
    _continuations: Continuations
    _turn_ends: frozenset[int]
    _parse_calls: CallParser | None
    _split_reasoning: ReasoningParser | None
    _read_messages: MessageParser | None
    _can_parse_calls: bool
    _opened: str | None

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> "Renderer":
        """Load the renderer of the checkpoint in the folder `model`, never over the network.

        template_arguments: given to the chat template on every rendering. tool_call_parser,
        reasoning_parser: a name of SGLang's, "none", or "auto" to read it off the template.

        Raises ContractError, with the remedy, for a folder without tokenizer or chat template, an
        unknown parser, and a tokenizer or template that cannot be used.
        """
        folder = Path(model)
        checkpoint = load_checkpoint(folder)
        template = Template(checkpoint.tokenizer, template_arguments or {}, str(folder))
        tokenizer = ControlledTokenizer(checkpoint.tokenizer.backend_tokenizer)
        opened = _opened_reasoning(template, tokenizer, folder)
        continuations = Continuations(template, tokenizer, checkpoint.end_ids, str(folder))
        close_ids = tokenizer.encode(continuations.close)
        stop_ids = checkpoint.end_ids | (tokenizer.control_ids & set(close_ids[:1]))
        parse_calls = parsers.call_parser(tool_call_parser, template.source)
        split_reasoning = parsers.reasoning_parser(reasoning_parser, template.source)
        read_messages = parsers.message_parser(tool_call_parser, reasoning_parser, template.source)
        return cls(
            max_context=checkpoint.max_context,
            stop_ids=stop_ids,
            tokenizer=tokenizer,
            template=template,
            continuations=continuations,
            turn_ends=stop_ids & tokenizer.spelled(template.source),
            parse_calls=parse_calls,
            split_reasoning=split_reasoning,
            read_messages=read_messages,
            can_parse_calls=parse_calls is not None
            or (read_messages is not None and tool_call_parser != "none"),
            opened=opened,
        )

    @property
    def can_parse_calls(self) -> bool:
        """Whether tool calls in an output can be read."""
        return self._can_parse_calls

    @property
    def call_frame(self) -> Callable[[str], CallFrame] | None:
        """How a function's calls are written around their arguments; None if not as JSON."""
        return parsers.call_frame(self._parse_calls)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        clock: datetime | None = None,
    ) -> Rendered:
        """The whole conversation and the generation prompt.

        The ids equal the tokenizer's own encoding of the rendered text, except that control tokens
        which a message or tool spells out become ordinary tokens. clock: what the template's
        `strftime_now` tells; None is now. Raises RenderError.
        """
        shield = self._tokenizer.shield()

        def text_of(messages: Sequence[Message]) -> str:
            return self._template.render(messages, tools, prompt=True, clock=clock, shield=shield)

        text = text_of(messages)
        silent = without_reasoning(messages)
        ids = np.array(self._tokenizer.encode(text, shield), dtype=np.int32)
        return Rendered(ids, silent is not None and text_of(silent) != text)

    def extend(
        self,
        reply: Message,
        output: TokenIds,
        new: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        reasoning: bool,
        clock: datetime | None = None,
    ) -> Rendered | None:
        """What follows a path of tokens that ends with the sampled `output`.

        That is: what `output` lacks of the close of its turn, the messages `new`, and the
        generation prompt. reply: the message that `output` was parsed into. reasoning: the path
        holds reasoning, sampled or rendered, that must not outlast the template's.

        None when the path must be rendered anew: the template now omits that reasoning, or it is
        not proved to continue such a conversation without rewriting it. Raises RenderError.
        """
        continued = self._continuations.after(reply, new, tools, clock=clock)
        if continued is None or (reasoning and not continued.keeps_reasoning):
            return None
        ids = self._tokenizer.encode(continued.text, continued.shield)
        added = np.array(ids[self._closed(output, ids, continued) :], dtype=np.int32)
        return Rendered(added, continued.shows_reasoning)

    def parse(
        self,
        output: TokenIds,
        *,
        tools: Sequence[Tool] | None,
        finish_reason: FinishReason,
        matched: str | int | None,
        prompt: TokenIds | None = None,
    ) -> Parsed:
        """Read a finished output as a message. Never raises.

        Works on the text of the whole output. A stop token at its end, and everything from the
        matched stop string on, are not part of the message; other control tokens stay visible.
        Calls are looked for only when there are tools. Between calls, whitespace is dropped.
        prompt: what was sampled from; some templates open the reasoning in some prompts only. None
        is the prompt after a user's message.
        """
        text = self._text_of(output, finish_reason, matched)
        if self._read_messages is not None:
            reasoning, segments = self._read_messages(
                self._pieces_of(output, text, matched), calls=bool(tools) and self._can_parse_calls
            )
            return self._as_message(segments, reasoning, text)
        reasoning = ""
        if self._split_reasoning is not None:
            opened = self._opens_reasoning(prompt)
            if opened and self._opened and not self._opened.endswith("\n"):
                text = text.removeprefix("\n")
            reasoning, text = self._split_reasoning(text, opened)
        if not tools or self._parse_calls is None:
            return Parsed(text, reasoning, (), 0)
        return self._as_message(self._parse_calls(text, tools), reasoning, text)

    def opens_reasoning(self, prompt: TokenIds) -> bool:
        """Whether what is sampled from a prompt begins inside of reasoning."""
        return self._split_reasoning is not None and self._opens_reasoning(prompt)

    def token_texts(self, ids: TokenIds) -> list[str]:
        """The text of each token; U-FFFD where it is no whole character of its own."""
        return [self._tokenizer.decode([id_]) for id_ in ids.tolist()]

    def decode(self, ids: TokenIds) -> str:
        """The text of tokens, control tokens included."""
        return self._tokenizer.decode(ids.tolist())

    def _opens_reasoning(self, prompt: TokenIds | None) -> bool:
        if self._opened is None or prompt is None:
            return self._opened is not None
        # Every token of it has one character at least.
        tail = self._tokenizer.decode(prompt[-len(self._opened) :].tolist())
        return tail.endswith(self._opened)

    def _as_message(self, segments: Segments, reasoning: str, text: str) -> Parsed:
        calls = sum(isinstance(part, ParsedCall) for part in segments.parts)
        if calls > 1 and not self._template.parallel_calls:
            # The conversation could not go on after calls that the template cannot show. Reasoning
            # that the text still holds is not told twice.
            reasoning = "" if reasoning in text else reasoning
            return Parsed(text, reasoning, (), segments.malformed + calls)
        return _message(segments, reasoning)

    def _closed(self, output: TokenIds, ids: Sequence[int], continued: Continuation) -> int:
        """How many of `ids`, which begin with the close, `output` ends with already."""
        controls = self._tokenizer.control_ids
        most = len(self._tokenizer.encode(continued.close)) or 1
        tail = output[-most:].tolist()
        for count in range(len(tail), 0, -1):
            # Only beside a control token do tokens not depend on what is on the other side.
            separable = ids[count - 1] in controls or set(ids[count : count + 1]) <= controls
            if separable and tail[-count:] == ids[:count]:
                return count
        # Another end of a turn stands for the one that the template writes here.
        return 1 if continued.close and tail and tail[-1] in self._turn_ends else 0

    def _pieces_of(self, output: TokenIds, text: str, matched: str | int | None) -> Sequence[Piece]:
        """The pieces of an output whose text is `text`, and the stop token that ended it."""
        ids = output.tolist()
        if ids and ids[-1] in self._turn_ends and not isinstance(matched, str):
            return self._tokenizer.pieces(ids)
        pieces: list[Piece] = []
        at = 0
        for piece in self._tokenizer.pieces(ids):
            kept = piece.text[: max(len(text) - at, 0)]
            at += len(piece.text)
            pieces += [Piece(kept, piece.control and kept == piece.text)] if kept else []
        return pieces

    def _text_of(
        self, output: TokenIds, finish_reason: FinishReason, matched: str | int | None
    ) -> str:
        ids = output.tolist()
        if isinstance(matched, str) and matched:
            text = self._tokenizer.decode(ids)
            at = self._stopped_at(text, ids, matched) if finish_reason == "stop" else -1
            return text if at < 0 else text[:at]
        if ids and (ids[-1] in self.stop_ids or ids[-1] == matched):
            ids.pop()
        return self._tokenizer.decode(ids)

    def _stopped_at(self, text: str, ids: list[int], stop: str) -> int:
        """Where the stop string begins that the last token completed, or else the first; or -1."""
        before = len(self._tokenizer.decode(ids[:-1]))
        at = text.find(stop, max(before - len(stop) + 1, 0))
        return text.find(stop) if at < 0 else at


def _opened_reasoning(
    template: Template, tokenizer: ControlledTokenizer, folder: Path
) -> str | None:
    """The generation prompt's end from an open `<think>` on; None when it opens none."""
    asked = "question"
    question: list[Message] = [{"role": "user", "content": asked}]
    try:
        text = template.render(question, None, prompt=True, clock=None, shield=tokenizer.shield())
    except RenderError as error:
        raise ContractError(
            f"the chat template of {folder} cannot render a single user message: {error}"
        ) from error
    _, opened, rest = text.rpartition(asked)[2].rpartition("<think>")
    return opened + rest if opened and "</think>" not in rest else None


def _message(segments: Segments, reasoning: str) -> Parsed:
    calls = tuple(part for part in segments.parts if isinstance(part, ParsedCall))
    texts = [part for part in segments.parts if isinstance(part, str)]
    if calls:
        texts = [text for text in texts if text.strip()]
        if texts and segments.parts[0] == texts[0]:
            # Line feeds between the text and its first call belong to the call.
            texts[0] = texts[0].rstrip("\n")
    return Parsed("".join(texts), reasoning, calls, segments.malformed)
