"""What a chat template writes after a sampled reply, without rendering what came before it.

A short conversation stands in for the history: a question, and a reply of the same kind that ends
in a sentinel. What follows the sentinel follows the sampled reply too, provided that the template
does not look further back. That is not believed but proved, for each shape of what follows:
against full renders of other conversations, of one to three turns.
"""

import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from turnleaf.gateway.rendering._control import ControlledTokenizer, Shield
from turnleaf.gateway.rendering._errors import RenderError
from turnleaf.gateway.rendering._template import Message, Template, Tool

__all__ = ["Continuation", "Continuations"]

logger = logging.getLogger(__name__)

_CLOCK = datetime(2024, 2, 3, 4, 5, 6, tzinfo=UTC)
_LONGEST_SHAPE = 32
_MOST_PROOFS = 1024


def _call(position: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    return {"id": f"call{position:05d}", "type": "function", "function": function}


def _tool(name: str) -> Tool:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    function = {"name": name, "description": "A tool to call.", "parameters": parameters}
    return {"type": "function", "function": function}


_QUESTION: Message = {"role": "user", "content": "question"}
_STAND_IN_TOOLS = (_tool("probe"),)
_PROOF_TOOLS = (_tool("first"), _tool("second"))
_UNUSUAL_CONTENTS = ("", ' \n{"a": [1]}\n ')
"""What templates may treat in ways of their own: nothing, whitespace at the edges, JSON."""


@attrs.frozen
class _Part:
    """What a proof distinguishes of a message."""

    role: str
    calls: bool
    reasoning: bool

    @classmethod
    def of(cls, message: Message) -> "_Part":
        return cls(
            message["role"], bool(message.get("tool_calls")), bool(message.get("reasoning_content"))
        )


_Shape = tuple[bool, bool, tuple[_Part, ...]]
"""Whether the reply has calls, whether there are tools, and what follows the reply."""


@attrs.frozen
class _Proof:
    """holds: whether what follows a stand-in history follows real ones. needs_tools: whether the
    stand-in must have tools for that."""

    holds: bool
    needs_tools: bool = True


@attrs.frozen
class Continuation:
    """Text from the end of a reply on, with stand-ins of `shield` in it.

    text: it starts with a control token, and with `close`, the close of the reply's turn, which may
    be empty. keeps_reasoning: whether the template shows the reasoning of the turns before, where
    there is any. shows_reasoning: whether it shows any of what follows.
    """

    text: str
    close: str
    shield: Shield
    keeps_reasoning: bool
    shows_reasoning: bool


class Continuations:
    """Continues replies under one template.

    close: what the template writes after a reply that ends the conversation. Elsewhere it may write
    something else: gpt-oss ends a conversation with `<|return|>`, an answer in the middle of it
    with `<|end|>`, and a call with `<|call|>`. end_ids: the tokens at which generation ends.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: ControlledTokenizer,
        end_ids: frozenset[int],
        where: str,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._sentinel = f"sentinel{secrets.token_hex(16)}"
        self._earlier = f"earlier{secrets.token_hex(16)}"
        self._later = f"later{secrets.token_hex(16)}"
        self._proofs: dict[_Shape, _Proof] = {}
        self.close = self._after_sentinel(self._reply(calls=False), None) or ""
        self._inner_close = self._close_in_the_middle()
        after_call = self._after_sentinel(self._reply(calls=True), _STAND_IN_TOOLS) or ""
        self._call_close = self._close_at_the_end_of(after_call, end_ids)
        self._call_end = (
            None if self._call_close is None else after_call.removesuffix(self._call_close)
        )
        self._prove_common(where)

    def after(
        self,
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        reasoning: bool,
        clock: datetime | None,
    ) -> Continuation | None:
        """What follows `reply` once `new` is said; None when only a full render can tell.

        reasoning: whether there is any in the turns before.
        """
        shape = _shape(reply, new, tools)
        if shape is None:
            return None
        proof = self._proof(shape)
        if not proof.holds:
            return None
        # What a template does with reasoning may depend on whether there are tools.
        needed = proof.needs_tools or reasoning or any(part.reasoning for part in shape[2])
        stand_in_tools = _STAND_IN_TOOLS if tools and needed else None
        return self._continue(reply, new, stand_in_tools, clock, reasoning=reasoning)

    def _continue(
        self,
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        clock: datetime | None,
        *,
        reasoning: bool,
    ) -> Continuation | None:
        calls = reply.get("tool_calls") or ()
        past = [_QUESTION, _with_sentinel(calls, self._sentinel)]
        if reasoning:
            past = self._with_reasoning(past[-1], tools)
        shield = self._tokenizer.shield()
        text = self._render([*past, *new], tools, prompt=True, clock=clock, shield=shield)
        before, found, after = (text or "").partition(self._sentinel)
        end, close = (self._call_end, self._call_close) if calls else ("", self._inner_close)
        if end is None or close is None:
            return None
        if not found or self._sentinel in after or not after.startswith(end):
            return None
        after = after[len(end) :]
        if not after.startswith(close) or self._tokenizer.first_control(after) is None:
            return None
        silent = self._template.without_reasoning(new)
        return Continuation(
            after,
            close,
            shield,
            keeps_reasoning=self._earlier in before and self._later in before,
            shows_reasoning=silent is not None
            and text
            != self._render([*past, *silent], tools, prompt=True, clock=clock, shield=shield),
        )

    def _with_reasoning(self, reply: Message, tools: Sequence[Tool] | None) -> list[Message]:
        """A stand-in history with reasoning in both of its turns."""
        earlier: Message = {"role": "assistant", "content": "answer"}
        middle = _QUESTION
        if tools:
            earlier, middle = _assistant([_call(0, {})]), _tool_result(0, "result")
        return [
            _QUESTION,
            {**earlier, "reasoning_content": self._earlier},
            middle,
            {**reply, "reasoning_content": self._later},
        ]

    def _reply(self, *, calls: bool) -> Message:
        return _with_sentinel([_call(0, {})] if calls else (), self._sentinel)

    def _after_sentinel(
        self, reply: Message, tools: Sequence[Tool] | None, *more: Message
    ) -> str | None:
        text = self._render([_QUESTION, reply, *more], tools, prompt=False)
        return text.partition(self._sentinel)[2] if text else None

    def _close_in_the_middle(self) -> str | None:
        """The close of an answer that something follows; None when that cannot be told."""
        answer: Message = {"role": "assistant", "content": "an answer"}
        followed = [
            self._after_sentinel(self._reply(calls=False), None, message) or ""
            for message in (_QUESTION, answer)
        ]
        if self.close and followed[0].startswith(self.close):
            return self.close
        # Otherwise the one token before every message, which none of them begins with.
        closes = {self._tokenizer.first_control(text) for text in followed}
        close = closes.pop()
        if close is None or None in closes:
            return None
        return "" if closes or self._tokenizer.spelled(close) <= self._opening() else close

    def _opening(self) -> set[int]:
        """The tokens of the generation prompt."""
        asked, prompted = (
            self._tokenizer.encode(self._render([_QUESTION], None, prompt=on) or "")
            for on in (False, True)
        )
        pairs = enumerate(zip(asked, prompted, strict=False))
        begins = next((at for at, (one, other) in pairs if one != other), len(asked))
        return set(prompted[begins:])

    def _close_at_the_end_of(self, after_call: str, end_ids: frozenset[int]) -> str | None:
        """The close of a reply that ends in a call; None when that cannot be told."""
        if after_call.endswith(self.close):
            return self.close if after_call else None
        control = self._tokenizer.last_control(after_call)
        if control is None or not self._tokenizer.spelled(control) <= end_ids:
            return None
        return control + after_call.rpartition(control)[2]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        prompt: bool,
        clock: datetime | None = _CLOCK,
        shield: Shield | None = None,
    ) -> str | None:
        """The text; None when the template refuses these messages."""
        shield = shield or self._tokenizer.shield()
        try:
            return self._template.render(messages, tools, prompt=prompt, clock=clock, shield=shield)
        except RenderError:
            return None

    def _prove_common(self, where: str) -> None:
        user, result = _Part("user", False, False), _Part("tool", False, False)
        common: list[_Shape] = [(False, tools, (user,)) for tools in (False, True)]
        common += [
            (True, True, following)
            for following in ((result,), (result, result), (result, user), (user,))
        ]
        unproved = [shape for shape in common if not self._proof(shape).holds]
        if unproved:
            logger.warning(
                "the chat template of %s rewrites what it wrote before, so some turns are rendered "
                "in full: after %s",
                where,
                "; ".join(
                    f"a reply {'with' if calls else 'without'} calls, "
                    + ", ".join(part.role for part in parts)
                    for calls, _, parts in unproved
                ),
            )

    def _proof(self, shape: _Shape) -> _Proof:
        proof = self._proofs.get(shape)
        if proof is None:
            if len(self._proofs) >= _MOST_PROOFS:
                self._proofs.clear()
            proof = self._proofs[shape] = self._prove(shape)
        return proof

    def _prove(self, shape: _Shape) -> _Proof:
        """Whether a stand-in history and real ones are continued alike, in this shape."""
        with_calls, with_tools, parts = shape
        results = next((n for n, part in enumerate(parts) if part.role != "tool"), len(parts))
        count = max(1, results) if self._template.parallel_calls else 1
        calls = [_call(at, {}) for at in range(count)] if with_calls else []
        reply = _with_sentinel(calls, self._sentinel)
        new = list(_messages_of(parts))
        tools = _PROOF_TOOLS if with_tools else None
        stand_in_tools = _STAND_IN_TOOLS if with_tools else None
        continued, other = (
            self._continue(reply, new, stand_in_tools, _CLOCK, reasoning=reasoning)
            for reasoning in (False, True)
        )
        if continued is None or other is None:
            return _Proof(holds=False)
        if _texts(continued) != _texts(other):
            return _Proof(holds=False)
        end = (self._call_end or "") if with_calls else ""
        proofs = 0
        for history in _histories():
            prompt = self._render(history, tools, prompt=True)
            if prompt is None:
                continue
            for real in (reply, {**reply, "reasoning_content": "a thought"}):
                full = self._render([*history, real, *new], tools, prompt=True)
                before, _, after = (full or "").partition(self._sentinel)
                if after != end + continued.text or not _bare(before).startswith(_bare(prompt)):
                    return _Proof(holds=False)
            proofs += 1
        return _Proof(holds=proofs > 0, needs_tools=with_tools and self._needs_tools(reply, new))

    def _needs_tools(self, reply: Message, new: Sequence[Message]) -> bool:
        """Whether `new` is not proved to follow alike behind a stand-in history without tools."""
        if self._template.has_another_for_tools:
            return True
        for content in (None, *_UNUSUAL_CONTENTS):
            said = new if content is None else [{**each, "content": content} for each in new]
            with_tools, without = (
                self._continue(reply, said, tools, _CLOCK, reasoning=False)
                for tools in (_STAND_IN_TOOLS, None)
            )
            if _texts(with_tools) != _texts(without):
                return True
        return False


def _texts(continued: Continuation | None) -> tuple[str, str] | None:
    return None if continued is None else (continued.text, continued.close)


def _assistant(calls: Sequence[Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _tool_result(position: int, content: str) -> dict[str, Any]:
    identity = {"tool_call_id": f"call{position:05d}", "name": "probe"}
    return {"role": "tool", "content": content, **identity}


def _with_sentinel(calls: Sequence[Any], sentinel: str) -> dict[str, Any]:
    """A reply with these calls, but for their arguments, that ends in the sentinel."""
    if not calls:
        return {"role": "assistant", "content": sentinel}
    arguments: list[dict[str, Any]] = [{} for _ in calls]
    arguments[-1] = {"text": sentinel}
    return _assistant(
        [
            {**call, "function": {**call["function"], "arguments": given}}
            for call, given in zip(calls, arguments, strict=True)
        ]
    )


def _shape(reply: Message, new: Sequence[Message], tools: Sequence[Tool] | None) -> _Shape | None:
    """The shape; None when it is too long to be worth a proof. Runs of like messages count as
    two."""
    parts: list[_Part] = []
    for message in new:
        part = _Part.of(message)
        if parts[-2:] != [part, part]:
            parts.append(part)
        if len(parts) > _LONGEST_SHAPE:
            return None
    return bool(reply.get("tool_calls")), bool(tools), tuple(parts)


def _messages_of(parts: Sequence[_Part]) -> Iterator[Message]:
    results = 0
    for at, part in enumerate(parts):
        results = results + 1 if part.role == "tool" else 0
        if part.role == "tool":
            yield _tool_result(results - 1, f"part {at}")
            continue
        message: dict[str, Any] = {"role": part.role, "content": f"part {at}"}
        if part.calls:
            message["tool_calls"] = [_call(0, {"text": "x"})]
        if part.reasoning:
            message["reasoning_content"] = f"thought {at}"
        yield message


def _histories() -> Iterator[list[Message]]:
    answer: Message = {"role": "assistant", "content": "an answer"}
    system: Message = {"role": "system", "content": "be brief"}
    cycle = [_assistant([_call(0, {"text": "y"})]), _tool_result(0, "a result")]
    yield [_QUESTION]
    yield [_QUESTION, answer, _QUESTION]
    yield [system, _QUESTION, answer, _QUESTION, answer, _QUESTION]
    # Without tools too: an agent may stop offering them.
    yield [_QUESTION, *cycle]
    yield [system, _QUESTION, *cycle, *cycle]


_SCAFFOLD = re.compile(r"</?think>|\s+")


def _bare(text: str) -> str:
    """The text without whitespace and empty reasoning, which never contradict the past."""
    return _SCAFFOLD.sub("", text)
