"""Reading JSON that a model sampled or an agent sent, the same on every interpreter."""

import json
from typing import Any

__all__ = ["DECODER", "check_text"]

DEEPEST = 100
"""Levels of nesting. Python's own limit differs between its versions and with the stack."""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Strict: NaN and the infinities are no JSON."""


def check_text(value: Any) -> None:
    """Raise ValueError when a decoded value is no text that could be rendered again.

    Half a surrogate pair is valid JSON, but neither UTF-8 nor tokens can hold it.
    """
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                each.encode()
            elif isinstance(each, dict):
                inner += each
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        level = inner
    raise ValueError(f"nested more than {DEEPEST} levels deep")
