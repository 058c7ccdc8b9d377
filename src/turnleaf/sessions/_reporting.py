"""What is said about a failure: where it happened, never the rollout's secret."""

import traceback
from collections.abc import Mapping
from typing import Any, Self

import attrs

from turnleaf.core import described

__all__ = ["BODY_BYTES", "Redaction", "describe", "kind_of"]

EXCERPT = 500
"""How many characters of a foreign text an error message takes."""

BODY_BYTES = 64 * 1024
"""How much of a foreign body is looked at for them."""


@attrs.frozen
class Redaction:
    """Keeps a payload's API key out of error texts and of the exceptions chained to them."""

    secret: str | None = attrs.field(repr=False)

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Self:
        """The redaction of `payload["_config"]["api_key"]`; of nothing when there is none."""
        config = payload.get("_config")
        secret = config.get("api_key") if isinstance(config, Mapping) else None
        return cls(secret if isinstance(secret, str) and secret else None)

    def text(self, text: str) -> str:
        """`text` on one line, without the secret, cut to an excerpt."""
        text = self._line(text)
        return text if len(text) <= EXCERPT else text[:EXCERPT] + "…"

    def failure(self, text: str) -> str:
        """`text` of an exception and its traceback, which says at its end where it was raised: cut
        in the middle, to an excerpt of either end."""
        text = self._line(text)
        if len(text) <= 2 * EXCERPT:
            return text
        return f"{text[:EXCERPT]} … {text[-EXCERPT:]}"

    def _line(self, text: str) -> str:
        if self.secret is not None:
            text = text.replace(self.secret, "[api_key]")
        return " ".join(text.split())

    def body(self, body: bytes) -> str:
        """`text` of the first BODY_BYTES of a body, of which the rest may be absent."""
        text = body[:BODY_BYTES].decode("utf-8", "replace")
        if self.secret is not None and len(body) > BODY_BYTES:
            # The cut may have left a piece of the secret, which is shorter than the whole.
            text = text.replace(self.secret, "[api_key]")[: -len(self.secret)]
        return self.text(text)

    def cause(self, error: BaseException) -> BaseException | None:
        """The exception to chain: `error`, or None when its printed form holds the secret."""
        if self.secret is None:
            return error
        try:
            printed = "".join(traceback.format_exception(error))
        except Exception:  # noqa: BLE001  # groups within groups can be too deep for it
            return None
        return None if self.secret in printed else error


def describe(error: BaseException, file: str | None) -> str:
    """An exception's type, the innermost place that it passed in `file`, and its message.

    The innermost place anywhere when it did not pass `file`. Of a group, its first member.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    own = own or [frame for frame in frames if not frame.filename.startswith("<frozen")]
    # A syntax error names its place itself, and never ran there.
    if own and not isinstance(error, SyntaxError):
        text += f" at {own[-1].filename}:{own[-1].lineno}"
    return text + described(error).removeprefix(type(error).__name__)


def kind_of(value: object) -> str:
    """The type of a value, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
