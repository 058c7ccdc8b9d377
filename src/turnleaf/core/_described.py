"""What errors and logs say about exceptions and about values that others made."""

import reprlib
from collections.abc import Iterator
from typing import Any

from turnleaf.core._errors import ContractError, GatewayError, RolloutError

__all__ = ["described", "excerpt", "hidden", "text_of", "unwrapped"]


def described(error: BaseException) -> str:
    """The type and, where it has one, the text of an exception; raises nothing."""
    text = text_of(error)
    if text is None:
        text = "its text cannot be made"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str | None:
    """The text of an exception; None when it has one that cannot be made."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  # of a foreign __str__
        return None


def unwrapped(error: BaseException) -> BaseException:
    """The exception to blame: of a group, the first that is an error of ours, else the first."""
    inner = list(_ungrouped(error))
    for kind in (ContractError, RolloutError, GatewayError):
        for candidate in inner:
            if isinstance(candidate, kind):
                return candidate
    return inner[0]


def _ungrouped(error: BaseException) -> Iterator[BaseException]:
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(reversed(one.exceptions))
        else:
            yield one


def hidden(text: str, secret: str) -> str:
    """`text` without `secret`; to be called before anything is cut, or a piece of it may stay."""
    return text.replace(secret, "[api_key]") if secret else text


def excerpt(value: object, *, length: int, secret: str = "") -> str:
    """How `value` prints, without `secret`, in at most `length` characters; raises nothing."""
    try:
        text = _Excerpt(secret, length).repr(value)
    except BaseException:  # noqa: BLE001  # of a foreign __repr__, or an int too long for Python
        text = f"<{type(value).__name__} that cannot be printed>"
    return text[:length]


class _Excerpt(reprlib.Repr):
    """Hides the secret in each part of a value before that part is cut."""

    def __init__(self, secret: str, length: int) -> None:
        super().__init__()
        self.maxstring = length
        self._secret = secret

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(hidden(x, self._secret), level)

    def repr_instance(self, x: Any, level: int) -> str:
        return hidden(repr(x), self._secret)[: self.maxstring]
