"""Sizes of a program as symbols, and which of them grow with the batch.

Each size that may be the batch's is a symbol of PyTorch's `ShapeEnv`. Ops that run on tensors of
such sizes tell which sizes must be equal (`torch.fx.experimental.symbolic_shapes`); what is left is
decided by constraints, each symbol being as recorded or `times` as large.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from predictor.errors import InputError
from shardopt.replay.program.program import Call, Number, Slot, Term, nested

Size = Any
"""A whole number, or a `torch.SymInt`."""
Shape = tuple[Size, ...]
PRIME = 10007
"""The multiple at which constraints are solved: what fits by chance at 2 or 3 does not at this."""
ENUMERATED = 10
"""Symbols of one constraint that are tried in all combinations."""


class UndecidedError(Exception):
    """Sizes contradict each other; says where."""


@dataclass(frozen=True)
class Constraint:
    """Two expressions are equal at any batch.

    Args:
        op: that says so.
    """

    left: sympy.Expr
    right: sympy.Expr
    op: str


class _Env(ShapeEnv):
    """Refuses ops that want a plain number for a symbol: they would make it one for all others."""

    def evaluate_expr(self, orig_expr: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(orig_expr, sympy.Expr) and not self.simplify(orig_expr).is_number:
            raise RuntimeError("takes a plain number for a size")
        return super().evaluate_expr(orig_expr, *arguments, **keywords)


class Sizes:
    """The symbols of one program; `at` is the op that is under way.

    Args:
        samples: of a rank. Sizes that are no multiple of it are numbers, but for ids and offsets.
    """

    def __init__(self, samples: int) -> None:
        self.env = _Env()
        self.samples = samples
        self.at = ""
        self.origin: dict[sympy.Symbol, str] = {}
        self.hints: dict[sympy.Symbol, int] = {}
        self.growing: list[tuple[sympy.Expr, str]] = []
        self.ops: list[tuple[int, str]] = []
        self.id_counts: list[sympy.Expr] = []
        self.bag_counts: list[sympy.Expr] = []
        self.counted: set[sympy.Symbol] = set()

    def fresh(self, value: int, *, ids: bool = False) -> Size:
        """A size of its own; 0 and 1 are no batch.

        Args:
            ids: it may be a number of ids, or of offsets.
        """
        if value <= 1 or (value % self.samples and not ids):
            return value
        source = ConstantSource(f"size{len(self.hints)}")
        symbol = self.env.create_symbol(
            value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        self.hints[symbol] = value
        self.origin[symbol] = self.at
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def shape(self, shape: Iterable[int]) -> Shape:
        """The shape of a tensor of which nothing is known."""
        listed = tuple(shape)
        return tuple(self.fresh(size, ids=len(listed) == 1) for size in listed)

    def begin(self, op: str) -> None:
        """What follows is said by this op."""
        self.at = op
        self.ops.append((len(self.env.guards), op))

    def equal(self, left: Size, right: Size) -> None:
        """Two sizes are one.

        Raises:
            UndecidedError: they are not, as recorded.
        """
        if not left == right:
            raise UndecidedError(f"{self.at}: {left} and {right} are not of one size")

    def grows(self, size: Size, *, ids: bool = False) -> None:
        """A size is `times` as large at `times` the batch.

        Args:
            ids: it is a number of ids, which need be no multiple of the samples.
        """
        if self.hint(size) > 0:
            self.growing.append((self.expression(size), self.at))
            (self.id_counts if ids else self.bag_counts).append(self.growing[-1][0])

    def stays(self, size: Size) -> None:
        """A size has nothing to do with the batch."""
        self.equal(size, self.hint(size))

    def hint(self, size: Size) -> int:
        """The size as recorded."""
        return size if isinstance(size, int) else int(size.node.hint)

    def expression(self, size: Size) -> sympy.Expr:
        """The size in symbols that no other stands for."""
        if isinstance(size, int):
            return sympy.Integer(size)
        return self.env.simplify(size.node.expr)

    def plain(self, shape: Iterable[Size]) -> Shape:
        """A shape with numbers where nothing is open."""
        return tuple(
            int(made) if (made := self.expression(size)).is_number else size for size in shape
        )

    def constraints(self) -> list[Constraint]:
        """What the ops said that no replacement of a symbol tells."""
        found: dict[Any, str] = {}
        for i, guard in enumerate(self.env.guards):
            if not isinstance(guard.expr, sympy.Eq):
                continue
            left, right = (self.env.simplify(side) for side in guard.expr.args)
            if left != right and (left.free_symbols or right.free_symbols):
                found.setdefault((left, right), self._op(i))
        self.counted = self._symbols(self.id_counts) - self._symbols(self.bag_counts)
        made = [Constraint(left, right, op) for (left, right), op in found.items()]
        for expression, op in self.growing:
            now = self.env.simplify(expression)
            grown = sympy.Integer(PRIME * self.value(now, {}, 1))
            made.append(Constraint(now, grown, op))
        return made

    def _op(self, guard: int) -> str:
        return next((op for start, op in reversed(self.ops) if start <= guard), "")

    def value(self, expression: sympy.Expr, known: dict[sympy.Symbol, bool], times: int) -> int:
        """A size at `times` the batch; symbols that are not known to grow are as recorded."""
        at = {
            symbol: sympy.Integer(self._grow(symbol, times if known.get(symbol) else 1))
            for symbol in expression.free_symbols
        }
        return int(expression.xreplace(at))

    def _symbols(self, expressions: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
        return {s for e in expressions for s in self.env.simplify(e).free_symbols}

    def _grow(self, symbol: sympy.Symbol, times: int) -> int:
        size = self.hints[symbol]
        if size % self.samples == 1 and symbol not in self.counted:
            # offsets have one entry more than there are bags
            return (size - 1) * times + 1
        return size * times


def propagate(
    sizes: Sizes, constraints: Iterable[Constraint], known: dict[sympy.Symbol, bool]
) -> None:
    """Add to `known` what the constraints leave no choice of.

    Raises:
        InputError: they cannot all hold.
    """
    open_ones = list(constraints)
    changed = True
    while changed:
        changed = False
        for constraint in list(open_ones):
            before = len(known)
            unknown = _unknown(constraint, known)
            if len(unknown) > ENUMERATED:
                _bound(sizes, constraint, unknown, known)
            else:
                _narrow(sizes, constraint, unknown, known)
            changed |= len(known) > before
            if not _unknown(constraint, known):
                open_ones.remove(constraint)


def _unknown(constraint: Constraint, known: dict[sympy.Symbol, bool]) -> list[sympy.Symbol]:
    symbols = constraint.left.free_symbols | constraint.right.free_symbols
    return sorted(symbols - known.keys(), key=str)


def batch_unclear(why: str) -> InputError:
    """One trace is not enough to scale the batch."""
    return InputError(
        f"the batch cannot be scaled: {why}; give a trace of the same job at twice the batch too",
        inputs=("doubled",),
    )


def _narrow(
    sizes: Sizes,
    constraint: Constraint,
    unknown: list[sympy.Symbol],
    known: dict[sympy.Symbol, bool],
) -> None:
    fitting: list[tuple[bool, ...]] = []
    for choice in itertools.product((False, True), repeat=len(unknown)):
        trial = known | dict(zip(unknown, choice, strict=True))
        sides = (sizes.value(e, trial, PRIME) for e in (constraint.left, constraint.right))
        if len(set(sides)) == 1:
            fitting.append(choice)
    if not fitting:
        raise batch_unclear(
            f"no size of {constraint.op} can grow so that the ops around it still fit"
        )
    for symbol, column in zip(unknown, zip(*fitting, strict=True), strict=True):
        if len(set(column)) == 1:
            known[symbol] = column[0]


def _bound(
    sizes: Sizes,
    constraint: Constraint,
    unknown: list[sympy.Symbol],
    known: dict[sympy.Symbol, bool],
) -> None:
    """Sums of positive terms: at the least or the most that they can be there is one choice."""
    for side, other in ((constraint.left, constraint.right), (constraint.right, constraint.left)):
        if not (_is_positive(side) and _is_positive(other)):
            return
        least = sizes.value(side, known, PRIME)
        most = sizes.value(side, known | dict.fromkeys(unknown, True), PRIME)
        if least == sizes.value(other, known | dict.fromkeys(unknown, True), PRIME):
            known |= dict.fromkeys(side.free_symbols - known.keys(), False)
        elif most == sizes.value(other, known, PRIME):
            known |= dict.fromkeys(side.free_symbols - known.keys(), True)


def _is_positive(expression: sympy.Expr) -> bool:
    """Whether an expression is a sum of products of symbols and positive numbers."""
    if expression.is_Symbol or (expression.is_Integer and expression >= 0):
        return True
    return bool(expression.is_Add or expression.is_Mul) and all(map(_is_positive, expression.args))


class KnownShapes:
    """Shapes of the tensors so far.

    `saved` has those of lookups whose gradients come later, `bags` rows of lookups' outputs in the
    trace, `empty` extents of tensors without items, which TorchRec views as if a lookup gave them.
    """

    def __init__(self, sizes: Sizes, ids: frozenset[int]) -> None:
        self.sizes, self.ids = sizes, ids
        self.shapes: dict[int, Shape] = {}
        self.saved: dict[int, tuple[Shape, Shape]] = {}
        self.bags: set[int] = set()
        self.empty: list[Size] = []

    def of(self, term: Term) -> Shape:
        """The shape of a tensor."""
        assert isinstance(term, Slot)
        return self.shapes[term.number]

    def cut(self, extent: Size, bound: int, *, parts: bool = False) -> Size:
        """A bound that cuts an extent, and what is cut off, grow as the extent does.

        Args:
            parts: the bound is the size of one of the parts that make up the extent.
        """
        sizes = self.sizes
        whole = sizes.hint(extent)
        (extent,) = sizes.plain((extent,))
        if isinstance(extent, int) or bound <= 0 or bound >= whole:
            return extent if bound == whole else bound
        unit = gcd(bound, whole)
        if unit > 1:
            one = sizes.fresh(unit, ids=True)
            sizes.equal(extent, one * (whole // unit))
            return one * (bound // unit)
        if not parts:
            return bound
        if bound == 1:
            raise UndecidedError(f"{sizes.at}: cuts a part of one off a tensor that may grow")
        part = sizes.fresh(bound, ids=True)
        sizes.equal(part * whole, extent * bound)
        return part

    def neighbours(self, whole: Size, wanted: Sequence[int]) -> Shape | None:
        """Extents beside each other in a tensor before, whose product is split into such again.

        None if there are none, or several.
        """
        sizes, count = self.sizes, len(wanted)
        found: dict[Any, Shape] = {}
        for shape in self.shapes.values():
            real = tuple(size for size in shape if sizes.hint(size) != 1)
            hints = tuple(map(sizes.hint, real))
            for i in range(len(real) - count + 1):
                if hints[i : i + count] == tuple(wanted):
                    part = real[i : i + count]
                    found.setdefault(tuple(map(sizes.expression, part)), part)
        fitting = [
            part
            for key, part in found.items()
            if sizes.env.simplify(prod(key)) == sizes.expression(whole)
        ]
        return fitting[0] if len(fitting) == 1 else None


Rule = Callable[[KnownShapes, Call], tuple[Call, tuple[Any, ...]]]
"""A call -> the call with sizes in place of numbers, and the shapes of its outputs."""


def shapes_of(specs: Any) -> Any:
    """Recorded shapes of outputs, nested as they are."""
    return nested(lambda spec: None if spec is None else spec.shape, specs)


def with_argument(call: Call, at: int, term: Term) -> Call:
    """The call with one of its arguments replaced."""
    arguments = (*call.arguments[:at], term, *call.arguments[at + 1 :])
    return replace(call, arguments=arguments)


def whole_number(call: Call, at: int, default: int = 0) -> int:
    """An argument that is one."""
    term = call.arguments[at] if at < len(call.arguments) else None
    return int(term.value) if isinstance(term, Number) else default


def whole_numbers(term: Term) -> list[int]:
    """Those in a list."""
    assert isinstance(term, tuple)
    return [int(item.value) for item in term if isinstance(item, Number)]
