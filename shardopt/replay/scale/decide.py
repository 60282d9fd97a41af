"""Which sizes are the batch's: a few rules decide what the ops leave open; the rest is refused.

1. Without lookups, the one size that is the number of samples is the batch. Beside lookups, each
   such size is that leads a tensor made up front, unless another one stands in a tensor with it.
2. Other sizes of a tensor made up front that has the batch as one of its sizes stay.
3. A tensor of whole numbers, or one that no op computes with, that is tied to no other is as those
   of the same shape and type.
4. Tensors without items are as what a lookup gives.
What is then still open, and could be the batch's, is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import sympy

from predictor.errors import InputError
from shardopt.replay.program.program import WHOLE, Number, RankProgram, Term, leaves
from shardopt.replay.scale.sizes import PRIME, Constraint, batch_unclear, propagate
from shardopt.replay.scale.walk import IDLE, SymbolicProgram

LISTED = 8
Symbols = dict[sympy.Symbol, bool]


def decide_growth(walk: SymbolicProgram, program: RankProgram) -> Symbols:
    """Symbol -> whether it grows with the batch.

    Raises:
        InputError: the trace does not tell; lists the ops.
    """
    return _Decision(walk, program).run()


class _Decision:
    def __init__(self, walk: SymbolicProgram, program: RankProgram) -> None:
        self.walk, self.program, self.sizes = walk, program, walk.sizes
        self.known: Symbols = {}
        self.constraints = self.sizes.constraints()
        expression = self.sizes.expression
        self.shapes = {
            number: tuple(map(expression, shape)) for number, shape in walk.known.shapes.items()
        }
        self.symbols = {s for shape in self.shapes.values() for e in shape for s in e.free_symbols}
        self.symbols |= {s for call in walk.calls for s in _in_numbers(walk, call.arguments)}

    def run(self) -> Symbols:
        self._propagate()
        self._refuse_unclear_batch()
        for rule in (
            self._decide_empty,
            self._decide_leading,
            self._keep_others,
            self._match_alike,
        ):
            rule()
            self._propagate()
        samples = self.sizes.samples
        for symbol in self.symbols - self.known.keys():
            if self.sizes.hints[symbol] % samples:
                self.known[symbol] = False
        self._propagate()
        self._check()
        return self.known

    def _propagate(self, more: Iterable[Constraint] = ()) -> None:
        trial = dict(self.known)
        propagate(self.sizes, [*self.constraints, *more], trial)
        self.known = trial

    def _open(self) -> set[sympy.Symbol]:
        return self.symbols - self.known.keys()

    def _inputs(self) -> Iterator[tuple[int, tuple[sympy.Expr, ...]]]:
        """Tensors made up front that are no parameters."""
        for number in self.walk.made.keys() - self.walk.fixed:
            if number in self.shapes:
                yield number, self.shapes[number]

    def _is_batch(self, symbol: sympy.Symbol) -> bool:
        return self.sizes.hints[symbol] == self.sizes.samples

    def _refuse_unclear_batch(self) -> None:
        """Refuse where an op made a number of what may be the batch, and no lookup tells better."""
        sizes = self.sizes
        if sizes.growing:
            return
        for number, shape in self._inputs():
            spec = self.program.made[number]
            if spec.shape[:1] == (sizes.samples,) and shape[0].is_number:
                raise batch_unclear(
                    f"the {sizes.samples} of a tensor of shape {list(spec.shape)} cannot grow, and "
                    "the trace does not tell whether it is the batch's"
                )

    def _decide_empty(self) -> None:
        known = self.walk.known
        for size in known.empty:
            for symbol in self.sizes.expression(size).free_symbols & self._open():
                self.known[symbol] = self.sizes.hints[symbol] in known.bags

    def _decide_leading(self) -> None:
        exact = {s for s in self._open() if self._is_batch(s)}
        if not self.sizes.growing:
            if len(exact) == 1:
                self.known |= dict.fromkeys(exact, True)
            return
        batch = {s for s, grows in self.known.items() if grows and self._is_batch(s)}
        beside = self._pairs(exact | batch)
        for _, shape in self._inputs():
            first = shape[0] if shape else None
            if first in exact and not beside[first]:
                self.known[first] = True

    def _pairs(self, symbols: set[sympy.Symbol]) -> dict[sympy.Symbol, set[sympy.Symbol]]:
        """Which of them stand in one tensor."""
        found: dict[sympy.Symbol, set[sympy.Symbol]] = defaultdict(set)
        for shape in self.shapes.values():
            here = {s for e in shape for s in e.free_symbols} & symbols
            for symbol in here:
                found[symbol] |= here - {symbol}
        return found

    def _keep_others(self) -> None:
        for _, shape in self._inputs():
            if any(self.known.get(s) for e in shape for s in e.free_symbols):
                for symbol in {s for e in shape for s in e.free_symbols} & self._open():
                    if not self._is_batch(symbol):
                        self.known[symbol] = False

    def _match_alike(self) -> None:
        """Tensors that nothing ties to others are as those of their shape and type."""
        idle = self._idle()
        changed = True
        while changed:
            changed = False
            for number, shape in self.shapes.items():
                spec = self.walk.specs.get(number)
                if spec is None or not self._is_open(shape):
                    continue
                if spec.dtype not in WHOLE and number not in idle:
                    continue
                twins = {
                    tuple(self.sizes.value(e, self.known, PRIME) for e in self.shapes[other])
                    for other, like in self.walk.specs.items()
                    if like.shape == spec.shape
                    and like.dtype == spec.dtype
                    and not self._is_open(self.shapes[other])
                }
                if len(twins) != 1:
                    continue
                before = len(self.known)
                pairs = zip(shape, next(iter(twins)), strict=True)
                with suppress(InputError):
                    self._propagate([Constraint(e, sympy.Integer(n), "") for e, n in pairs])
                changed |= len(self.known) > before

    def _is_open(self, shape: tuple[sympy.Expr, ...]) -> bool:
        return any(s not in self.known for e in shape for s in e.free_symbols)

    def _idle(self) -> set[int]:
        """Tensors that ops name without work on them."""
        worked = {n for call in self.program.calls if call.op not in IDLE for n in call.reads()}
        return self.walk.made.keys() - worked

    def _check(self) -> None:
        loose = self._open()
        samples = self.sizes.samples
        odd = {
            s
            for s in self.symbols
            if self.known.get(s)
            and self.sizes.hints[s] % samples > 1
            and s not in self.sizes.counted
        }
        if loose or odd:
            raise batch_unclear(
                "the trace does not tell whether sizes are the batch's: "
                f"{self._name_ops(loose | odd)}"
            )
        if not any(self.known.get(s) for s in self.symbols):
            raise InputError(
                f"the batch cannot be scaled: no size of the trace is one of {samples} samples; "
                "give the samples of a rank, or a trace of the same job at twice the batch too",
                inputs=("batch", "doubled"),
            )

    def _name_ops(self, symbols: set[sympy.Symbol]) -> str:
        """The ops that first have such sizes."""
        found: dict[str, None] = {}
        for at, call in enumerate(self.walk.calls):
            for number in (*call.reads(), *call.gives()):
                shape = self.shapes.get(number, ())
                for e in shape:
                    for s in e.free_symbols & symbols:
                        found.setdefault(f"{self.sizes.hints[s]} at op {at}, {call.op}")
                        symbols = symbols - {s}
        rest = [
            f"{self.sizes.hints[s]} at {self.sizes.origin[s]}" for s in sorted(symbols, key=str)
        ]
        listed = [*found, *rest]
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        return "; ".join(listed[:LISTED]) + more


def _in_numbers(walk: SymbolicProgram, terms: Iterable[Term]) -> Iterator[sympy.Symbol]:
    for leaf in leaves(tuple(terms)):
        if isinstance(leaf, Number) and not isinstance(leaf.value, (int, float, bool)):
            yield from walk.sizes.expression(leaf.value).free_symbols


def grow(walk: SymbolicProgram, known: Mapping[sympy.Symbol, bool], size: Any, times: int) -> int:
    """A size at `times` the batch."""
    return walk.sizes.value(walk.sizes.expression(size), dict(known), times)
