"""What is known of the tensors of a program while their sizes are worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from shardopt.replay.program.program import Call, Number, Slot, Term
from shardopt.replay.scale.sizes import Shape, Size, Sizes, UndecidedError


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
    if isinstance(specs, tuple):
        return tuple(shapes_of(spec) for spec in specs)
    return None if specs is None else specs.shape


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
