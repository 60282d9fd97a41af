"""Reports of a plan through TorchRec's own channels.

`Stats` are what its planner tells its plan to (`EmbeddingStats` writes the table of the log), in
every version; a `PlanReporter` (1.9) makes them for a planning session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from predictor.model.memory.ranks import RankMemory, missing
from predictor.model.plan import ShardingPlan
from predictor.model.workload import DenseArch
from predictor.predict import Prediction
from predictor.units import format_bytes
from search.constraint_costs import ConstraintCosts
from search.problem import Problem, Result
from shardopt.extras import needs_torchrec
from shardopt.formatting import at_most, gap_of, interval, listed, ms, percent, plural, times
from shardopt.torchrec.beside import TorchRecsPlan
from shardopt.torchrec.options import TableKey

with needs_torchrec():
    from torchrec.distributed.planner.stats import MIN_WIDTH, EmbeddingStats
    from torchrec.distributed.planner.types import Stats

table_log = logging.getLogger(EmbeddingStats.__module__)
"""Logger to which TorchRec writes its table."""


@dataclass(frozen=True)
class LastSearch:
    """Result of the last `plan`.

    Args:
        problem: the tables that shardopt predicts, the ranks with the memory left for them, costs.
        result: of the search; None where a plan was loaded, or TorchRec's is returned.
        plan: as it was returned, with what callbacks changed.
        prediction: of that plan.
        changed: keys of the tables that callbacks changed.
        unpredicted: tables that shardopt has no model for, and why; TorchRec placed them.
        stand_in: the profile is of another machine, as nobody named one and none of this is known.
        torchrecs: the plan of TorchRec's own planner; None where it finds none, and where none was
            asked for.
        constraint_costs: what the user's `ParameterConstraints` cost; None where that is nothing,
            and where there was no time to find out.
    """

    problem: Problem
    result: Result | None
    plan: ShardingPlan
    prediction: Prediction
    changed: tuple[str, ...] = ()
    unpredicted: Mapping[TableKey, str] = field(default_factory=dict)
    stand_in: bool = False
    torchrecs: TorchRecsPlan | None = None
    constraint_costs: ConstraintCosts | None = None

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput of all ranks of the job, in samples/s."""
        ranks = self.problem.topology.job or self.problem.topology
        samples = ranks.world_size * self.problem.workload.batch_size
        return samples / self.prediction.iteration_ms * 1e3

    @property
    def communication_ms(self) -> float:
        """The collectives' part of the critical path."""
        return sum(self.prediction.breakdown.get(phase, 0.0) for phase in COMMUNICATION)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Gaps of the prediction, for which it has no interval."""
        return (*_not_counted(self), *_of_another_machine(self))

    @property
    def fullest(self) -> tuple[RankMemory, str]:
        """The rank whose device is fullest at its peak, and the kind of memory."""
        kind = "DDR" if self.problem.hardware.device == "cpu" else "HBM"
        return max(self.prediction.memory, key=lambda rank: rank.use(kind)[0]), kind


COMMUNICATION = (
    "input_dist",
    "output_dist_forward",
    "output_dist_backward",
    "all_reduce",
    "replica_sync",
)
"""Phases of an iteration that are collectives."""


def describe(last_search: LastSearch) -> str:
    """Say in one line the predicted time, the gain over TorchRec's plan, the gap and their basis;
    with an interval unless something that it must span is missing."""
    prediction, ranks = last_search.prediction, last_search.problem.topology.world_size
    certainty = (
        ""
        if last_search.missing
        else f" ({_certainty(prediction)}: {interval(prediction.interval_ms)} ms)"
    )
    parts = [
        f"predicted {ms(prediction.iteration_ms)} per iteration on {ranks} x "
        f"{last_search.problem.hardware.name}{certainty}"
    ]
    parts += _comparison(last_search)
    if last_search.unpredicted:
        parts.append(f"without {plural(len(last_search.unpredicted), 'table')} left to TorchRec")
    if last_search.changed:
        parts.append(f"callbacks changed {listed(last_search.changed)}")
    return "; ".join([*parts, *(last_search.missing or [f"constants: {prediction.provenance}"])])


def _certainty(prediction: Prediction) -> str:
    return "90 %" if prediction.interval_calibrated else "90 %, uncalibrated"


def _not_counted(last_search: LastSearch) -> list[str]:
    """Say what a dense part that could not be captured leaves out, and how much that may be."""
    workload = last_search.problem.workload
    dense = workload.dense
    if not (isinstance(dense, DenseArch) and dense.linears):
        return []
    busy = last_search.prediction.per_rank[0].busy_ms
    counted = busy.get("dense_forward", 0.0) + busy.get("dense_backward", 0.0)
    note = (
        f"of the dense part only {plural(len(dense.linears), 'linear layer')} once a sample, "
        f"{ms(counted)}; all else comes on top"
    )
    ids = max(
        (f.lookups_per_sample for t in workload.tables if not t.is_pooled for f in t.features),
        default=1.0,
    )
    if ids > 1:
        note += f", such as {ms(counted * ids)} for layers that run on each of {ids:g} ids"
    return [f"{note}: give example_inputs= or model="]


def _of_another_machine(last_search: LastSearch) -> list[str]:
    """Say which profile stands for the machine."""
    if not last_search.stand_in:
        return []
    name = last_search.problem.hardware.name
    return [f"times are those of {name}, as nothing is known of this machine: give hardware="]


def _comparison(last_search: LastSearch) -> list[str]:
    """Compare with TorchRec's plan and with the bound, where a search has them."""
    if last_search.result is None:
        return ["not the plan of a search"]
    ours, theirs = last_search.prediction.iteration_ms, last_search.torchrecs
    if theirs is None:
        parts = ["TorchRec's planner finds no plan that fits"]
    elif theirs.returned:
        best = ms(last_search.result.best.iteration_ms)
        parts = [f"this is TorchRec's plan, as the best found, {best}, gains nothing"]
    elif theirs.misfit:
        parts = [
            f"TorchRec's plan, {ms(theirs.iteration_ms)}, does not fit by shardopt's count: "
            f"{theirs.misfit}"
        ]
    else:
        ratio = times(theirs.iteration_ms / ours)
        parts = [f"TorchRec's plan takes {ms(theirs.iteration_ms)} ({ratio})"]
    gap = gap_of(ours, last_search.result.lower_bound_ms)
    if gap is not None:
        parts.append(f"{at_most(gap)} from the best possible")
    return parts


def short_of(memory: Sequence[RankMemory]) -> list[str]:
    """Say by how much an accepted plan does not fit by shardopt's count."""
    short = [rank for rank in memory if not rank.fits]
    if not short:
        return []
    worst = max(short, key=lambda rank: rank.missing_hbm_bytes + rank.missing_ddr_bytes)
    ranks = "1 rank does" if len(short) == 1 else f"{len(short)} ranks do"
    return [f"by shardopt's count {ranks} not fit: at its peak {missing([worst])}"]


class ShardoptStats(EmbeddingStats):
    """TorchRec's table of the plan, and one of what is predicted behind it: a planner's ``stats``,
    where a script gives none.

    Args:
        writer: TensorBoard's `SummaryWriter`, or what takes its place; gets the numbers too, under
            ``planner/``.

    Attributes:
        found: what was told last; None before, and where nothing can be predicted.
        ask: gives what the planner found last.
    """

    def __init__(self, writer: Any = None) -> None:
        super().__init__()
        self.writer = writer
        self.found: LastSearch | None = None
        self.ask: Callable[[], LastSearch | None] = lambda: None

    def log(self, *arguments: Any, **more: Any) -> None:
        """Write both tables to the log of TorchRec's."""
        super().log(*arguments, **more)
        self.found = self.ask()
        if self.found is None:
            return
        rows = [f"{'--- Prediction by shardopt ---':^{MIN_WIDTH - 3}}", *_rows(self.found)]
        edge = "#" * MIN_WIDTH
        for row in [edge, *(f"# {row:<{MIN_WIDTH - 3}}#" for row in rows), edge]:
            table_log.info(row)
        if self.writer is not None:
            for name, value in numbers(self.found).items():
                self.writer.add_scalar(f"planner/{name}", value, 0)


def numbers(last_search: LastSearch) -> dict[str, float]:
    """Return the predicted figures by name."""
    prediction, result = last_search.prediction, last_search.result
    fullest, kind = last_search.fullest
    values = {
        "iteration_ms": prediction.iteration_ms,
        "samples_per_s": last_search.samples_per_s,
        "peak_memory_bytes": fullest.use(kind)[0],
        **{f"critical_path/{phase}_ms": part for phase, part in prediction.breakdown.items()},
    }
    if result is not None:
        values["lower_bound_ms"] = result.lower_bound_ms
        if last_search.torchrecs is not None:
            values["torchrecs_plan_ms"] = last_search.torchrecs.iteration_ms
    if last_search.constraint_costs is not None:
        values["unconstrained_ms"] = last_search.constraint_costs.iteration_ms
    return values


def _rows(last_search: LastSearch) -> Iterator[str]:
    prediction = last_search.prediction
    low, high = map(ms, prediction.interval_ms)
    certainty = "" if last_search.missing else f" ({_certainty(prediction)}: {low} to {high})"
    yield f"Iteration: {ms(prediction.iteration_ms)}{certainty}"
    yield f"Train pipeline: {last_search.problem.workload.train_pipeline}"
    yield f"Throughput: {last_search.samples_per_s:,.0f} samples/s"
    longest = sorted(prediction.breakdown.items(), key=lambda item: -item[1])
    for phase, part in longest:
        yield f"Critical path, {phase}: {ms(part)} ({part / prediction.iteration_ms:.0%})"
    rank, kind = last_search.fullest
    need, have = map(format_bytes, rank.use(kind))
    yield f"Memory: at its peak rank {rank.rank} takes {need} of {have} {kind}"
    yield from _comparison(last_search)
    if last_search.constraint_costs is not None:
        costs = last_search.constraint_costs
        yield f"Constraints cost {percent(costs.gain)}: {ms(costs.iteration_ms)} without them"
    yield f"Constants: {prediction.provenance}, profile {last_search.problem.hardware.name}"
    yield from (*last_search.missing, *short_of(prediction.memory))


class ShardoptPlanReporter:
    """TorchRec 1.9's `PlanReporter`: its table, and what is predicted.

    Args:
        writer_of: SKU -> TensorBoard's writer for it; None for none.
    """

    def __init__(self, writer_of: Callable[[str], Any] = lambda sku: None) -> None:
        self._writer_of = writer_of

    def build_stats(self, ctx: Any, sku: str) -> list[Stats]:
        """Build the statistics that the planner of a SKU reports its plan to."""
        return [ShardoptStats(self._writer_of(sku))]
