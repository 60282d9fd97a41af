"""Sizes that grow with the batch: ``64*B``, ``n0 + B`` or ``B/2``, as an ops file writes them.

A size is a polynomial with rational coefficients in the batch size ``B`` and in numbers of ids. It
is read by a grammar of its own, so that nothing of a file is ever run as code:

    size = term (("+" | "-") term)*      term = factor ("*" factor)* ("/" integer)?
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from predictor.errors import InputError

Size = int | str
"""A number, or the text of an expression."""

MAX_LENGTH = 200
MAX_TERMS = 16
MAX_DEGREE = 4
MAX_VALUE = 2**62
_TOKEN = re.compile(r"\s*(?:(\d{1,19})|([A-Za-z][A-Za-z0-9]{0,9})|([-+*/]))")


@dataclass(frozen=True)
class Expression:
    """A polynomial.

    Args:
        terms: names that are multiplied, in order, and what with; no names for the constant.
    """

    terms: tuple[tuple[tuple[str, ...], Fraction], ...]

    @property
    def names(self) -> frozenset[str]:
        """What it depends on."""
        return frozenset(name for names, _ in self.terms for name in names)

    def value(self, at: Mapping[str, int]) -> int:
        """The size where names have these values; half an element counts as one.

        Raises:
            InputError: it is below zero or beyond 64 bits.
        """
        exact = sum(
            (factor * math.prod(at[name] for name in names) for names, factor in self.terms),
            Fraction(0),
        )
        found = math.ceil(exact)
        if not 0 <= found <= MAX_VALUE:
            raise InputError(f"the size '{self}' is {found}; sizes are 0 to {MAX_VALUE}")
        return found

    def __str__(self) -> str:
        text = "".join(_term(names, factor) for names, factor in self.terms)
        return text.removeprefix(" + ").replace(" - ", "-", text.startswith(" - ")) or "0"


def _term(names: tuple[str, ...], factor: Fraction) -> str:
    top, sign = abs(factor.numerator), "-" if factor < 0 else "+"
    product = "*".join(([] if names and top == 1 else [str(top)]) + list(names))
    return f" {sign} {product}" + (f"/{factor.denominator}" if factor.denominator > 1 else "")


def polynomial(terms: Iterable[tuple[tuple[str, ...], Fraction]]) -> Expression:
    """Of terms in any order; the highest come first."""
    merged: Counter[tuple[str, ...]] = Counter()
    for names, factor in terms:
        merged[tuple(sorted(names))] += factor  # type: ignore[assignment]
    left = [(names, Fraction(factor)) for names, factor in merged.items() if factor]
    return Expression(tuple(sorted(left, key=lambda term: (-len(term[0]), term[0]))))


@lru_cache(maxsize=65536)
def parse_size(text: str) -> Expression:
    """The expression that a text is.

    Raises:
        InputError: it is none, or a larger one than any model has.
    """
    tokens = _tokens(text)
    terms: list[tuple[tuple[str, ...], Fraction]] = []
    sign, at = 1, 0
    if tokens[0] == "-":
        sign, at = -1, 1
    while True:
        names, factor, at = _read_term(tokens, at, text)
        terms.append((names, sign * factor))
        if at == len(tokens):
            break
        if tokens[at] not in "+-" or len(terms) == MAX_TERMS:
            raise _refused(text)
        sign, at = (1 if tokens[at] == "+" else -1), at + 1
    return polynomial(terms)


def _read_term(tokens: list[str], at: int, text: str) -> tuple[tuple[str, ...], Fraction, int]:
    names: list[str] = []
    factor = Fraction(1)
    operator = "*"
    while True:
        token = tokens[at] if at < len(tokens) else "+"
        if token.isdigit() and (operator == "*" or int(token)):
            factor = factor * int(token) if operator == "*" else factor / int(token)
        elif token[0].isalpha() and operator == "*" and len(names) < MAX_DEGREE:
            names.append(token)
        else:
            raise _refused(text)
        at += 1
        if at == len(tokens) or tokens[at] in "+-":
            return tuple(names), factor, at
        if tokens[at] not in "*/" or operator == "/":
            raise _refused(text)
        operator, at = tokens[at], at + 1


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text) and len(text) <= MAX_LENGTH:
        match = _TOKEN.match(text, at)
        if match is None:
            raise _refused(text)
        found.append(match[match.lastindex or 0])
        at = match.end()
    if not found:
        raise _refused(text)
    return found


def _refused(text: str) -> InputError:
    return InputError(
        f"got the size {text[:60]!r}; a size is a number or a sum of products of numbers and "
        f"names, such as '64*B + n0', of at most {MAX_LENGTH} characters, {MAX_TERMS} terms and "
        f"{MAX_DEGREE} names a term"
    )
