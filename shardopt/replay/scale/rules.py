"""How sizes follow from sizes where an op has plain numbers as arguments.

A size that cuts a tensor is a part of it and grows as it does; the sizes of a view have the product
of what is viewed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from shardopt.replay.program.program import Call, Slot, Term, nested, slots
from shardopt.replay.program.schema import ops_of
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.program.values import is_lookup
from shardopt.replay.scale.sizes import Shape, Size, Sizes, SymbolicProgram, UndecidedError

END = 1 << 62
"""Ends of slices beyond it mean: to the end."""
Found = tuple[tuple[Any, ...], Mapping[int, Any]]
"""Shapes of a call's outputs, and sizes in place of the numbers at some of its arguments."""
Rule = Callable[[SymbolicProgram, Call], Found]


def shapes_of(specs: Any) -> Any:
    """Recorded shapes of outputs, nested as they are."""
    return nested(lambda spec: None if spec is None else spec.shape, specs)


def _number(call: Call, at: int, default: int = 0) -> int:
    term = call.arguments[at] if at < len(call.arguments) else None
    return int(term) if isinstance(term, (int, float)) else default


def _numbers(term: Term) -> list[int]:
    assert isinstance(term, tuple)
    return [int(item) for item in term if isinstance(item, (int, float))]


def _dim(call: Call, at: int, shape: Sequence[Size]) -> int:
    return _number(call, at) % len(shape)


def _with(shape: Shape, dim: int, *extents: Size) -> Shape:
    """A shape with others in the place of one extent."""
    return (*shape[:dim], *extents, *shape[dim + 1 :])


def _view(walk: SymbolicProgram, call: Call) -> Found:
    """`aten::view` and its like: source and wanted sizes."""
    made = view_shape(walk, walk.of(call.arguments[0]), call.specs[0].shape)
    given = zip(_numbers(call.arguments[1]), made, strict=True)
    return (made,), {1: tuple(n if n < 0 else size for n, size in given)}


def view_shape(walk: SymbolicProgram, source: Shape, wanted: Sequence[int]) -> Shape:
    """Sizes of a view: groups of extents with one product on both sides keep it."""
    sizes = walk.sizes
    hints = sizes.hints_of(source)
    if 0 in hints:
        empty = tuple(map(sizes.fresh, wanted))
        walk.empty += empty
        return empty
    made: list[Size] = []
    i = j = 0
    while i < len(hints) or j < len(wanted):
        first, start = i, j
        left = right = 1
        while left != right or left == 1:
            if left <= right and i < len(hints):
                left *= hints[i]
                i += 1
            elif j < len(wanted):
                right *= wanted[j]
                j += 1
            else:
                break
        made += _group(walk, source[first:i], wanted[start:j])
    return sizes.plain(made)


def _group(walk: SymbolicProgram, source: Shape, wanted: Sequence[int]) -> list[Size]:
    sizes = walk.sizes
    whole: Size = prod(source)
    real = [n for n in wanted if n != 1]
    kept = tuple(size for size in source if sizes.hint(size) != 1)
    if isinstance(whole, int) or not real:
        return list(wanted)
    if real == sizes.hints_of(kept):
        made = kept
    elif len(real) == 1:
        made = (whole,)
    elif (before := walk.neighbours(whole, real)) is not None:
        made = before
    else:
        made = tuple(map(sizes.fresh, real))
        sizes.equal(whole, prod(made))
    following = iter(made)
    return [1 if n == 1 else next(following) for n in wanted]


def _slice(walk: SymbolicProgram, call: Call) -> Found:
    source = walk.of(call.arguments[0])
    dim = _dim(call, 1, source)
    extent, step = source[dim], _number(call, 4, 1)
    ids = len(source) == 1
    cuts = {
        at: _bound(walk, extent, _number(call, at, default), ids=ids)
        for at, default in ((2, 0), (3, END))
    }
    start, end = _ends(walk.sizes, extent, [*cuts.values()])
    size = end - start if step == 1 else (end - start + step - 1) // step
    given = {
        at: cut for at, cut in cuts.items() if call.arguments[at : at + 1] not in ((), (None,))
    }
    return (walk.sizes.plain(_with(source, dim, size)),), given


def _ends(sizes: Sizes, extent: Size, bounds: Sequence[Size]) -> tuple[Size, Size]:
    """Where a slice starts and ends, counted from the front."""
    start, end = (extent + b if sizes.hint(b) < 0 else b for b in bounds)
    return start, extent if sizes.hint(end) >= sizes.hint(extent) else end


def _bound(walk: SymbolicProgram, extent: Size, bound: int, *, ids: bool = False) -> Size:
    """A bound that counts from the front or from the end, where it has a part of them.

    Args:
        ids: the tensor may hold them.
    """
    if bound < 0:
        return -walk.cut(extent, -bound)
    sizes = walk.sizes
    return walk.cut(extent, bound, parts=ids and sizes.hint(extent) % sizes.samples > 1)


def _narrow(walk: SymbolicProgram, call: Call) -> Found:
    source = walk.of(call.arguments[0])
    dim = _dim(call, 1, source)
    start, length = (_bound(walk, source[dim], _number(call, at)) for at in (2, 3))
    return (walk.sizes.plain(_with(source, dim, length)),), {2: start, 3: length}


def _split(walk: SymbolicProgram, call: Call) -> Found:
    source, given = walk.of(call.arguments[0]), call.arguments[1]
    dim = _dim(call, 2, source)
    cuts: Any
    if isinstance(given, tuple):
        cuts = parts = tuple(walk.cut(source[dim], n, parts=True) for n in _numbers(given))
    else:
        cuts = walk.cut(source[dim], _number(call, 1))
        extents = [spec.shape[dim] for spec in call.specs[0]]
        parts = tuple(cuts if n == given else walk.cut(source[dim], n) for n in extents)
    return (tuple(walk.sizes.plain(_with(source, dim, n)) for n in parts),), {1: cuts}


def _select(walk: SymbolicProgram, call: Call) -> Found:
    source = walk.of(call.arguments[0])
    return (_with(source, _dim(call, 1, source)),), {}


def _as_strided(walk: SymbolicProgram, call: Call) -> Found:
    source = walk.of(call.arguments[0])
    wanted = _numbers(call.arguments[1])
    if all(isinstance(size, int) for size in source):
        return (tuple(wanted),), {}
    same = walk.sizes.hints_of(source) == wanted
    if same and tuple(_numbers(call.arguments[2])) == contiguous(wanted):
        strides = tuple(prod(source[at + 1 :]) for at in range(len(source)))
        return (source,), {1: source, 2: strides}
    if len(source) > 1:
        raise UndecidedError(f"{call.op}: sees a storage in another way than its tensor")
    # a flat tensor of gradients of many parameters
    walk.sizes.stays(source[0])
    return (tuple(wanted),), {}


def _sliced_back(walk: SymbolicProgram, call: Call) -> Found:
    """`slice_backward` and `select_backward`: the gradient of what was cut."""
    sizes, grad = walk.sizes, walk.of(call.arguments[0])
    wanted = _numbers(call.arguments[1])
    dim = _dim(call, 2, wanted)
    sliced = call.op.endswith("slice_backward")
    cut = grad[dim] if sliced else 1
    rest = _with(grad, dim) if sliced else grad
    whole = sliced and sizes.hint(cut) == wanted[dim]
    extent = cut if whole else sizes.fresh(wanted[dim])
    shape = (*rest[:dim], extent, *rest[dim:])
    changed: dict[int, Any] = {1: shape}
    if sliced:
        bounds = [_bound(walk, extent, _number(call, at)) for at in (3, 4)]
        changed |= dict(zip((3, 4), bounds, strict=True))
        if not whole and _number(call, 5, 1) == 1:
            start, end = _ends(sizes, extent, bounds)
            sizes.equal(end - start, cut)
    return (sizes.plain(shape),), changed


def _like_first(walk: SymbolicProgram, call: Call) -> Found:
    first = walk.of(call.arguments[0])
    return tuple(None if spec is None else first for spec in call.specs), {}


def _norm_back(walk: SymbolicProgram, call: Call) -> Found:
    """`cudnn_batch_norm_backward`: input, gradient, weight."""
    source, grad, weight = (walk.of(call.arguments[at]) for at in (0, 1, 2))
    for a, b in zip(source, grad, strict=True):
        walk.sizes.equal(a, b)
    return (source, weight, weight), {}


def _cumsum(walk: SymbolicProgram, call: Call) -> Found:
    source = walk.of(call.arguments[0])
    return ((*source[:-1], source[-1] + 1),), {}


def _permuted(walk: SymbolicProgram, call: Call) -> Found:
    """Lengths (features x samples) and their values in another order of features."""
    order, lengths, values = (walk.of(call.arguments[at]) for at in (0, 1, 2))
    sizes = walk.sizes
    sizes.grows(values[0], ids=True)
    if len(lengths) == 2:
        sizes.stays(order[0], lengths[0])
        sizes.grows(lengths[1])
    total: Size = values[0]
    if sizes.hint(order[0]) != sizes.hint(lengths[0]):
        total = sizes.fresh(call.specs[1].shape[0], ids=True)
        sizes.grows(total, ids=True)
    told = len(call.arguments) > 4 and call.arguments[4] is not None
    weights = None if call.arguments[3] is None else (total,)
    shapes = (sizes.plain((order[0], *lengths[1:])), (total,), weights)
    return shapes, {4: total} if told else {}


def _bucketized(walk: SymbolicProgram, call: Call) -> Found:
    """Ids by the rank that holds their rows: lengths grow by the ranks, ids stay as many."""
    sizes = walk.sizes
    lengths, values = (walk.of(call.arguments[at])[0] for at in (0, 1))
    sizes.grows(lengths)
    sizes.grows(values, ids=True)
    shapes: list[Any] = []
    for spec in call.specs:
        if spec is None:
            shapes.append(None)
        elif spec.shape and spec.shape[0] == sizes.hint(values):
            shapes.append((values,))
        elif spec.shape and spec.shape[0] % sizes.hint(lengths) == 0:
            shapes.append((lengths * (spec.shape[0] // sizes.hint(lengths)),))
        else:
            raise UndecidedError(f"{call.op}: gives a tensor of a size that is neither")
    return tuple(shapes), {}


def _checked(walk: SymbolicProgram, call: Call) -> Found:
    rows, values, offsets = (walk.of(call.arguments[at]) for at in (0, 1, 2))
    walk.sizes.stays(rows[0])
    walk.sizes.grows(values[0], ids=True)
    walk.sizes.grows(offsets[0] - 1)
    return shapes_of(call.specs), {}


def find_ids(fills: Mapping[int, Mapping[str, Any]], given: Sequence[Slot]) -> int | None:
    """Which of a lookup's tensors are its ids; offsets come next."""
    kinds = [fills.get(slot.number, {}).get("kind") for slot in given[:-1]]
    return next((at for at, kind in enumerate(kinds) if kind in ("table_ids", "ids")), None)


def _lookup(walk: SymbolicProgram, call: Call) -> Found:
    """Ids and offsets follow each other; `offsets` has tables x samples + 1 entries."""
    sizes = walk.sizes
    given = [term for term in call.arguments if isinstance(term, Slot)]
    at = find_ids(walk.program.fills, given)
    if at is None:
        raise UndecidedError(f"{call.op}: which of its arguments are the ids is not known")
    values, offsets = walk.of(given[at]), walk.of(given[at + 1])
    sizes.grows(values[0], ids=True)
    sizes.grows(offsets[0] - 1)
    backward = "backward" in call.op
    others = [*range(backward, at), *range(at + 2, len(given))]
    behind = (i for i in others if i > at)
    # weights of samples have an entry an id
    alike = (i for i in behind if sizes.hints_of(walk.of(given[i])) == sizes.hints_of(values))
    weights = next(alike, None)
    for i in others:
        shape = walk.of(given[i])
        if i == weights:
            sizes.equal(shape[0], values[0])
        else:
            sizes.stays(*shape)
    for term in call.arguments:
        for number in slots(term) if isinstance(term, tuple) else ():
            sizes.stays(*walk.shapes[number])
    recorded = shapes_of(call.specs)
    first = walk.of(given[0]) if backward else recorded[0]
    bags = _rows(walk, sizes.hint(first[0]), values[0], offsets[0])
    if backward:
        sizes.equal(first[0], bags)
        return recorded, {}
    shape = (bags, *first[1:])
    if call.with_grad and call.gives():
        walk.saved[call.gives()[-1]] = (shape, walk.of(given[0]))
    return (shape, *recorded[1:]), {}


def _rows(walk: SymbolicProgram, rows: int, values: Size, offsets: Size) -> Size:
    """Rows of a lookup's output: bags, or ids where it does not pool."""
    sizes = walk.sizes
    entries = sizes.hint(offsets) - 1
    if entries % rows == 0:
        bags = sizes.fresh(rows)
        sizes.equal(offsets, entries // rows * bags + 1)
        walk.bags.add(rows)
        return bags
    if rows == sizes.hint(values):
        return values
    raise UndecidedError("a lookup gives neither a row a sample nor a row an id")


def _backward(walk: SymbolicProgram, call: Call) -> Found:
    handle = call.arguments[0]
    assert isinstance(handle, Slot)
    if handle.number not in walk.saved:
        raise UndecidedError(f"{call.op}: its lookup is not in the trace")
    wanted, first = walk.saved[handle.number]
    for a, b in zip(walk.of(call.arguments[1]), wanted, strict=True):
        walk.sizes.equal(a, b)
    return (first,), {}


def _collective(walk: SymbolicProgram, call: Call) -> Found:
    """What a rank gets grows as what it gives; parts grow as what they are parts of."""
    sizes = walk.sizes
    changed: dict[int, Any] = {}
    total: dict[str, Size] = {"in": 0, "out": 0}
    for at, (name, term) in enumerate(zip(call.names, call.arguments, strict=True)):
        if "split_sizes" in name:
            of = walk.of(call.arguments[call.names.index(name.partition("_")[0])])
            changed[at] = tuple(walk.cut(of[0], n, parts=True) for n in _numbers(term))
        elif (side := re.match("in|out", name)) is not None:
            total[side[0]] += sum(prod(walk.shapes[number]) for number in slots(term))
    given, got = (sizes.hint(total[side]) for side in ("in", "out"))
    if given and got:
        sizes.equal(total["in"] * got, total["out"] * given)
    return (), changed


RULES: dict[str, Rule] = {
    **dict.fromkeys(ops_of("aten view reshape _unsafe_view _reshape_alias view_copy"), _view),
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
