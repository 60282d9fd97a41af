"""Whole steps of TorchRec's pipeline benchmark (`runs` says what was trained, `plans` under what).

A row with one loop was cold: the first batches of a process, which fill the pipeline, grow the
allocator and load kernels, are in its mean. It is predicted like any other, but stands apart: what
it took beyond the prediction is its excess.

Why: docs/decisions/0045.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

from lab.validate.report import ComparedRow, Report, Scores, data_folder, noise_of
from lab.validate.torchrec_steps import plans, runs
from lab.validate.torchrec_steps.memory import RunMemory, memory_of, memory_scores
from lab.validate.torchrec_steps.order import order_scores
from lab.validate.torchrec_steps.runs import Run
from predictor.csv_rows import read_table
from predictor.errors import ShardoptError
from predictor.hardware.loader import load_hardware
from predictor.model.topology import Topology
from predictor.predict import predict

STEADY, COLD = "steady steps", "one cold loop"
UNLIKE = "with work that is not modelled"


def validate_torchrec_steps(folder: Path) -> Report:
    """Predict every row of the table in ``folder``.

    Raises:
        InputError: the folder or the tables are not there.
    """
    data_folder(folder, [runs.FILE, plans.FILE], every=True)
    table = read_table(folder / runs.FILE, runs.COLUMNS, runs.parse_run)
    printed = read_table(folder / plans.FILE, plans.COLUMNS, plans.parse_group)
    groups = tuple(group for group in printed.rows if group is not None)
    needs: list[RunMemory] = []
    skipped = [*table.problems, *printed.problems]
    pairs: list[tuple[Run, ComparedRow]] = []
    for run in table.rows:
        try:
            pairs.append((run, _compared(run, groups)))
            needs.append(memory_of(run, _plan(run, groups)))
        except ShardoptError as error:
            skipped.append(f"{run.commit} {run.name}: {error}")
    rows = tuple(row for _, row in pairs)
    kept = [pair for pair in pairs if not pair[0].unlike]
    noise = noise_of((run.key, run.measured_ms) for run, _ in kept)
    return Report(
        "torchrec-steps",
        rows,
        STEADY,
        tuple(skipped),
        NOTES,
        held_out=(COLD, UNLIKE),
        scores=(*order_scores(kept, noise), *_excess(pairs), *memory_scores(needs)),
        noise={"repeats of one configuration": noise},
    )


NOTES = (
    "the GPU of most rows was inferred from memory totals and step time, not stated: column "
    "certainty",
    "nothing was fitted on the times of these rows",
)


def _excess(pairs: Sequence[tuple[Run, ComparedRow]]) -> tuple[Scores, ...]:
    """What cold loops took beyond the steady steps predicted for them."""
    kinds = defaultdict(list)
    for run, row in pairs:
        if row.part == COLD:
            more_s = run.batches * (row.measured_ms - row.predicted_ms) / 1e3
            kinds[run.profile, run.workload.name].append(
                (row.measured_ms / row.predicted_ms, more_s)
            )
    cells = [
        (*kind, len(found), median(a for a, _ in found) - 1.0, median(b for _, b in found))
        for kind, found in kinds.items()
    ]
    columns = (
        *(("profile", "text"), ("model", "text"), ("n", "count")),
        *(("excess", "signed"), ("seconds a loop", "figure")),
    )
    about = "medians; a steady loop of the same model on GB200 took 0.5 s less than its cold one"
    return (Scores("excess of cold loops", columns, tuple(cells), about),) if cells else ()


def _compared(run: Run, groups: tuple[plans.Group, ...]) -> ComparedRow:
    found, iteration_ms, interval_ms = _predicted(run, groups)
    part = UNLIKE if run.unlike else STEADY if run.steady else COLD
    name: dict[str, str | int | float] = {
        "commit": run.commit,
        "run": run.name,
        "gpu": run.gpu,
        "certainty": run.certainty,
        "profile": run.profile,
        "ranks": run.ranks,
        "batch_per_rank": run.workload.batch_size,
        "pipeline": run.workload.train_pipeline,
        "plan": found,
    }
    if run.unlike:
        name["not modelled"] = run.unlike
    return ComparedRow(
        name,
        run.measured_ms,
        iteration_ms,
        f"{run.profile}, {run.workload.name}",
        part,
        "meta-pytorch/torchrec, benchmark_train_pipeline",
        interval_ms,
    )


@cache
def _plan(run: Run, groups: tuple[plans.Group, ...]) -> plans.StepPlan:
    hardware = load_hardware(run.profile)
    return plans.plan_of(run.workload, run.ranks, run.plan_commit, groups, hardware)


@cache
def _predicted(run: Run, groups: tuple[plans.Group, ...]) -> tuple[str, float, tuple[float, float]]:
    """Where the plan comes from, the time of a step and its interval."""
    hw = load_hardware(run.profile)
    found = _plan(run, groups)
    topology = Topology.uniform(
        run.ranks,
        min(run.ranks, hw.gpus_per_host),
        hbm_bytes=hw.hbm_bytes,
        ddr_bytes=hw.ddr_bytes,
    )
    prediction = predict(run.workload, topology, hw, found.plan)
    return found.source, prediction.iteration_ms, prediction.interval_ms
