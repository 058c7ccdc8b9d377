"""What is sent to an agent, and what may come back."""

import json
from typing import Any

from turnleaf.core._described import described, excerpt, hidden
from turnleaf.core._errors import AgentError, BadResultError, PayloadError
from turnleaf.core._protocols import Key
from turnleaf.core._rewards import reward_number

__all__ = [
    "MAX_NESTING",
    "checked_payload",
    "checked_result",
    "checked_reward",
    "nesting_exceeds",
    "with_config",
]

MAX_NESTING = 100
"""Levels of a payload; far more than any row has, far fewer than Python's recursion takes."""

_EXCERPT = 100
_ERROR_EXCERPT = 500
_ROW = 'a row needs metadata.payload, a JSON object such as {"prompt": "…"}'


def checked_payload(payload: object, *, name: str) -> dict[str, Any]:
    """A deep copy of a row's payload; raises PayloadError, which says what the row needs."""
    if not isinstance(payload, dict):
        raise PayloadError(f"{name}: the payload is {excerpt(payload, length=_EXCERPT)}; {_ROW}")
    if "_config" in payload:
        raise PayloadError(
            f"{name}: the payload already has `_config`, in which the agent is told its model; "
            "rename that field of the row"
        )
    try:
        copy: dict[str, Any] = json.loads(json.dumps(payload, allow_nan=False))
    except RecursionError:
        raise _too_deep(name) from None
    except Exception as error:
        said = described(error)
        raise PayloadError(f"{name}: the payload is not JSON ({said}); {_ROW}") from error
    if nesting_exceeds(copy, MAX_NESTING):
        raise _too_deep(name)
    if not _equal(copy, payload):
        raise PayloadError(
            f"{name}: the payload changes when written as JSON (a key that is not text, or a "
            f"tuple); {_ROW}"
        )
    return copy


def _too_deep(name: str) -> PayloadError:
    return PayloadError(f"{name}: the payload nests deeper than {MAX_NESTING} levels; {_ROW}")


def _equal(copy: dict[str, Any], payload: dict[str, Any]) -> bool:
    try:
        return copy == payload
    except Exception:  # noqa: BLE001  # of a foreign __eq__
        return False


def nesting_exceeds(value: Any, levels: int) -> bool:
    """Whether JSON values nest deeper than so many levels."""
    level = [value]
    for _ in range(levels):
        containers = [inner for inner in level if isinstance(inner, dict | list)]
        if not containers:
            return False
        level = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    return any(isinstance(inner, dict | list) for inner in level)


def with_config(payload: dict[str, Any], *, key: Key, model_id: str) -> dict[str, Any]:
    """The request: the payload, and where the agent finds its model."""
    config = {"base_url": key.base_url, "model_id": model_id, "api_key": key.secret}
    return {**payload, "_config": config}


def checked_result(result: object, *, name: str, secret: str) -> dict[str, Any]:
    """What an agent returned, if it is a dict; raises BadResultError, without the secret."""
    if not isinstance(result, dict):
        said = excerpt(result, length=_EXCERPT, secret=secret)
        raise BadResultError(
            f"{name}: the agent returned {said}, which is {type(result).__name__}; "
            'it must return a dict such as {"reward": 1.0}'
        )
    return result


def checked_reward(result: dict[str, Any], *, name: str, secret: str) -> float | None:
    """The reward in an agent's result; None leaves the scoring to the trainer.

    Raises BadResultError unless it is a finite number, and AgentError when there is none but an
    `error` that is not None; neither shows the secret.
    """
    # A dict of the agent's own kind may look itself up in its own way.
    reward = dict.get(result, "reward")
    if reward is None:
        error = dict.get(result, "error")
        if error is None:
            return None
        if isinstance(error, str):
            said = hidden(error, secret)[:_ERROR_EXCERPT]
        else:
            said = excerpt(error, length=_ERROR_EXCERPT, secret=secret)
        raise AgentError(f"{name}: the agent reported an error: {said}")
    number = reward_number(reward)
    if number is not None:
        return number
    raise BadResultError(
        f"{name}: the agent's reward is {excerpt(reward, length=_EXCERPT, secret=secret)}, "
        f"which is {type(reward).__name__}; it must be a finite number"
    )
