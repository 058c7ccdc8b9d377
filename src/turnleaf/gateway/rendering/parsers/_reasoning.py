"""Reasoning between `<think>` and `</think>`, before the answer."""

__all__ = ["split_reasoning"]

_OPEN = "<think>"
_CLOSE = "</think>"


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Cut `text` into reasoning and answer.

    opened: the prompt already opened `<think>`, its newline included. Both parts are as sampled,
    except for the newlines that the format puts beside its tags: one after the opening tag, one
    before the closing one, up to two after it. Reasoning without its end is all reasoning; tags
    after the first pair are part of the answer.
    """
    lead = text.lstrip()
    if lead.startswith(_OPEN):
        text = lead[len(_OPEN) :].removeprefix("\n")
    elif not opened:
        return "", text
    reasoning, close, answer = text.partition(_CLOSE)
    if not close:
        return text, ""
    return reasoning.removesuffix("\n"), answer.removeprefix("\n").removeprefix("\n")
