"""How sizes follow from sizes in FBGEMM's ops and in collectives, which have no fake kernels.

Ids grow as the batch does, and so do bags: offsets have one entry more.
"""

from __future__ import annotations

from typing import Any

from shardopt.replay.program.collectives import KNOWN
from shardopt.replay.program.program import Call, Number, Slot, slots
from shardopt.replay.program.values import is_lookup
from shardopt.replay.scale.known import KnownShapes, Rule, shapes_of, whole_numbers, with_argument
from shardopt.replay.scale.sizes import Shape, Size, Sizes, UndecidedError


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
    names = KNOWN.get(call.collective, ())
    made = call
    total: dict[str, Size] = {}
    for at, (name, term) in enumerate(zip(names, call.arguments, strict=False)):
        if "split_sizes" in name:
            of = known.of(call.arguments[names.index(name.partition("_")[0])])
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


def _like_first(known: KnownShapes, call: Call) -> tuple[Call, tuple[Any, ...]]:
    return call, (known.of(call.arguments[0]),)


RULES: dict[str, Rule] = {
    "fbgemm::asynchronous_complete_cumsum": _cumsum,
    "fbgemm::asynchronous_inclusive_cumsum": _like_first,
    "fbgemm::asynchronous_exclusive_cumsum": _like_first,
    "fbgemm::permute_2D_sparse_data": _permuted,
    "fbgemm::permute_1D_sparse_data": _permuted,
    "fbgemm::block_bucketize_sparse_features": _bucketized,
    "fbgemm::bounds_check_indices": _checked,
}


def foreign_rule_of(call: Call) -> Rule | None:
    """The rule of what fake tensors do not run, if there is one."""
    if call.is_collective:
        return _collective
    if call.op.startswith("backward of "):
        return _backward
    return _lookup if is_lookup(call.op) else RULES.get(call.op)
