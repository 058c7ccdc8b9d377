"""What a tokenizer's `apply_chat_template` makes of plain data, without its copies of it.

transformers walks through messages and tools up to three times before a template sees them, for
they may hold anything; ours are plain. What else it does to them depends on its version. That is
found out once, by showing a few messages to a template that tells what it was given.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from turnleaf.gateway.rendering._dialect import Message, Tool

__all__ = ["AppliedTemplate"]

logger = logging.getLogger(__name__)

_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": None, "name": "n"},
    *({"role": "assistant", "content": "", name: f"some {name}"} for name in _REASONING),
    {"role": "assistant", "thinking": "one", "reasoning_content": "another", "content": "a"},
    {"role": "assistant", "tool_calls": [{"id": "c", "a": {"b": [None, 1, 1.5, True, "é", {}]}}]},
    {"role": "tool", "content": "", "reasoning_content": "", "tool_call_id": "c"},
)
_PROBE_TOOLS: tuple[Tool, ...] = ({"type": "function", "function": {"a": None, "b": ["é", 1, {}]}},)


class AppliedTemplate:
    """Renders plain data as `tokenizer.apply_chat_template` does.

    Plain data is what JSON can hold, in objects of just these types. arguments: added to every
    rendering. prelude: a text of template language to put before the chat template. direct: whether
    this transformers' way of preparing messages is known; if not, it is left to prepare them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, arguments: Mapping[str, Any], prelude: str
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self._prelude = prelude
        self._variables = {**tokenizer.special_tokens_map, **arguments}
        self._compiled: dict[bool, jinja2.Template] = {}
        self._shown = self._learn()
        self.direct = self._shown is not None
        if not self.direct:
            logger.warning(
                "how transformers %s prepares messages and these template arguments for a chat "
                "template is not known, so every rendering is left to it and takes longer",
                transformers.__version__,
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        prompt: bool,
        more: Mapping[str, Any],
    ) -> str:
        """The text; raises what the template raises.

        prompt: whether it ends with the generation prompt. more: further arguments.
        """
        if self._shown is None:
            return self._applied(messages, tools, self._source(tools), prompt=prompt, more=more)
        compiled = self._compiled.get(tools is None)
        if compiled is None:
            compiled = _compiled(self._source(tools))
            self._compiled[tools is None] = compiled
        return self._direct(compiled, self._shown, messages, tools, prompt=prompt, more=more)

    @property
    def has_another_for_tools(self) -> bool:
        """Whether conversations with tools are rendered by a template of their own."""
        return self._source([*_PROBE_TOOLS]) != self._source(None)

    def _source(self, tools: Sequence[Tool] | None) -> str:
        # A tokenizer may have a template of its own for conversations with tools.
        return self._prelude + str(self._tokenizer.get_chat_template(tools=tools))

    def _applied(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        source: str,
        *,
        prompt: bool,
        more: Mapping[str, Any],
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompt,
            tokenize=False,
            **self._arguments,
            **more,
        )
        return text

    def _direct(
        self,
        compiled: jinja2.Template,
        shown: Callable[[Message], Message],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        prompt: bool,
        more: Mapping[str, Any],
    ) -> str:
        return compiled.render(
            messages=[shown(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **self._variables,
            **more,
        )

    def _learn(self) -> Callable[[Message], Message] | None:
        """What this transformers shows a template of a message; None if that is unknown."""
        if not _is_plain(self._arguments):
            return None
        given = ["messages", "tools", "documents", "add_generation_prompt", *self._variables]
        source = f"{{{{ [{', '.join(given)}] | tojson }}}}"
        tools = list(_PROBE_TOOLS)
        try:
            told = self._applied(_PROBE, tools, source, prompt=True, more={})
            compiled = _compiled(source)
            return next(
                shown
                for shown in (_as_given, _with_aliases)
                if self._direct(compiled, shown, _PROBE, tools, prompt=True, more={}) == told
            )
        except Exception:  # noqa: BLE001
            # Another version of transformers, or an argument that is not plain or no variable.
            return None


def _compiled(source: str) -> jinja2.Template:
    template: jinja2.Template = chat_template_utils._compile_jinja_template(source)
    # Each rendering goes through all of them, which takes Python's chained maps a while.
    template.globals = dict(template.globals)
    return template


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _as_given(message: Message) -> Message:
    return message


def _with_aliases(message: Message) -> Message:
    """Without what is None, and with reasoning under both names that templates read."""
    present = {name: value for name, value in message.items() if value is not None}
    for name in _REASONING:
        if name in present:
            reasoning = present[name]
            return {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return present
