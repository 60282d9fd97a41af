"""Where the time of one prediction goes: breakdown, bars per rank, provenance."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from predictor.model.memory import RankMemory, missing
from predictor.predict import Prediction, RankLoad
from shardopt.report.bars import bar, stacked
from shardopt.report.console import heading, line, show, table
from shardopt.report.words import KIND_WORDS, gib_number, ms, number, percent, phase_words

MAX_RANKS = 16
"""More ranks than this are shown by their busiest and idlest."""

_COMM = ("input_dist", "output_dist_forward", "output_dist_backward", "all_reduce")
_PARTS = (
    ("embedding forward", "█", "cyan"),
    ("embedding backward", "▓", "blue"),
    ("dense and other", "▒", "green"),
    ("idle", "·", "dim"),
)


@dataclass(frozen=True)
class RankTimes:
    """One rank's iteration as the bars show it, in ms."""

    rank: int
    embedding_forward: float
    embedding_backward: float
    other: float
    idle: float
    comm: float

    @classmethod
    def of(cls, load: RankLoad, iteration_ms: float) -> RankTimes:
        """Compute splits into embedding and the rest; transfers run beside it."""
        forward = load.busy_ms.get("embedding_forward", 0.0)
        backward = load.busy_ms.get("embedding_backward", 0.0)
        idle = min(load.idle_ms, iteration_ms)
        other = max(0.0, iteration_ms - idle - forward - backward)
        comm = sum(load.busy_ms.get(phase, 0.0) for phase in _COMM)
        return cls(load.rank, forward, backward, other, idle, comm)

    @property
    def embedding(self) -> float:
        """Time in lookups and their backward."""
        return self.embedding_forward + self.embedding_backward


def show_breakdown(console: Console, prediction: Prediction) -> None:
    """The critical path by phase; the parts sum to the iteration time."""
    parts = prediction.breakdown
    made = table([("phase", "left"), ("ms", "right"), ("share", "right"), ("", "left")])
    width = max(10, min(40, console.width - 44))
    longest = max(parts.values(), default=1.0)
    for phase, value in parts.items():
        made.add_row(
            phase_words(phase),
            number(value),
            percent(value / prediction.iteration_ms),
            bar(value / longest, width),
        )
    show(console, made)


def show_ranks(console: Console, prediction: Prediction) -> None:
    """A bar per rank: what its compute stream does in an iteration."""
    times = [RankTimes.of(load, prediction.iteration_ms) for load in prediction.per_rank]
    shown = selected(times, MAX_RANKS)
    heading(console, "Ranks", f"compute of one iteration of {ms(prediction.iteration_ms)}")
    made = table(
        [
            ("rank", "right"),
            ("", "left"),
            ("emb fwd", "right"),
            ("emb bwd", "right"),
            ("comm", "right"),
            ("idle", "right"),
            (_memory_header(prediction.memory), "right"),
        ]
    )
    width = max(10, min(40, console.width - 54))
    for rank in shown:
        values = (rank.embedding_forward, rank.embedding_backward, rank.other, rank.idle)
        parts = [(v, mark, style) for v, (_, mark, style) in zip(values, _PARTS, strict=True)]
        made.add_row(
            str(rank.rank),
            stacked(parts, prediction.iteration_ms, width),
            number(rank.embedding_forward),
            number(rank.embedding_backward),
            number(rank.comm),
            number(rank.idle),
            _memory(prediction.memory[rank.rank]),
        )
    show(console, made)
    legend = Text("  ")
    for name, mark, style in _PARTS:
        legend.append(mark * 2, style=style)
        legend.append(f" {name}   ", style="dim")
    console.print(legend)
    if len(shown) < len(times):
        line(
            console,
            f"  {len(times) - len(shown)} of {len(times)} ranks lie between the "
            f"{MAX_RANKS // 2} busiest and the {MAX_RANKS // 2} idlest above; --json has all",
            style="dim",
        )


def selected(times: list[RankTimes], most: int) -> list[RankTimes]:
    """All ranks, or ``most`` of them: the busiest and the idlest, in order of rank."""
    if len(times) <= most:
        return times
    by_work = sorted(times, key=lambda t: (-t.embedding, t.rank))
    half = most // 2
    return sorted(by_work[:half] + by_work[-half:], key=lambda t: t.rank)


def _memory_header(memory: tuple[RankMemory, ...]) -> str:
    return "HBM GiB" if any(r.hbm_cap_bytes for r in memory) else "DDR GiB"


def _memory(rank: RankMemory) -> str:
    if rank.hbm_cap_bytes:
        return f"{gib_number(rank.hbm_bytes)} / {gib_number(rank.hbm_cap_bytes)}"
    return f"{gib_number(rank.ddr_bytes)} / {gib_number(rank.ddr_cap_bytes)}"


def provenance_text(prediction: Prediction) -> str:
    """The weakest provenance behind the headline number."""
    words = KIND_WORDS[prediction.provenance]
    return f"weakest constants on its critical path: {words}"


def misfit_text(prediction: Prediction) -> str:
    """Which ranks lack memory for the plan; empty when it fits."""
    lacking = [rank for rank in prediction.memory if not rank.fits]
    if not lacking:
        return ""
    more = f"; and {len(lacking) - 1} more ranks" if len(lacking) > 1 else ""
    worst = max(lacking, key=lambda r: r.missing_hbm_bytes + r.missing_ddr_bytes)
    return f"does not fit: {missing([worst])}{more}"
