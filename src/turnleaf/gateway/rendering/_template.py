"""A checkpoint's chat template, rendered to text by transformers."""

import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerFast

from turnleaf.core import ContractError
from turnleaf.gateway.rendering._applied import AppliedTemplate
from turnleaf.gateway.rendering._control import Shield
from turnleaf.gateway.rendering._dialect import Message, Tool, learn_dialect
from turnleaf.gateway.rendering._errors import RenderError

__all__ = ["Message", "Template", "Tool"]

# transformers only passes plain data to a template, no functions: the clock is passed as the
# texts it shows, and a macro takes the place of strftime_now.
_CLOCK_CALL = re.compile(r"\bstrftime_now\(\s*(?:\"([^\"]*)\"|'([^']*)')\s*\)")
_CLOCK_MACRO = "{%- macro strftime_now(format) %}{{ turnleaf_clock[format] }}{% endmacro %}\n"


class Template:
    """Renders messages to text.

    arguments: what the trainer adds to every rendering, such as `enable_thinking`. Raises
    ContractError when there is no template, or an argument has a name that is taken.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, arguments: Mapping[str, Any], where: str
    ) -> None:
        if not tokenizer.chat_template:
            raise ContractError(
                f"{where} has no chat template; put the model's chat_template.jinja there"
            )
        taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        for name in arguments:
            if name in taken or name in ("messages", "turnleaf_clock"):
                raise ContractError(f"the template argument {name!r} has a name that is taken")
        self.source = "\n".join(
            tokenizer.chat_template.values()
            if isinstance(tokenizer.chat_template, dict)
            else [tokenizer.chat_template]
        )
        self._clock_formats = [
            double or single for double, single in _CLOCK_CALL.findall(self.source)
        ]
        if len(self._clock_formats) != self.source.count("strftime_now("):
            raise ContractError(
                f"the chat template of {where} computes the format it gives to strftime_now, so "
                "its clock cannot be frozen; write the format as a literal"
            )
        self._applied = AppliedTemplate(
            tokenizer, arguments, _CLOCK_MACRO if self._clock_formats else ""
        )
        self._dialect = learn_dialect(self._text_or_none)

    @property
    def has_another_for_tools(self) -> bool:
        """Whether conversations with tools are rendered by a template of their own."""
        return self._applied.has_another_for_tools

    @property
    def parallel_calls(self) -> bool:
        """Whether it can show a reply with several calls."""
        return self._dialect.parallel_calls

    def holds_reasoning(self, message: Message) -> bool:
        """Whether it says something that is reasoning to the template, which may omit it later."""
        silent = self._dialect.without_reasoning(message)
        return any(
            text.strip() and text != silent.get(name)
            for name in ("reasoning_content", "content")
            if (text := message.get(name) or "")
        )

    def without_reasoning(self, messages: Sequence[Message]) -> list[Message] | None:
        """The messages without what was thought in them; None when that changes nothing."""
        silent = [self._dialect.without_reasoning(message) for message in messages]
        return None if silent == list(messages) else silent

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        prompt: bool,
        clock: datetime | None,
        shield: Shield,
    ) -> str:
        """The text of a conversation, with stand-ins of `shield` in it.

        prompt: whether it ends with the generation prompt. clock: what `strftime_now` tells; None
        is now. Raises RenderError.
        """
        if not messages:
            raise RenderError("there are no messages")
        try:
            return self._text(
                shield.cover(self._dialect.spell(messages)),
                shield.cover(tools) if tools else None,
                prompt=prompt,
                clock=clock,
            )
        except Exception as error:  # a template is a program over anyone's data
            raise RenderError(
                f"the chat template cannot render these messages: {shield.restore(str(error))}"
            ) from error

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        prompt: bool,
        clock: datetime | None,
    ) -> str:
        clock_texts: dict[str, Any] = {}
        if self._clock_formats:
            told = clock or datetime.now()
            texts = {format_: told.strftime(format_) for format_ in self._clock_formats}
            clock_texts["turnleaf_clock"] = texts
        return self._applied.render(messages, tools, prompt=prompt, more=clock_texts)

    def _text_or_none(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        try:
            return self._text(messages, tools, prompt=True, clock=None)
        except Exception:  # noqa: BLE001
            # Whatever a template raises, it refuses these messages.
            return None
