"""A calculator for a model: exact, and bounded by the length of what it is asked."""

import re
from decimal import Context, Decimal
from fractions import Fraction

LONGEST = 200  # characters of an expression
DEEPEST = 20  # parentheses and signs within one another
DIGITS = 12  # of a result that is no whole number

_SPELLED_OTHERWISE = str.maketrans("×÷−–", "*/--")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|([-+*/()])|(\S))")


def calculate(expression):
    """The value of an expression as text, or `error: …`, which tells the model what is wrong.

    Numbers, + - * / and parentheses; nothing that a few characters could make large.
    """
    try:
        return _written(_Reading(expression).value())
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


class _Reading:
    """One expression, read from left to right. Raises ValueError where it makes no sense."""

    def __init__(self, expression):
        if len(expression) > LONGEST:
            raise ValueError(f"the expression is longer than {LONGEST} characters")
        plain = _THOUSANDS.sub("", expression.translate(_SPELLED_OTHERWISE))
        tokens = []
        for match in _TOKEN.finditer(plain):
            number, sign, unknown = match.groups()
            if unknown:
                raise ValueError(f"{unknown!r} is not known; there are numbers, + - * / and ( )")
            tokens.append(number or sign)
        self._tokens = tokens[::-1]
        self._depth = 0

    def value(self):
        value = self._sum()
        if self._tokens:
            raise ValueError(f"nothing was expected before {self._next()!r}")
        return value

    def _sum(self):
        value = self._product()
        while self._next() in ("+", "-"):
            if self._take() == "+":
                value += self._product()
            else:
                value -= self._product()
        return value

    def _product(self):
        value = self._factor()
        while self._next() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor()
            else:
                value /= self._factor()
        return value

    def _factor(self):
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} parentheses or signs within one another")
        token = self._take()
        if token == "(":
            value = self._sum()
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
        elif token == "+":
            value = self._factor()
        elif token == "-":
            value = -self._factor()
        elif token is None:
            raise ValueError("a number is missing at the end")
        elif token in ("*", "/", ")"):
            raise ValueError(f"a number is missing before {token!r}")
        else:
            value = Fraction(token)
        self._depth -= 1
        return value

    def _next(self):
        return self._tokens[-1] if self._tokens else None

    def _take(self):
        return self._tokens.pop() if self._tokens else None


def _written(value):
    if value.denominator == 1:
        return str(value.numerator)
    rounded = Context(prec=DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{rounded.normalize():f}"
