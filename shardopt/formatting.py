"""Numbers and names as people read them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from predictor.iteration.ranges import OutOfRange
from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType
from predictor.units import GIB, format_bytes

PHASE_WORDS = {
    "input_copy": "input copy",
    "input_dist": "input dist",
    "prefetch": "cache prefetch",
    "embedding_forward": "embedding forward",
    "output_dist_forward": "output dist",
    "dense_forward": "dense forward",
    "dense_backward": "dense backward",
    "output_dist_backward": "output dist backward",
    "embedding_backward": "embedding backward",
    "all_reduce": "gradient all-reduce",
    "optimizer": "dense optimizer",
    "host": "host overhead",
}
"""Phase of a breakdown -> what the console calls it."""

KIND_WORDS = {
    "measured": "measured",
    "learned": "learned from a job",
    "published": "published figures",
    "derived": "derived from published figures",
    "not validated": "not validated",
}
"""Provenance kind -> what the console calls it."""


def phase_words(phase: str) -> str:
    """Return the console's words for a phase."""
    return PHASE_WORDS.get(phase, phase.replace("_", " "))


def number(value: float) -> str:
    """Three decimals below ten, fewer above: what a prediction can be trusted for, and no more."""
    if abs(value) < 10:
        return f"{value:.3f}"
    if abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:,.1f}"


def ms(value: float) -> str:
    """A time with its unit."""
    return f"{number(value)} ms"


def interval(bounds: tuple[float, float]) -> str:
    """``9.1 - 10.7``."""
    low, high = bounds
    digits = 2 if high < 10 else 1
    return f"{low:.{digits}f} – {high:.{digits}f}"


def percent(fraction: float) -> str:
    """Format with one decimal below ten per cent; never round to 0 or 100 %, as both are claims."""
    value = 100 * fraction
    if 0 < value < 0.05:
        return "< 0.1 %"
    value = 0.0 if -0.05 < value < 0 else value
    if 99.5 <= value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def shares(parts: Sequence[float]) -> list[str]:
    """Format the parts of a whole in per cent, all with one decimal, so that they add up to 100 %.

    The tenths that rounding down leaves go to the largest remainders.
    """
    total = sum(parts)
    exact = [1000 * part / total if total else 0.0 for part in parts]
    tenths = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: tenths[i] - exact[i])
    for i in by_remainder[: round(sum(exact)) - sum(tenths)]:
        tenths[i] += 1
    return [
        "< 0.1 %" if part > 0 and not tenth else f"{tenth / 10:.1f} %"
        for part, tenth in zip(parts, tenths, strict=True)
    ]


def points(fraction: float) -> str:
    """Percentage points with their sign: ``+2.1``, ``-1.0`` or ``0.0``."""
    value = round(100 * fraction, 1)
    return f"{value:+.1f}" if value else "0.0"


def at_most(fraction: float) -> str:
    """``at most 5.3 %``, or ``less than 0.1 %``."""
    return "less than 0.1 %" if 100 * fraction < 0.05 else f"at most {percent(fraction)}"


def gap_of(iteration_ms: float, bound_ms: float) -> float | None:
    """``iteration / bound - 1``; None where the bound says nothing."""
    return iteration_ms / bound_ms - 1 if bound_ms > 0 else None


def times(ratio: float) -> str:
    """``1.25x slower``, ``same`` or ``1.02x faster``."""
    if abs(ratio - 1) < 5e-5:
        return "same"
    word, factor = ("slower", ratio) if ratio > 1 else ("faster", 1 / ratio)
    digits = 1 if factor >= 10 else 2 if factor >= 1.005 else 4
    return f"{factor:.{digits}f}x {word}"


def gib_number(size: float) -> str:
    """Bytes as a number of GiB."""
    return f"{size / GIB:.1f}"


def rank_word(device: str) -> str:
    """Return the word for a rank: GPU, or rank where ranks run on CPUs."""
    return "rank" if device == "cpu" else "GPU"


def type_mix(plan: ShardingPlan) -> str:
    """``14 TW, 3 CW, 9 DP``, with the kernels that live outside device memory."""
    types = Counter(table.sharding_type for table in plan.tables.values())
    parts = [f"{types[kind]} {kind.short}" for kind in _ORDER if types[kind]]
    kernels = Counter(table.compute_kernel for table in plan.tables.values())
    unusual = [
        f"{kernels[k]} {k.value}" for k in ComputeKernel if kernels[k] and k not in USUAL_KERNELS
    ]
    return ", ".join(parts) + (f" ({', '.join(unusual)})" if unusual else "")


USUAL_KERNELS = (ComputeKernel.FUSED, ComputeKernel.DENSE)
_ORDER = (
    *(ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE),
    *(ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD),
    ShardingType.DATA_PARALLEL,
)


def ranks_text(ranks: Iterable[int]) -> str:
    """``0-3, 6`` for ranks 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def plural(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: Iterable[str], most: int = 3) -> str:
    """``'a', 'b', 'c' and 167 more``: what a message names of many things."""
    shown = list(names)
    more = f" and {len(shown) - most:,} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def range_lines(costs: Iterable[OutOfRange]) -> list[str]:
    """Return a line per group: ``collectives.inter of h100-sxm: messages of 12.0 GiB, ...``."""
    by_group: dict[str, list[str]] = {}
    for item in costs:
        by_group.setdefault(f"{item.group} of {item.profile}", []).append(_range_words(item))
    return [f"{group}: {'; '.join(texts)}" for group, texts in by_group.items()]


def _range_words(item: OutOfRange) -> str:
    if item.quantity == "ranks":
        return f"{item.asked:g} ranks (fitted for {item.low:g} to {item.high:g})"
    phrase, shown = _QUANTITIES.get(item.quantity, (f"{item.quantity} of", _count))
    return f"{phrase} {shown(item.asked)} (fitted up to {shown(item.high)})"


def covered(quantity: str, low: float, high: float) -> str:
    """Say what a group's rows cover: ``m 3 to 65,536``, ``messages of 8 B to 16.0 GiB``."""
    phrase, shown = _QUANTITIES.get(quantity, (quantity, _count))
    return f"{phrase} {shown(low)} to {shown(high)}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _flop(value: float) -> str:
    return f"{value / 1e9:,.3g} GFLOP"


_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "size_bytes": ("messages of", format_bytes),
    "flop": ("matrix multiplications of", _flop),
    "dim": ("shards of dimension", _count),
    "rows": ("rows of a shard:", _count),
    "tables": ("tables in one lookup:", _count),
    "ids": ("ids in one lookup:", _count),
}
"""Quantity of a range -> what comes before the figure, and how the figure is written."""
