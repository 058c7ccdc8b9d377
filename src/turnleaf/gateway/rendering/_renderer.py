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
from turnleaf.gateway.rendering._outputs import OutputFormat, Parsed
from turnleaf.gateway.rendering._reader import OutputReader
from turnleaf.gateway.rendering._template import Template
from turnleaf.gateway.rendering.parsers import CallFrame

__all__ = ["Rendered", "Renderer"]


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
    _outputs: OutputFormat

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
        read_messages = parsers.message_parser(tool_call_parser, reasoning_parser, template.source)
        messages_have_calls = read_messages is not None and tool_call_parser != "none"
        if messages_have_calls:
            _check_ends(tokenizer.spelled(parsers.CALL_END) - checkpoint.end_ids, folder)
        outputs = OutputFormat(
            tokenizer=tokenizer,
            stop_ids=stop_ids,
            turn_ends=stop_ids & tokenizer.spelled(template.source),
            parse_calls=parse_calls,
            split_reasoning=parsers.reasoning_parser(reasoning_parser, template.source),
            read_messages=read_messages,
            calls_can_be_read=parse_calls is not None or messages_have_calls,
            parallel_calls=template.parallel_calls,
            opened=opened,
        )
        return cls(
            max_context=checkpoint.max_context,
            stop_ids=stop_ids,
            tokenizer=tokenizer,
            template=template,
            continuations=continuations,
            outputs=outputs,
        )

    @property
    def can_parse_calls(self) -> bool:
        """Whether tool calls in an output can be read."""
        return self._outputs.calls_can_be_read

    @property
    def call_frame(self) -> Callable[[str], CallFrame] | None:
        """How a function's calls are written around their arguments; None if not as JSON."""
        return parsers.call_frame(self._outputs.parse_calls)

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
        silent = self._template.without_reasoning(messages)
        ids = np.array(self._tokenizer.encode(text, shield), dtype=np.int32)
        return Rendered(ids, silent is not None and text_of(silent) != text)

    def holds_reasoning(self, message: Message) -> bool:
        """Whether a message says something that is reasoning to the template."""
        return self._template.holds_reasoning(message)

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
        continued = self._continuations.after(reply, new, tools, reasoning=reasoning, clock=clock)
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
        """Read a finished output as a message; see `OutputFormat.parse`. Never raises.

        prompt: what was sampled from; some templates open the reasoning in some prompts only. None
        is the prompt after a user's message.
        """
        return self._outputs.parse(
            output, tools=tools, finish_reason=finish_reason, matched=matched, prompt=prompt
        )

    def reader(
        self, *, tools: Sequence[Tool] | None, prompt: TokenIds | None, stop: Sequence[str]
    ) -> OutputReader:
        """Read an output while it is sampled; its end is what `parse` makes of the whole.

        stop: all stop strings, the trainer's and the agent's.
        """
        return OutputReader(self._outputs, tools=tools, prompt=prompt, stop=stop)

    def opens_reasoning(self, prompt: TokenIds) -> bool:
        """Whether what is sampled from a prompt begins inside of reasoning."""
        return self._outputs.opens_reasoning(prompt)

    def token_texts(self, ids: TokenIds) -> list[str]:
        """The text of each token; U-FFFD where it is no whole character of its own."""
        return [self._tokenizer.text_of(id_) for id_ in ids.tolist()]

    def decode(self, ids: TokenIds) -> str:
        """The text of tokens, control tokens included."""
        return self._tokenizer.decode(ids.tolist())

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
        return 1 if continued.close and tail and tail[-1] in self._outputs.turn_ends else 0


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


def _check_ends(missing: frozenset[int], folder: Path) -> None:
    """An engine that reads the same files would go on sampling behind a call."""
    if missing:
        raise ContractError(
            f"generation does not end at {parsers.CALL_END}, by the configuration in {folder}, so "
            f"that no call would end: add {min(missing)} to eos_token_id in its "
            "generation_config.json, or set turnleaf.tool_call_parser to none"
        )
