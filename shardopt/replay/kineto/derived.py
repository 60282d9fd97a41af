"""Arguments that a trace holds no value of, but that the shapes of the others force."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardopt.replay.kineto.inputs import Input

Shape = tuple[int, ...]


@dataclass
class Autograd:
    """What a trace shows of an op at its backward function, or of a function at its op.

    Args:
        inputs: shapes of the tensors that the op took.
        gradient: shape of its output; None: not known.
    """

    inputs: set[Shape] = field(default_factory=set)
    gradient: Shape | None = None


Named = Mapping[str, Input]
MASK = re.compile(r"bool\[(\d)\]")


def derive_value(op: str, parameter: str, kind: str, named: Named, other: Autograd) -> Any:
    """The value of an argument; None: the shapes leave it open.

    Args:
        kind: type of the parameter in the schema.
        other: of an op in a backward function, what the forward op took; else what it gave.
    """
    mask = MASK.match(kind)
    if mask is not None:
        # autograd asks for all gradients but of inputs that need none
        return (True,) * int(mask[1])
    if parameter == "dim" and _first(named, "self") is not None and kind == "int":
        return _dim(op, named)
    make = MAKERS.get((op, parameter))
    return None if make is None else make(named, other)


def _first(named: Named, name: str) -> Shape | None:
    given = named.get(name)
    return given.shapes[0] if given is not None and given.shapes else None


def _dim(op: str, named: Named) -> int | None:
    """The dimension along which an index counts: the one where shapes differ."""
    whole = _first(named, "self")
    if whole is None:
        return None
    if len(whole) <= 1:
        return 0
    index, source = _first(named, "index"), _first(named, "source")
    if op in ALONG_ALL and index is not None and len(index) == len(whole):
        return _only(d for d in range(len(whole)) if index[d] != whole[d])
    if op in ALONG_ONE and index is not None and source is not None and len(source) == len(whole):
        count = index[0] if index else 1
        fits = [d for d in range(len(whole)) if _without(whole, d) == _without(source, d)]
        return _only(d for d in fits if source[d] == count)
    return None


ALONG_ALL = frozenset(
    {"aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_"}
)
ALONG_ONE = frozenset(
    {"aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_"}
)


def _only(found: Any) -> int | None:
    listed = list(found)
    return listed[0] if len(listed) == 1 else None


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _summed_dims(named: Named, other: Autograd) -> Shape | None:
    """A gradient is summed down to the shape of an input that was expanded."""
    whole = _first(named, "self")
    if whole is None or len(whole) <= 1:
        return None if whole is None else tuple(range(len(whole)))
    if other.gradient is not None and other.gradient != whole:
        return _reduced_dims(whole, other.gradient)
    ways = {dims for shape in other.inputs if (dims := _expanded_dims(shape, whole))}
    return ways.pop() if len(ways) == 1 else None


def _reduced_dims(whole: Shape, result: Shape) -> Shape | None:
    """Along which dimensions the result of a sum is shorter."""
    if len(result) == len(whole):
        return tuple(d for d, size in enumerate(whole) if size != result[d]) or None
    only = _only(d for d in range(len(whole)) if _without(whole, d) == result)
    return None if only is None else (only,)


def _expanded_dims(shape: Shape, whole: Shape) -> Shape | None:
    """Along which dimensions a shape was expanded; None if it cannot become the other."""
    more = len(whole) - len(shape)
    if more < 0:
        return None
    pairs = list(zip(shape, whole[more:], strict=True))
    if any(size not in (1, other) for size, other in pairs):
        return None
    grown = tuple(more + d for d, (size, other) in enumerate(pairs) if size != other)
    return (*range(more), *grown)


def _like(*names: str) -> Callable[[Named, Autograd], Shape | None]:
    return lambda named, _: next((s for n in names if (s := _first(named, n)) is not None), None)


MAKERS: dict[tuple[str, str], Callable[[Named, Autograd], Any]] = {
    ("aten::sum", "dim"): _summed_dims,
    ("aten::layer_norm", "normalized_shape"): _like("weight", "bias"),
    ("aten::native_layer_norm", "normalized_shape"): _like("weight", "bias"),
    ("aten::native_layer_norm_backward", "normalized_shape"): _like("weight", "bias"),
}
