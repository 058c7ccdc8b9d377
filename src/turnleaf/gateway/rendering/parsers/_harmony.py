"""Harmony, the format of gpt-oss: every output is one or more messages.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>TEXT

The prompt ends in the `<|start|>assistant` of the first. Reasoning is what goes to the analysis
channel, text what goes to the final channel or, without a recipient, to commentary. A call is a
message in commentary to `functions.NAME` that ends in `<|call|>`; the recipient may stand before
the channel or behind it.

Structure is made of control tokens alone, never of text that spells them out.
"""

import re
from collections.abc import Sequence

import attrs

from turnleaf.gateway.rendering.parsers._base import ParsedCall, Piece, Segments
from turnleaf.gateway.rendering.parsers._json_objects import BrokenJson, read_object, skip_space

__all__ = ["CALL_END", "ENDS", "MESSAGE", "START", "call_of", "parse_harmony", "part_of"]

CALL_END = "<|call|>"
"""The token at which generation has to end, as at the end of a turn."""

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", CALL_END)
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: ?to=(?P<before>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?: ?to=(?P<behind>[^\s<]+))?(?: ?(?:<\|constrain\|>)? ?(?P<type>\w+))?\s*"
)
_ADDRESSED = re.compile(
    r"(?:<\|(?:start|channel)\|>(?:(?!<\|message\|>).)*?|\s*)to=", flags=re.DOTALL
)
_FUNCTIONS = "functions."


@attrs.frozen
class _Part:
    """One message as sampled, without its end token. header: None when it breaks the format."""

    raw: str
    header: re.Match[str] | None
    body: str
    end: str

    @property
    def recipient(self) -> str | None:
        return self.header and (self.header["before"] or self.header["behind"])

    @property
    def like_a_call(self) -> bool:
        if self.header is None:
            return _ADDRESSED.match(self.raw) is not None
        return self.recipient is not None


def parse_harmony(pieces: Sequence[Piece], *, calls: bool) -> tuple[str, Segments]:
    """Cut an output into reasoning, and text and calls in order; a line feed parts messages.

    calls: whether to look for calls; otherwise they are text. A message to anyone but a function,
    a call in another channel, with another end or with arguments that are no JSON object, and a
    message without its header stay text, control tokens included.
    """
    reasoning: list[str] = []
    parts: list[str | ParsedCall] = []
    malformed = 0
    messages = _messages(pieces)
    for at, part in enumerate(messages, 1):
        call = call_of(part) if calls else None
        if call is not None:
            parts.append(call)
        elif part.header is None or part.recipient is not None:
            malformed += calls and part.like_a_call
            parts.append(part.raw + (part.end if at < len(messages) else ""))
        elif part.header["channel"] == "analysis":
            reasoning.append(part.body)
        elif part.body:
            beside_text = bool(parts) and isinstance(parts[-1], str)
            parts.append(f"\n{part.body}" if beside_text else part.body)
    return "\n".join(reasoning), Segments(tuple(parts), malformed)


def _messages(pieces: Sequence[Piece]) -> list[_Part]:
    parts: list[_Part] = []
    current: list[Piece] = []
    for piece in pieces:
        if piece.control and piece.text == START and current:
            parts.append(part_of(current, ""))
            current = []
        current.append(piece)
        if piece.control and piece.text in ENDS:
            parts.append(part_of(current[:-1], piece.text))
            current = []
    return [*parts, part_of(current, "")] if current else parts


def part_of(pieces: Sequence[Piece], end: str) -> _Part:
    """The message of these pieces. end: its end token; "" where it has none."""
    raw = "".join(piece.text for piece in pieces)
    at = next((at for at, piece in enumerate(pieces) if piece == Piece(MESSAGE, True)), None)
    plain = "".join("\n" if piece.control else piece.text for piece in pieces[:at])
    if at is None or "<|" in plain:
        return _Part(raw, None, "", end)
    header = _HEADER.fullmatch("".join(piece.text for piece in pieces[:at]))
    if header is not None and header["before"] and header["behind"]:
        header = None
    return _Part(raw, header, "".join(piece.text for piece in pieces[at + 1 :]), end)


def call_of(part: _Part) -> ParsedCall | None:
    """The call that a message is, if it is one."""
    recipient = part.recipient
    if part.header is None or recipient is None or part.header["channel"] != "commentary":
        return None
    name = recipient.removeprefix(_FUNCTIONS)
    if part.end != CALL_END or not name or name == recipient:
        return None
    try:
        start = skip_space(part.body, 0)
        _, end = read_object(part.body, start)
    except BrokenJson:
        return None
    if skip_space(part.body, end) != len(part.body):
        return None
    return ParsedCall(name, part.body[start:end])
