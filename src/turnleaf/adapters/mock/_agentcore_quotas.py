"""How often something may be asked of an emulated runtime."""

import math
import time

from turnleaf.adapters.mock._agentcore_errors import ServiceFault

__all__ = ["Bucket"]


class Bucket:
    """A token bucket of `quota` calls, filled evenly within `seconds`; None is no limit."""

    def __init__(self, quota: float | None, seconds: float) -> None:
        self._size = math.inf if quota is None else max(1.0, quota)
        self._per_second = math.inf if quota is None else quota / seconds
        self._left = self._size
        self._at = time.monotonic()

    def take(self, what: str) -> None:
        """Take one. Raises ServiceFault, which names `what` there is too much of."""
        if self._size == math.inf:
            return
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            raise ServiceFault("ThrottlingException", f"Rate exceeded: {what}")
        self._left -= 1
