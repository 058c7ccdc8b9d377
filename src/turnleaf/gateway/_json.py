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
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def check_text(value: Any) -> None:
    """Raise ValueError when a decoded value is no text that could be rendered again.

    Half a surrogate pair is valid JSON, but neither UTF-8 nor tokens can hold it.
    """
    if isinstance(value, str):
        value.encode()
        return
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            break
    else:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    _ENCODER.encode(value).encode()
