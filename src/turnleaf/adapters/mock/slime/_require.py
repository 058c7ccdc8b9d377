"""Assertions that slime makes, which no interpreter option may switch off here."""

__all__ = ["require"]


def require(condition: object, message: str) -> None:
    """Raise AssertionError unless the condition holds."""
    if not condition:
        raise AssertionError(message)
