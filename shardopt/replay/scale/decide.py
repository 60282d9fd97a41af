"""Which sizes are the batch's: a few rules decide what the ops leave open; the rest is refused.

1. Without lookups, the one size that is the number of samples is the batch. Beside lookups, each
   such size is that leads a tensor made up front, unless another one stands in a tensor with it.
2. Other sizes of a tensor made up front that has the batch as one of its sizes stay.
3. A tensor of whole numbers, or one that no op computes with, that is tied to no other is as those
   of the same shape and type.
4. Tensors without items are as what a lookup gives.
What is then still open, and could be the batch's, is refused. Constraints are solved with each
symbol as recorded, or many times as large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress

import sympy
import torch

from predictor.errors import InputError
from shardopt.replay.program.program import WHOLE, leaves
from shardopt.replay.scale.sizes import PRIME, Constraint, Size, SymbolicProgram, batch_unclear
from shardopt.replay.scale.walk import IDLE

LISTED = 8
ENUMERATED = 10
"""Symbols of one constraint that are tried in all combinations."""
Expressions = tuple[sympy.Expr, ...]


class Growth:
    """Which symbols grow with the batch, `known` so far.

    Raises:
        InputError: the trace does not tell; lists the ops.
    """

    def __init__(self, walk: SymbolicProgram) -> None:
        self.walk, self.sizes = walk, walk.sizes
        self.known: dict[sympy.Symbol, bool] = {}
        self.constraints = self.sizes.constraints()
        expression = self.sizes.expression
        self.shapes = {number: tuple(map(expression, of)) for number, of in walk.shapes.items()}
        terms = (term for call in walk.calls for term in leaves(call.arguments))
        self.symbols = _symbols(expression(of) for of in terms if isinstance(of, torch.SymInt))
        self.symbols |= {s for shape in self.shapes.values() for s in _symbols(shape)}
        self._propagate()
        self._refuse_unclear_batch()
        for rule in (self._empty, self._leading, self._others, self._alike, self._odd):
            rule()
            self._propagate()
        self._check()

    def at(self, size: Size, times: int) -> int:
        """A size at `times` the batch."""
        return int(self.sizes.value(self.sizes.expression(size), self.known, times))

    def _propagate(self, more: Iterable[Constraint] = ()) -> None:
        """Add what the constraints leave no choice of.

        Raises:
            InputError: they cannot all hold.
        """
        known = dict(self.known)
        unsolved = [*self.constraints, *more]
        before = -1
        while before < len(known):
            before = len(known)
            for constraint in list(unsolved):
                unknown = sorted(constraint.symbols - known.keys(), key=str)
                if len(unknown) > ENUMERATED:
                    self._bound(constraint, known)
                else:
                    self._narrow(constraint, unknown, known)
                if constraint.symbols <= known.keys():
                    unsolved.remove(constraint)
        self.known = known

    def _narrow(
        self, constraint: Constraint, unknown: list[sympy.Symbol], known: dict[sympy.Symbol, bool]
    ) -> None:
        fitting: list[tuple[bool, ...]] = []
        for choice in itertools.product((False, True), repeat=len(unknown)):
            trial = known | dict(zip(unknown, choice, strict=True))
            if self._value(constraint.left, trial) == self._value(constraint.right, trial):
                fitting.append(choice)
        if not fitting:
            raise batch_unclear(
                f"no size of {constraint.op} can grow so that the ops around it still fit"
            )
        for symbol, column in zip(unknown, zip(*fitting, strict=True), strict=True):
            if len(set(column)) == 1:
                known[symbol] = column[0]

    def _bound(self, constraint: Constraint, known: dict[sympy.Symbol, bool]) -> None:
        """Sums of positive terms: at the least or the most that they can be there is one choice."""
        if not (_is_positive(constraint.left) and _is_positive(constraint.right)):
            return
        for side, other in (constraint[:2], constraint[1::-1]):
            most = dict.fromkeys(constraint.symbols, True) | known
            if self._value(side, known) == self._value(other, most):
                known |= dict.fromkeys(side.free_symbols - known.keys(), False)
            elif self._value(side, most) == self._value(other, known):
                known |= dict.fromkeys(side.free_symbols - known.keys(), True)

    def _value(self, expression: sympy.Expr, known: dict[sympy.Symbol, bool]) -> sympy.Integer:
        return self.sizes.value(expression, known, PRIME)

    def _open(self) -> set[sympy.Symbol]:
        return self.symbols - self.known.keys()

    def _inputs(self) -> Iterator[tuple[int, Expressions]]:
        """Tensors made up front that are no parameters."""
        return ((n, self.shapes[n]) for n in self.walk.made if n not in self.walk.fixed)

    def _is_batch(self, symbol: sympy.Symbol) -> bool:
        return self.sizes.hints[symbol] == self.sizes.samples

    def _refuse_unclear_batch(self) -> None:
        """Refuse where an op made a number of what may be the batch, and no lookup tells better."""
        samples = self.sizes.samples
        for number, shape in () if self.sizes.growing else self._inputs():
            recorded = self.walk.program.made[number].shape
            if recorded[:1] == (samples,) and shape[0].is_number:
                raise batch_unclear(
                    f"the {samples} of a tensor of shape {list(recorded)} cannot grow, and the "
                    "trace does not tell whether it is the batch's"
                )

    def _empty(self) -> None:
        empty = _symbols(map(self.sizes.expression, self.walk.empty))
        for symbol in empty & self._open():
            self.known[symbol] = self.sizes.hints[symbol] in self.walk.bags

    def _leading(self) -> None:
        exact = {s for s in self._open() if self._is_batch(s)}
        if not self.sizes.growing:
            self.known |= dict.fromkeys(exact, True) if len(exact) == 1 else {}
            return
        batch = exact | {s for s, grows in self.known.items() if grows and self._is_batch(s)}
        together = [symbols & batch for symbols in map(_symbols, self.shapes.values())]
        crowded = {s for symbols in together if len(symbols) > 1 for s in symbols}
        leading = {shape[0] for _, shape in self._inputs() if shape}
        self.known |= dict.fromkeys(leading & exact - crowded, True)

    def _others(self) -> None:
        for symbols in (_symbols(shape) for _, shape in self._inputs()):
            if any(self.known.get(s) for s in symbols):
                for symbol in symbols & self._open():
                    if not self._is_batch(symbol):
                        self.known[symbol] = False

    def _alike(self) -> None:
        """Tensors that nothing ties to others are as those of their shape and type."""
        specs = self.walk.specs
        worked = {n for c in self.walk.program.calls if c.op not in IDLE for n in c.reads()}
        before = -1
        while before < len(self.known):
            before = len(self.known)
            for number, shape in self.shapes.items():
                spec = specs.get(number)
                idle = number in self.walk.made and number not in worked
                if spec is None or not self._is_open(shape):
                    continue
                if spec.dtype not in WHOLE and not idle:
                    continue
                twins = {
                    tuple(self._value(e, self.known) for e in self.shapes[other])
                    for other, like in specs.items()
                    if (like.shape, like.dtype) == (spec.shape, spec.dtype)
                    and not self._is_open(self.shapes[other])
                }
                if len(twins) == 1:
                    pairs = zip(shape, twins.pop(), strict=True)
                    with suppress(InputError):
                        self._propagate([Constraint(e, n, "") for e, n in pairs])

    def _is_open(self, shape: Expressions) -> bool:
        return not _symbols(shape) <= self.known.keys()

    def _odd(self) -> None:
        """What is no multiple of the samples does not grow."""
        odd = {s for s in self._open() if self.sizes.hints[s] % self.sizes.samples}
        self.known |= dict.fromkeys(odd, False)

    def _check(self) -> None:
        sizes, samples = self.sizes, self.sizes.samples
        growing = {s for s in self.symbols if self.known.get(s)}
        odd = {s for s in growing if sizes.hints[s] % samples > 1} - sizes.counted
        if self._open() or odd:
            raise batch_unclear(
                "the trace does not tell whether sizes are the batch's: "
                f"{self._name_ops(self._open() | odd)}"
            )
        if not growing:
            raise InputError(
                f"the batch cannot be scaled: no size of the trace is one of {samples} samples; "
                "give the samples of a rank, or a trace of the same job at twice the batch too",
                inputs=("batch", "doubled"),
            )

    def _name_ops(self, symbols: set[sympy.Symbol]) -> str:
        """The ops that first have such sizes."""
        places = dict.fromkeys(sorted(symbols, key=str), "")
        for at, call in enumerate(self.walk.calls):
            for number in (*call.reads(), *call.gives()):
                for symbol in _symbols(self.shapes.get(number, ())) & symbols:
                    places[symbol] = places[symbol] or f"op {at}, {call.op}"
        listed = list(
            dict.fromkeys(
                f"{self.sizes.hints[s]} at {place or self.sizes.origin[s]}"
                for s, place in places.items()
            )
        )
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        return "; ".join(listed[:LISTED]) + more


def _symbols(expressions: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
    return {symbol for expression in expressions for symbol in expression.free_symbols}


def _is_positive(expression: sympy.Expr) -> bool:
    """Whether an expression is a sum of products of symbols and positive numbers."""
    if expression.is_Symbol or (expression.is_Integer and expression >= 0):
        return True
    return bool(expression.is_Add or expression.is_Mul) and all(map(_is_positive, expression.args))
