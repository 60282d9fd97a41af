"""What tensors made up front hold at another batch: totals of ids, positions on larger sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardopt.replay.program.program import (
    Call,
    Number,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    number_outputs,
)
from shardopt.replay.program.values import PASSING, Fill, roles_of
from shardopt.replay.scale.ops import op_of
from shardopt.replay.scale.sizes import batch_unclear

TOTAL = frozenset({"offsets", "starts", "lengths", "table_offsets"})
POSITIONS = frozenset({"rows", "ids"})


def fills_of(before: RankProgram, after: RankProgram, times: int) -> dict[int, Fill]:
    """What tensors hold in the scaled program.

    Raises:
        InputError: a tensor whose values are listed grows.
    """
    highs = _highs(before, after)
    return {
        number: _fill(fill, before.made[number], after.made[number], times, highs.get(number))
        for number, fill in before.fills.items()
    }


def _fill(
    fill: Fill, old: TensorSpec, new: TensorSpec, times: int, highs: dict[int, int] | None
) -> Fill:
    kind = fill["kind"]
    if kind in POSITIONS and highs is not None:
        return {**fill, "high": highs.get(fill["high"], fill["high"])}
    if old.shape == new.shape:
        return fill
    if kind in TOTAL:
        return {**fill, "total": fill["total"] * times}
    if kind == "row_lengths":
        return {**fill, "rows": [ids * times for ids in fill["rows"]]}
    if kind in ("list", "permutation"):
        raise batch_unclear(
            f"a tensor of listed values grows from {list(old.shape)} to {list(new.shape)}"
        )
    return fill


def _highs(before: RankProgram, after: RankProgram) -> dict[int, dict[int, int]]:
    """Number of a tensor -> bound of its values as recorded -> at the new batch."""
    specs = [dict(program.made) for program in (before, after)]
    root: dict[int, int] = {}
    found: dict[int, dict[int, int]] = {}
    for pair in zip(before.calls, after.calls, strict=True):
        old = pair[0]
        gives = old.gives()
        if old.op in PASSING and len(gives) == 1 and isinstance(old.arguments[0], Slot):
            source = old.arguments[0].number
            root[gives[0]] = root.get(source, source)
        fills = [_roles(call, known) for call, known in zip(pair, specs, strict=True)]
        for number, high in fills[0].items():
            bounds = found.setdefault(root.get(number, number), {})
            bounds[high] = min(bounds.get(high, fills[1][number]), fills[1][number])
        for call, known in zip(pair, specs, strict=True):
            known.update(number_outputs(call.outputs, call.specs))
    return found


def _roles(call: Call, specs: Mapping[int, TensorSpec]) -> dict[int, int]:
    """Number of a tensor -> the bound that an op needs its values to have."""
    op = op_of(call) if call.op.startswith("aten::") else None
    if op is None:
        return {}
    names = [argument.name for argument in op._schema.arguments]
    terms = dict(zip(names, call.arguments, strict=False)) | dict(call.keywords)
    named = {name: _plain(term, specs) for name, term in terms.items()}
    roles = roles_of(call.op, named)
    return dict(_bounds(terms, roles))


def _bounds(terms: Mapping[str, Term], roles: Mapping[str, Fill]) -> Iterator[tuple[int, int]]:
    for name, fill in roles.items():
        name, _, item = name.partition(".")
        term = terms[name]
        if item and isinstance(term, tuple):
            term = term[int(item)]
        if isinstance(term, Slot) and "high" in fill:
            yield term.number, fill["high"]


def _plain(term: Term, specs: Mapping[int, TensorSpec]) -> Any:
    if isinstance(term, Slot):
        return specs[term.number].shape if term.number in specs else None
    if isinstance(term, Number):
        return term.value
    if isinstance(term, tuple):
        return [_plain(item, specs) for item in term]
    return None
