"""What is wrong with somebody's messages, not with the set-up."""

from turnleaf.core import TurnleafError

__all__ = ["RenderError"]


class RenderError(TurnleafError):
    """The chat template cannot render these messages; says why, in the template's words."""
