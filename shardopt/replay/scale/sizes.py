"""Sizes of a program as symbols: each that may be the batch's is one of PyTorch's `ShapeEnv`.

Ops that run on tensors of such sizes tell which of them must be equal
(`torch.fx.experimental.symbolic_shapes`); `decide` settles the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from predictor.errors import InputError
from shardopt.replay.program.program import Call, RankProgram, Slot, Term

Size = Any
"""A whole number, or a `torch.SymInt`."""
Shape = tuple[Size, ...]
PRIME = 10007
"""The multiple at which constraints are solved: what fits by chance at 2 or 3 does not at this."""


class UndecidedError(Exception):
    """Sizes contradict each other; says where."""


def batch_unclear(why: str) -> InputError:
    """One trace is not enough to scale the batch."""
    return InputError(
        f"the batch cannot be scaled: {why}; give a trace of the same job at twice the batch too",
        inputs=("doubled",),
    )


class Constraint(NamedTuple):
    """Two expressions are equal at any batch, as an op says."""

    left: sympy.Expr
    right: sympy.Expr
    op: str

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """All in it."""
        return set(self.left.free_symbols | self.right.free_symbols)


class _Env(ShapeEnv):
    """Refuses ops that want a plain number for a symbol: they would make it one for all others."""

    def evaluate_expr(self, orig_expr: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(orig_expr, sympy.Expr) and not self.simplify(orig_expr).is_number:
            raise RuntimeError("takes a plain number for a size")
        return super().evaluate_expr(orig_expr, *arguments, **keywords)


class Sizes:
    """The symbols of one program; `at` is the op that is under way.

    `counted` are numbers of ids that are no numbers of bags.

    Args:
        samples: of a rank. Sizes that are no multiple of it are numbers, but for ids and offsets.
    """

    def __init__(self, samples: int) -> None:
        self.env = _Env()
        self.samples = samples
        self.at = ""
        self.origin: dict[sympy.Symbol, str] = {}
        self.hints: dict[sympy.Symbol, int] = {}
        self.growing: list[tuple[sympy.Expr, str, bool]] = []
        self.counted: set[sympy.Symbol] = set()
        self._sources: list[str] = []

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
        self._sources += [self.at] * (len(self.env.guards) - len(self._sources))
        self.at = op

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
            self.growing.append((self.expression(size), self.at, ids))

    def stays(self, *sizes: Size) -> None:
        """Sizes have nothing to do with the batch."""
        for size in sizes:
            self.equal(size, self.hint(size))

    def hint(self, size: Size) -> int:
        """The size as recorded."""
        return size if isinstance(size, int) else int(size.node.hint)

    def hints_of(self, shape: Iterable[Size]) -> list[int]:
        """A shape as recorded."""
        return list(map(self.hint, shape))

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
        self.begin("")
        found: dict[Any, str] = {}
        for guard, op in zip(self.env.guards, self._sources, strict=True):
            if not isinstance(guard.expr, sympy.Eq):
                continue
            left, right = (self.env.simplify(side) for side in guard.expr.args)
            if left != right and (left.free_symbols or right.free_symbols):
                found.setdefault((left, right), op)
        growing = [(self.env.simplify(now), op, ids) for now, op, ids in self.growing]
        of_ids, of_bags = (
            {s for now, _, kind in growing if kind == ids for s in now.free_symbols}
            for ids in (True, False)
        )
        self.counted = of_ids - of_bags
        return [
            *(Constraint(left, right, op) for (left, right), op in found.items()),
            *(Constraint(now, PRIME * self.value(now, {}, 1), op) for now, op, _ in growing),
        ]

    def value(
        self, expression: sympy.Expr, known: dict[sympy.Symbol, bool], times: int
    ) -> sympy.Integer:
        """A size at `times` the batch; symbols that are not known to grow are as recorded."""
        at = {}
        for symbol in expression.free_symbols:
            size, n = self.hints[symbol], times if known.get(symbol) else 1
            # offsets have one entry more than there are bags
            over = size % self.samples == 1 and symbol not in self.counted
            at[symbol] = sympy.Integer((size - over) * n + over)
        return sympy.Integer(int(expression.xreplace(at)))


class SymbolicProgram:
    """A program with sizes as symbols, as far as it was walked through.

    `calls` have symbols in their arguments, `outputs` are the shapes of what each gives, nested as
    its specs, and `shapes` and `specs` those of all tensors so far. `saved` has shapes of lookups
    whose gradients come later, `bags` rows of lookups' outputs in the trace, `empty` extents of
    tensors without items, which TorchRec views as if a lookup gave them.

    Args:
        fixed: of the tensors made up front, what keeps its sizes.
    """

    def __init__(self, program: RankProgram, sizes: Sizes, fixed: frozenset[int]) -> None:
        self.program, self.sizes, self.fixed = program, sizes, fixed
        self.specs = dict(program.made)
        self.made: dict[int, Shape] = {}
        for number, spec in program.made.items():
            sizes.at = f"tensor {number}"
            self.made[number] = spec.shape if number in fixed else sizes.shape(spec.shape)
        self.shapes = dict(self.made)
        self.calls: list[Call] = []
        self.outputs: list[tuple[Any, ...]] = []
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
            for i in range(len(real) - count + 1):
                part = real[i : i + count]
                if sizes.hints_of(part) == list(wanted):
                    found.setdefault(tuple(map(sizes.expression, part)), part)
        fitting = [
            part
            for key, part in found.items()
            if sizes.env.simplify(prod(key)) == sizes.expression(whole)
        ]
        return fitting[0] if len(fitting) == 1 else None
