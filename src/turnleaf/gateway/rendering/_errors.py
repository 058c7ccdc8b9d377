"""What is wrong with messages, or with what was told of an output; not with the set-up."""

from turnleaf.core import TurnleafError

__all__ = ["ContradictionError", "RenderError"]


class RenderError(TurnleafError):
    """The chat template cannot render these messages; says why, in the template's words."""


class ContradictionError(TurnleafError):
    """What was told of an output while it was sampled is not what the whole of it says."""
