"""How sizes follow from sizes where an op has plain numbers as arguments.

A size that cuts a tensor is a part of it and grows as it does; the sizes of a view have the product
of what is viewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardopt.replay.program.program import Call, Number, Slot, Term, slots
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.program.values import is_lookup
from shardopt.replay.scale.sizes import (
    KnownShapes,
    Rule,
    Shape,
    Size,
    Sizes,
    UndecidedError,
    shapes_of,
    whole_number,
    whole_numbers,
    with_argument,
)

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


def _cumsum(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    source = known.of(call.arguments[0])
    return call, ((*source[:-1], source[-1] + 1),)


def _permuted(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """Lengths (features x samples) and their values in another order of features."""
    order, lengths, values = (known.of(call.arguments[at]) for at in (0, 1, 2))
    sizes = known.sizes
    sizes.grows(values[0], ids=True)
    if len(lengths) == 2:
        sizes.stays(order[0])
        sizes.stays(lengths[0])
        sizes.grows(lengths[1])
    given = call.arguments[4] if len(call.arguments) > 4 else None
    made = call
    if sizes.hint(order[0]) == sizes.hint(lengths[0]):
        total: Size = values[0]
    else:
        total = sizes.fresh(call.specs[1].shape[0], ids=True)
        sizes.grows(total, ids=True)
    if isinstance(given, Number):
        made = with_argument(made, 4, Number(total))
    weights = (total,) if call.arguments[3] is not None else None
    return made, (sizes.plain((order[0], *lengths[1:])), (total,), weights)


def _bucketized(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """Ids by the rank that holds their rows: lengths grow by the ranks, ids stay as many."""
    lengths, values = (known.of(call.arguments[at]) for at in (0, 1))
    known.sizes.grows(lengths[0])
    known.sizes.grows(values[0], ids=True)
    shapes: list[Any] = []
    for spec in call.specs:
        if spec is None:
            shapes.append(None)
        elif spec.shape and spec.shape[0] == known.sizes.hint(values[0]):
            shapes.append((values[0],))
        elif spec.shape and spec.shape[0] % known.sizes.hint(lengths[0]) == 0:
            shapes.append((lengths[0] * (spec.shape[0] // known.sizes.hint(lengths[0])),))
        else:
            raise UndecidedError(f"{call.op}: gives a tensor of a size that is neither")
    return call, tuple(shapes)


def _checked(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    rows, values, offsets = (known.of(call.arguments[at]) for at in (0, 1, 2))
    known.sizes.stays(rows[0])
    known.sizes.grows(values[0], ids=True)
    known.sizes.grows(offsets[0] - 1)
    return call, shapes_of(call.specs)


def _lookup(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """Ids and offsets follow each other; `offsets` has tables x samples + 1 entries."""
    sizes = known.sizes
    given = [term for term in call.arguments if isinstance(term, Slot)]
    listed = [s for t in call.arguments if isinstance(t, tuple) for s in t if isinstance(s, Slot)]
    at = next((i for i, slot in enumerate(given) if slot.number in known.ids), None)
    if at is None:
        raise UndecidedError(f"{call.op}: which of its arguments are the ids is not known")
    values, offsets = known.of(given[at]), known.of(given[at + 1])
    sizes.grows(values[0], ids=True)
    sizes.grows(offsets[0] - 1)
    backward = "backward" in call.op
    weighted = False
    for i, slot in enumerate([*given, *listed]):
        shape = known.of(slot)
        if i in (at, at + 1) or (backward and i == 0):
            continue
        if at + 1 < i < len(given) and not weighted and _alike(sizes, shape, values):
            sizes.equal(shape[0], values[0])
            weighted = True
            continue
        for size in shape:
            sizes.stays(size)
    first = known.of(given[0]) if backward else shapes_of(call.specs)[0]
    bags = _rows(known, sizes.hint(first[0]), values[0], offsets[0])
    if backward:
        sizes.equal(first[0], bags)
        return call, shapes_of(call.specs)
    shape = (bags, *first[1:])
    handle = call.gives()[-1] if call.collective and call.gives() else None
    if handle is not None:
        known.saved[handle] = (shape, known.of(given[0]))
    return call, (shape, *shapes_of(call.specs)[1:])


def _alike(sizes: Sizes, shape: Shape, other: Shape) -> bool:
    return list(map(sizes.hint, shape)) == list(map(sizes.hint, other))


def _rows(known: KnownShapes, rows: int, values: Size, offsets: Size) -> Size:
    """Rows of a lookup's output: bags, or ids where it does not pool."""
    sizes = known.sizes
    entries = sizes.hint(offsets) - 1
    if entries % rows == 0:
        bags = sizes.fresh(rows)
        sizes.equal(offsets, entries // rows * bags + 1)
        known.bags.add(rows)
        return bags
    if rows == sizes.hint(values):
        return values
    raise UndecidedError("a lookup gives neither a row a sample nor a row an id")


def _backward(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    handle = call.arguments[0]
    assert isinstance(handle, Slot)
    if handle.number not in known.saved:
        raise UndecidedError(f"{call.op}: its lookup is not in the trace")
    wanted, first = known.saved[handle.number]
    for a, b in zip(known.of(call.arguments[1]), wanted, strict=True):
        known.sizes.equal(a, b)
    return call, (first,)


def _collective(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    """What a rank gets grows as what it gives; parts grow as what they are parts of."""
    made = call
    total: dict[str, Size] = {}
    for at, (name, term) in enumerate(zip(call.names, call.arguments, strict=True)):
        if "split_sizes" in name:
            of = known.of(call.arguments[call.names.index(name.partition("_")[0])])
            parts = whole_numbers(term)
            made = with_argument(
                made, at, tuple(Number(known.cut(of[0], n, parts=True)) for n in parts)
            )
        elif name.startswith(("in", "out")):
            side = "in" if name.startswith("in") else "out"
            for number in slots(term):
                size: Size = 1
                for extent in known.shapes[number]:
                    size = size * extent
                total[side] = total.get(side, 0) + size
    if len(total) == 2 and all(known.sizes.hint(size) for size in total.values()):
        given, got = (known.sizes.hint(total[side]) for side in ("in", "out"))
        known.sizes.equal(total["in"] * got, total["out"] * given)
    return made, ()


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
    "fbgemm::asynchronous_complete_cumsum": _cumsum,
    "fbgemm::asynchronous_inclusive_cumsum": _like_first,
    "fbgemm::asynchronous_exclusive_cumsum": _like_first,
    "fbgemm::permute_2D_sparse_data": _permuted,
    "fbgemm::permute_1D_sparse_data": _permuted,
    "fbgemm::block_bucketize_sparse_features": _bucketized,
    "fbgemm::bounds_check_indices": _checked,
}


def rule_of(call: Call) -> Rule | None:
    """The rule of an op, if it has one."""
    if call.is_collective:
        return _collective
    if call.op.startswith("backward of "):
        return _backward
    return _lookup if is_lookup(call.op) else RULES.get(call.op)
