"""How sizes follow from sizes where an op has plain numbers as arguments.

A size that cuts a tensor is a part of it and grows as it does; the sizes of a view have the product
of what is viewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardopt.replay.program.program import Call, Number, Term
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.scale.known import (
    KnownShapes,
    Rule,
    whole_number,
    whole_numbers,
    with_argument,
)
from shardopt.replay.scale.lookups import foreign_rule_of
from shardopt.replay.scale.sizes import Shape, Size, Sizes, UndecidedError

END = 1 << 62
"""Ends of slices beyond it mean: to the end."""


def _view(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """`aten::view` and its like: source and wanted sizes."""
    source = known.of(call.arguments[0])
    given = whole_numbers(call.arguments[1])
    wanted = call.specs[0].shape
    made = view_shape(known, source, wanted)
    term = tuple(Number(n) if n < 0 else Number(s) for n, s in zip(given, made, strict=True))
    return with_argument(call, 1, term), (made,)


def view_shape(known: KnownShapes, source: Shape, wanted: Sequence[int]) -> Shape:
    """Sizes of a view: groups of extents with one product on both sides keep it."""
    sizes = known.sizes
    hints = [sizes.hint(size) for size in source]
    if 0 in hints:
        empty = tuple(map(sizes.fresh, wanted))
        known.empty += empty
        return empty
    made: list[Size] = []
    i = j = 0
    while i < len(hints) or j < len(wanted):
        first, start = i, j
        left, right = 1, 1
        while True:
            if left == right and (i > first or j > start) and left != 1:
                break
            if left <= right and i < len(hints):
                left *= hints[i]
                i += 1
            elif j < len(wanted):
                right *= wanted[j]
                j += 1
            else:
                break
        made += _group(known, source[first:i], wanted[start:j])
    return sizes.plain(made)


def _group(known: KnownShapes, source: Shape, wanted: Sequence[int]) -> list[Size]:
    sizes = known.sizes
    whole: Size = 1
    for size in source:
        whole = whole * size
    real = [n for n in wanted if n != 1]
    if isinstance(whole, int) or len(real) == 0:
        return list(wanted)
    if tuple(real) == tuple(h for h in map(sizes.hint, source) if h != 1):
        kept = iter([size for size in source if sizes.hint(size) != 1])
        return [1 if n == 1 else next(kept) for n in wanted]
    if len(real) == 1:
        return [1 if n == 1 else whole for n in wanted]
    before = known.neighbours(whole, real)
    if before is not None:
        kept = iter(before)
        return [1 if n == 1 else next(kept) for n in wanted]
    made = [sizes.fresh(n) for n in wanted]
    product: Size = 1
    for size in made:
        product = product * size
    sizes.equal(whole, product)
    return made


def _slice(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    source = known.of(call.arguments[0])
    dim = whole_number(call, 1) % len(source)
    extent, step = source[dim], whole_number(call, 4, 1)
    made = call
    cuts = []
    for at in (2, 3):
        bound = whole_number(call, at, 0 if at == 2 else END)
        cuts.append(_bound(known, extent, bound, ids=len(source) == 1))
        if isinstance(call.arguments[at] if at < len(call.arguments) else None, Number):
            made = with_argument(made, at, Number(cuts[-1]))
    start, end = _ends(known.sizes, extent, cuts)
    size = end - start if step == 1 else (end - start + step - 1) // step
    return made, (known.sizes.plain((*source[:dim], size, *source[dim + 1 :])),)


def _ends(sizes: Sizes, extent: Size, bounds: Sequence[Size]) -> tuple[Size, Size]:
    """Where a slice starts and ends, counted from the front."""
    start, end = (extent + b if sizes.hint(b) < 0 else b for b in bounds)
    return start, extent if sizes.hint(end) >= sizes.hint(extent) else end


def _bound(known: KnownShapes, extent: Size, bound: int, *, ids: bool = False) -> Size:
    """Where a tensor is cut; one that may hold ids, where it has a part of them.

    Args:
        ids: the tensor may hold them.
    """
    if bound < 0:
        return -known.cut(extent, -bound)
    return known.cut(
        extent, bound, parts=ids and known.sizes.hint(extent) % known.sizes.samples > 1
    )


def _narrow(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    source = known.of(call.arguments[0])
    dim = whole_number(call, 1) % len(source)
    start, length = (_bound(known, source[dim], whole_number(call, at)) for at in (2, 3))
    made = with_argument(with_argument(call, 2, Number(start)), 3, Number(length))
    return made, (known.sizes.plain((*source[:dim], length, *source[dim + 1 :])),)


def _split(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    source = known.of(call.arguments[0])
    dim = whole_number(call, 2) % len(source)
    term = call.arguments[1]
    cuts: Term
    if isinstance(term, tuple):
        parts = [known.cut(source[dim], n, parts=True) for n in whole_numbers(term)]
        cuts = tuple(Number(n) for n in parts)
    else:
        part = known.cut(source[dim], whole_number(call, 1))
        cuts = Number(part)
        sizes = [spec.shape[dim] for spec in call.specs[0]]
        parts = [part if n == whole_number(call, 1) else known.cut(source[dim], n) for n in sizes]
    shapes = tuple(known.sizes.plain((*source[:dim], n, *source[dim + 1 :])) for n in parts)
    return with_argument(call, 1, cuts), (shapes,)


def _select(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    source = known.of(call.arguments[0])
    dim = whole_number(call, 1) % len(source)
    return call, ((*source[:dim], *source[dim + 1 :]),)


def _as_strided(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    source = known.of(call.arguments[0])
    wanted = whole_numbers(call.arguments[1])
    if all(isinstance(size, int) for size in source):
        return call, (tuple(wanted),)
    same = [known.sizes.hint(size) for size in source] == wanted
    if same and tuple(whole_numbers(call.arguments[2])) == contiguous(wanted):
        steps: list[Size] = []
        step: Size = 1
        for size in reversed(source):
            steps.append(step)
            step = step * size
        made = with_argument(call, 1, tuple(map(Number, source)))
        return with_argument(made, 2, tuple(map(Number, reversed(steps)))), (source,)
    if len(source) > 1:
        raise UndecidedError(f"{call.op}: sees a storage in another way than its tensor")
    # a flat tensor of gradients of many parameters
    known.sizes.stays(source[0])
    return call, (tuple(wanted),)


def _sliced_back(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """`slice_backward` and `select_backward`: the gradient of what was cut."""
    grad = known.of(call.arguments[0])
    wanted = whole_numbers(call.arguments[1])
    dim = whole_number(call, 2) % len(wanted)
    rest = list(grad)
    if call.op.endswith("slice_backward"):
        cut = rest.pop(dim)
    else:
        cut = 1
    whole = known.sizes.hint(cut) == wanted[dim] and call.op.endswith("slice_backward")
    extent = cut if whole else known.sizes.fresh(wanted[dim])
    shape = (*rest[:dim], extent, *rest[dim:])
    made = with_argument(call, 1, tuple(Number(size) for size in shape))
    if call.op.endswith("slice_backward"):
        bounds = [_bound(known, extent, whole_number(call, at)) for at in (3, 4)]
        made = with_argument(with_argument(made, 3, Number(bounds[0])), 4, Number(bounds[1]))
        if not whole:
            start, end = _ends(known.sizes, extent, bounds)
            if whole_number(call, 5, 1) == 1:
                known.sizes.equal(end - start, cut)
    return made, (known.sizes.plain(shape),)


def _like_first(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    return call, tuple(
        known.of(call.arguments[0]) if spec is not None else None for spec in call.specs
    )


def _norm_back(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """`cudnn_batch_norm_backward`: input, gradient, weight."""
    source, grad, weight = (known.of(call.arguments[at]) for at in (0, 1, 2))
    for a, b in zip(source, grad, strict=True):
        known.sizes.equal(a, b)
    return call, (source, weight, weight)


VIEWS = ("view", "reshape", "_unsafe_view", "_reshape_alias", "view_copy")
RULES: dict[str, Rule] = {
    **{f"aten::{name}": _view for name in VIEWS},
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::select": _select,
    "aten::as_strided": _as_strided,
    "aten::slice_backward": _sliced_back,
    "aten::select_backward": _sliced_back,
    "aten::pin_memory": _like_first,
    "aten::to": _like_first,
    "aten::cudnn_batch_norm_backward": _norm_back,
}


def rule_of(call: Call) -> Rule | None:
    """The rule of an op, if it has one."""
    return foreign_rule_of(call) or RULES.get(call.op)
