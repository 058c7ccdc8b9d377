"""What a check says."""

from typing import Literal

import attrs

__all__ = ["Finding", "Verdict"]

Verdict = Literal["good", "warning", "bad"]


@attrs.frozen
class Finding:
    """One thing that was looked at. remedy: what to do about it; empty where there is nothing."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
