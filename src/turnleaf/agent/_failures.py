"""What is said of an agent that failed, in one text."""

import traceback
from collections.abc import Mapping
from typing import Any

from turnleaf.core import described, hidden, unwrapped

__all__ = ["failure_text", "secret_of"]

MESSAGE = 4_000
"""Characters of an exception's message."""
FRAMES = 8
TRACEBACK = 4_000
"""Characters of the traceback's last lines."""


def secret_of(payload: Mapping[str, Any]) -> str:
    """The rollout's key in a payload; empty when there is none."""
    config = payload.get("_config")
    secret = config.get("api_key") if isinstance(config, Mapping) else None
    return secret if isinstance(secret, str) else ""


def failure_text(error: BaseException, secret: str) -> str:
    """The exception's type and message, then the last lines of its traceback; never empty.

    Of a group, its first member. secret: is not in it.
    """
    error = unwrapped(error)
    said = hidden(described(error), secret)
    if error.__cause__ is not None:
        said += f"\ncaused by {hidden(described(error.__cause__), secret)}"
    if len(said) > MESSAGE:
        said = said[:MESSAGE] + "…"
    frames = traceback.extract_tb(error.__traceback__, limit=-FRAMES)
    where = hidden("".join(traceback.format_list(frames)), secret)
    return f"{said}\n{where[-TRACEBACK:]}".rstrip()
