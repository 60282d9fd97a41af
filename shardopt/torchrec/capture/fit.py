"""Sizes of several captures as exact expressions of the batch size and the ids of features.

A size is looked for as ``c x + d``, then as ``c x + e y + d``, with x and y among the batch size,
numbers of ids and products with the batch size. Three captures fix the numbers and a fourth, at
sizes that nothing ties to the others, must agree exactly; coefficients are small fractions.

Why: docs/decisions/0051.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

from predictor.model.captured.dense import BATCH, Size, polynomial

CAPTURES = 4
MAX_DENOMINATOR = 64
Values = tuple[int, ...]
Term = tuple[str, ...]


class SizeFit:
    """Finds expressions for what sizes were in each capture.

    Args:
        names: values of the batch size and of numbers of ids in each capture.
    """

    def __init__(self, names: Mapping[str, Values]) -> None:
        batch = names[BATCH]
        self.terms: dict[Term, Values] = {(name,): values for name, values in names.items()}
        for name, values in names.items():
            products = tuple(a * b for a, b in zip(batch, values, strict=True))
            self.terms[BATCH, name] = products
        self.known: dict[Values, Size | None] = {}

    def size(self, values: Values) -> Size | None:
        """The expression that has these values; None if none was found."""
        if values not in self.known:
            same = len(set(values)) == 1
            self.known[values] = values[0] if same else self._one(values) or self._two(values)
        return self.known[values]

    def sizes(self, of: Sequence[Values]) -> tuple[Size, ...] | None:
        """Expressions of several; None if one has none."""
        found = [self.size(values) for values in of]
        return None if None in found else tuple(s for s in found if s is not None)

    def _one(self, v: Values) -> Size | None:
        for term, x in self.terms.items():
            if x[0] == x[1]:
                continue
            factor = Fraction(v[1] - v[0], x[1] - x[0])
            rest = v[0] - factor * x[0]
            if factor and _agrees(v, rest, (factor, x)):
                return str(polynomial([(term, factor), ((), rest)]))
        return None

    def _two(self, v: Values) -> Size | None:
        for (first, x), (second, y) in combinations(self.terms.items(), 2):
            a, b = x[1] - x[0], y[1] - y[0]
            c, d = x[2] - x[0], y[2] - y[0]
            p, q = v[1] - v[0], v[2] - v[0]
            determinant = a * d - b * c
            if not determinant:
                continue
            of_x = Fraction(p * d - b * q, determinant)
            of_y = Fraction(a * q - c * p, determinant)
            rest = v[0] - of_x * x[0] - of_y * y[0]
            if _agrees(v, rest, (of_x, x), (of_y, y)):
                return str(polynomial([(first, of_x), (second, of_y), ((), rest)]))
        return None


def _agrees(v: Values, rest: Fraction, *terms: tuple[Fraction, Values]) -> bool:
    factors = [rest, *(factor for factor, _ in terms)]
    if any(factor.denominator > MAX_DENOMINATOR for factor in factors):
        return False
    return all(
        value == rest + sum(factor * x[at] for factor, x in terms) for at, value in enumerate(v)
    )
