"""What a reward is."""

import numbers

import numpy as np

__all__ = ["LARGEST_REWARD", "reward_number"]

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Trainers compute in float32; beyond this a reward would be infinite to them."""


def reward_number(value: object) -> float | None:
    """The number that a reward is: finite as a float32, and no boolean; None when it is no such.

    numpy's scalars are numbers, its booleans are not.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except Exception:  # noqa: BLE001  # an int too large, a foreign __float__
        return None
    return number if abs(number) <= LARGEST_REWARD else None
