"""What an embedding lookup of many tables goes through, from its arguments alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from predictor.model.distribution import Distribution, Empirical, Uniform, Zipf
from shardopt.extras import needs_torchrec
from shardopt.replay.runtime.tensors import shared_out

with needs_torchrec():
    import torch


@dataclass(frozen=True)
class Lookup:
    """A forward or backward op of FBGEMM on a CPU.

    Args:
        weights: of all tables.
        touched: elements of its distinct rows.
        sizes: tables, ids, elements of all bags, elements gathered, distinct rows.
    """

    weights: Any
    touched: int
    sizes: tuple[int, ...]


def lookup_of(
    op: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    fills: Mapping[int, Mapping[str, Any]],
    indices: str,
) -> Lookup | None:
    """None where the benchmark does not say how the tables are split.

    Args:
        op: as ``namespace::name.overload``.
        fills: what a tensor of whole numbers holds, by its `id` (`shardopt.replay.program.values`).
        indices: how ids are drawn, ``uniform`` or ``zipf:ALPHA``.
    """
    space, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    schema = getattr(getattr(getattr(torch.ops, space), name), overload)._schema
    named = dict(zip((of.name for of in schema.arguments), arguments, strict=False)) | dict(
        keywords
    )
    widths = _differences(named.get("D_offsets"), fills)
    drawn = fills.get(id(named["indices"]), {})
    rows = drawn.get("rows", ())
    weights = named["weights"][0] if "weights" in named else named.get("host_weights")
    if not widths or len(rows) != len(widths) or weights is None:
        return None
    count, bags = named["indices"].numel(), named["offsets"].numel() - 1
    tables = len(widths)
    ids = shared_out(count, drawn.get("shares", [1.0] * tables))
    skews = [drawn["laws"][at] for at in drawn["law"]] if "laws" in drawn else [indices] * tables
    distinct = [
        _distribution(skew).bins(of).unique(n) if n else 0.0
        for skew, of, n in zip(skews, rows, ids, strict=True)
    ]
    touched = sum(n * width for n, width in zip(distinct, widths, strict=True))
    sizes = (
        tables,
        count,
        bags // tables * sum(widths),
        sum(n * width for n, width in zip(ids, widths, strict=True)),
        round(sum(distinct)),
    )
    return Lookup(weights, round(touched), sizes)


def _distribution(of: Any) -> Distribution:
    """Of ids that `shardopt.replay.runtime.tensors.draw_by` draws."""
    if not isinstance(of, str):
        return Empirical(tuple(of["counts"]), tuple(of["weights"]))
    return Uniform() if of == "uniform" else Zipf(float(of.partition(":")[2]))


def _differences(marks: Any, fills: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Of a tensor of cumulated sizes; nothing if its numbers are not known."""
    values = fills.get(id(marks), {}).get("values", ())
    return [after - before for before, after in pairwise(values)]
