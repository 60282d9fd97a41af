"""MLPerf Training systems of DLRM and DLRM-DCNv2: whole iterations under HugeCTR.

Rows are apart: ``test`` (the headline) were never used, ``fit`` are those that the runtime's
constants were fitted on, with re-submissions of the same measurement in later rounds. Of the first,
systems of platforms that were never fitted are one further part, and later rounds of fitted
families another: most of these repeat a few configurations that were fitted on earlier software.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from lab.validate.mlperf.cases import Case, case_of, family_of, profile_of
from lab.validate.mlperf.systems import (
    CONFIGS_FILE,
    DCNV2,
    PLANS_FILE,
    ROWS_FILE,
    Matrix,
    Planner,
    System,
    read_systems,
)
from lab.validate.report import ComparedRow, Report, data_folder
from predictor.iteration.critical_path import critical_path
from predictor.iteration.timeline import simulate
from predictor.predict import iteration_interval

LAST_FIT_ROUND = (3, 1)
FIT_PROFILES = ("a100-40gb", "a100-80gb", "h100-sxm")
FIT, TEST = "fit", "test"
NEVER = "platforms never fitted"
LATER = "fitted families, later rounds"


def validate_mlperf_dlrm(folder: Path) -> Report:
    """Predict every GPU system of the table in ``folder``.

    Raises:
        InputError: the folder or one of the three files is not there.
    """
    data_folder(folder, [ROWS_FILE, CONFIGS_FILE, PLANS_FILE], every=True)
    systems, skipped = read_systems(folder)
    planner, problems = Planner.read(folder)
    skipped += problems
    parts = parts_of(systems)
    times: dict[tuple[object, ...], tuple[float, tuple[float, float]]] = {}
    rows: list[ComparedRow] = []
    recent: list[ComparedRow] = []
    for system, part in zip(systems, parts, strict=True):
        case = case_of(system, planner)
        if isinstance(case, str):
            skipped.append(case)
            continue
        key = (case.runtime.name, case.hardware.name, system.nodes, system.gpus_per_node,
               system.global_batch, planner.matrix(system))  # fmt: skip
        if key not in times:
            times[key] = _predicted(case)
        rows.append(_compared(case, *times[key], part))
        recent += rows[-1:] if part == TEST and system.version >= (4, 0) else []
    later = [r for r in rows if r.part == TEST and r.name["profile"] in FIT_PROFILES]
    never = [r for r in rows if r.part == TEST and r.name["profile"] not in FIT_PROFILES]
    parts_of_rows = {
        NEVER: never,
        LATER: later,
        **{
            f"{LATER}, {name}, one row a configuration": by_configuration(found)
            for name, found in by_profile(later).items()
        },
    }
    kept = {name: found for name, found in parts_of_rows.items() if found}
    notes = tuple(plan_change(systems, planner))
    return Report("mlperf-dlrm", tuple(rows), TEST, tuple(skipped), notes, kept)


def by_profile(rows: Iterable[ComparedRow]) -> dict[str, list[ComparedRow]]:
    """Profile that predicted them -> rows."""
    found: dict[str, list[ComparedRow]] = defaultdict(list)
    for row in rows:
        found[str(row.name["profile"])].append(row)
    return dict(found)


def by_configuration(rows: Iterable[ComparedRow]) -> list[ComparedRow]:
    """One row for all systems that ran the same: the prediction, and their median time."""
    found: dict[tuple[object, ...], list[ComparedRow]] = defaultdict(list)
    for row in rows:
        keys = ("profile", "runtime", "benchmark", "accels", "global_batch")
        found[*(row.name[key] for key in keys), row.predicted_ms].append(row)
    return [
        replace(alike[0], measured_ms=median(row.measured_ms for row in alike))
        for alike in found.values()
    ]


def parts_of(systems: list[System]) -> list[str]:
    """``fit`` or ``test`` for each; what was fitted stays so where a later round repeats it."""
    fitted = [is_fitted(system) for system in systems]
    seen = {(s.org, s.measured_ms) for s, fit in zip(systems, fitted, strict=True) if fit}
    return [
        FIT if fit or (s.org, s.measured_ms) in seen else TEST
        for s, fit in zip(systems, fitted, strict=True)
    ]


def is_fitted(system: System) -> bool:
    """Whether the runtime's constants were fitted on the row."""
    return system.version <= LAST_FIT_ROUND and profile_of(system.accelerator) in FIT_PROFILES


def _predicted(case: Case) -> tuple[float, tuple[float, float]]:
    """Time of an iteration and its 90 % interval."""
    graph = case.builder().build()
    timeline = simulate(graph, keep_steps=True)
    time = float(timeline.iteration_ms[0])
    path = critical_path(graph, timeline)
    return time, iteration_interval(time, path, case.hardware, case.topology)


def _compared(
    case: Case, predicted_ms: float, interval_ms: tuple[float, float], part: str
) -> ComparedRow:
    system = case.system
    return ComparedRow(
        {
            "system": system.system,
            "org": system.org,
            "accelerator": system.accelerator,
            "accels": system.gpus,
            "round": system.round,
            "benchmark": system.benchmark,
            "global_batch": system.global_batch,
            "profile": case.hardware.name,
            "runtime": case.runtime.name,
        },
        system.measured_ms,
        predicted_ms,
        family=family_of(system),
        part=part,
        source=f"MLPerf Training {system.round}, {system.org}",
        interval_ms=interval_ms,
    )


def plan_change(systems: list[System], planner: Planner) -> Iterator[str]:
    """What the change of plan from v3.0 to v3.1 alone is predicted to bring, in words."""
    before = [s for s in systems if s.version == (3, 0) and s.org == "NVIDIA"]
    after = [s for s in systems if s.version == (3, 1) and s.org == "NVIDIA"]
    for old in before:
        new = next((s for s in after if (s.gpus, s.global_batch) == (old.gpus, old.global_batch)
                    and s.benchmark == DCNV2), None)  # fmt: skip
        matrix = planner.matrix(new) if new is not None else None
        if new is None or matrix is None:
            continue
        was, now = _with(old, planner, None), _with(old, planner, matrix)
        measured = new.measured_ms / old.measured_ms - 1
        yield (
            f"v3.0 to v3.1 on {old.gpus} {old.accelerator}: measured {measured:+.1%}; the new "
            f"plan alone is predicted to change it by {now / was - 1:+.1%}, the rest is software"
        )


def _with(system: System, planner: Planner, matrix: Matrix | None) -> float:
    case = case_of(system, planner, matrix)
    assert isinstance(case, Case)
    return case.builder().iteration_ms()
