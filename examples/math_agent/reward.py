"""What an answer is worth: 1 when the number that it ends with is the right one."""

import re
from decimal import Decimal

MARK = "####"

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])|[0-9]+)"
_NUMBER = re.compile(rf"\$?([-−–]?)\$?({_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)")


def number_in(text):
    """The one number of a text, exactly, or None where there is none, or more than one.

    `$1,250.00` and `**1250**` are the same number. Of several, none is the answer.
    """
    found = _NUMBER.findall(text)
    if len(found) != 1:
        return None
    ((sign, digits),) = found
    return Decimal(("-" if sign else "") + digits.replace(",", ""))


def final_answer(text):
    """The number in the first line of text behind the last ####, or None."""
    _, mark, behind = text.rpartition(MARK)
    return number_in(behind.strip().partition("\n")[0]) if mark else None


def reward(text, answer):
    """1.0 or 0.0. answer: the right number, also as text. Raises ValueError when it is none."""
    right = number_in(str(answer))
    if right is None:
        raise ValueError(f"the payload's answer {answer!r} is no number")
    return float(final_answer(text) == right)
