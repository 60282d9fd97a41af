"""Embedding lookups of FBGEMM on GPUs: a pass of one launch, with the shipped profile of its GPU.

Two public files. ``fbgemm_tbe_h100_measured.csv`` times forward and backward of launches without
pooling, with rows in device memory, in host memory (``uvm``) and in host memory behind a cache
(``uvm_caching``). ``tbe_measured_prs.csv`` holds times out of pull requests. Most of them do not
say their GPU: of those only the shape counts, which is what remains after one factor for all rows
of a sweep.

A pass that is timed alone waits for the host that issues it.

Why: docs/decisions/0007-lookups-on-gpus.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lab.validate.report import (
    ComparedRow,
    Report,
    data_folder,
    kernel_interval,
    merged_lines,
    no_profile,
)
from predictor import units
from predictor.cost.fixed_costs import HOST_OPS
from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import LookupShard
from predictor.csv_rows import Row, number, read_table
from predictor.errors import did_you_mean
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import DEFAULT_HARDWARE, load_hardware
from predictor.hardware.schema import CudaEmbedding
from predictor.model.distribution import Bins, Uniform, Zipf
from predictor.model.plan import ComputeKernel
from predictor.model.workload import Optimizer
from shardopt.calibrate.gpu_lookups import counted_bins, launch_ms

MEASURED_FILE = "fbgemm_tbe_h100_measured.csv"
PR_FILE = "tbe_measured_prs.csv"
MEASURED_COLUMNS = (
    *("gpu", "source", "commit", "num_tables", "batch_per_table", "ids_total", "ids_distinct"),
    *("rows_per_table", "dim", "weights_dtype", "pooling", "optimizer", "location", "cache_ratio"),
    *("hbm_bytes", "alpha", "forward_ms", "backward_ms", "eval_ms"),
)
PR_COLUMNS = (
    *("source", "commit_or_pr", "gpu", "B", "E", "T", "D", "L", "weights_dtype", "optimizer"),
    *("weighted", "location", "alpha", "kernel", "time_us", "usable_for"),
)

LOOKUPS = "lookups on stated GPUs"
GAVE = "gave constants"
EVAL = "eval: the forward again"
FLOOR = "launches of a few ids"
SHAPE = "shape of sweeps, GPU not stated"
RATIO = "host memory over device memory, GPU inferred"

KERNELS = {
    "hbm": ComputeKernel.FUSED,
    "uvm": ComputeKernel.FUSED_UVM,
    "uvm_caching": ComputeKernel.FUSED_UVM_CACHING,
}
OPTIMIZERS = {
    **{str(optimizer.value): optimizer for optimizer in Optimizer},
    "": Optimizer.EXACT_SGD,
    "adagrad": Optimizer.ADAGRAD,
    "rowwise_adagrad": Optimizer.ROWWISE_ADAGRAD,
    "exact_rowwise_adagrad": Optimizer.ROWWISE_ADAGRAD,
}
ELEMENT_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
FLOORED = 0.5
"""Zipf's ``q`` of ids that are drawn from a continuous power law and rounded down: the integral of
``x^-alpha`` from k to k + 1 is about ``(k + 1/2)^-alpha``."""
HITS = 0.48
"""Share of a batch's distinct rows that a cache as large as the working set holds. The files do not
record it; it is what the forward of one row implies (`GIVING`), with the link's measured rate."""
GIVING = frozenset(
    {
        ("h100-sxm", "hbm", "adam", "backward", ""),
        ("h100-sxm", "hbm", "sgd", "backward", ""),
        ("h100-sxm", "uvm", "sgd", "forward", ""),
        ("h100-sxm", "uvm", "sgd", "backward", ""),
        ("h100-sxm", "uvm_caching", "sgd", "forward", "1.0"),
    }
)
"""Rows that gave a constant, where they have `GIVING_SHAPE`; all others did not."""
GIVING_SHAPE = (10, 1048570.0, 128)
PASSES = ("forward", "backward", "eval")
KINDS = {
    "fwd+bwd": ("forward", "backward"),
    "fwd": ("forward",),
    "bwd": ("backward",),
    "prefetch": ("prefetch",),
}
"""How a pull request calls what it timed -> the passes in it."""

HOST_BOUND = "host"

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """One pass of one launch.

    Args:
        name: what names it, by the file's columns.
        tables: one shard each.
        phases: of `launch_ms`, one after the other.
        cache_ratio: rows that the cache holds over those of the working set; None: as the load
            factor of the tables says.
        part: of the report.
        sweep: rows with the same text share one factor; empty for rows of a stated GPU.
    """

    name: dict[str, str | int | float]
    profile: str
    tables: tuple[LookupShard, ...]
    phases: tuple[str, ...]
    time_ms: float
    part: str
    source: str
    cache_ratio: float | None = None
    sweep: str = ""

    @property
    def predicted_ms(self) -> float:
        """With the shipped constants.

        The clock starts on an idle device. So the first kernel waits for the host, and the longest
        one, which comes last, starts when the host has issued all, or when the device is through
        with the others.
        """
        hw = load_hardware(self.profile)
        constants, host = hw.embedding, hw.overheads
        if not isinstance(constants, CudaEmbedding):
            raise TypeError(f"{self.profile} is no GPU")
        model = CudaLookups(hw, constants)
        device = sum(self._pass_ms(model, phase) for phase in self.phases)
        if self.sweep:
            return device
        work = {
            "prefetch": (1.0, constants.prefetch_kernels),
            "forward": (1.0, constants.forward_kernels),
            "backward": (HOST_OPS["lookup_backward"], constants.backward_kernels),
        }
        counts = [work[phase] for phase in self.phases]
        issued_us = sum(ops * host.op_us + kernels * host.launch_us for ops, kernels in counts)
        last = self._last_ms(model, self.phases[-1])
        return max(units.us(host.op_us + host.launch_us) + device, units.us(issued_us) + last)

    def _pass_ms(self, model: CudaLookups, phase: str) -> float:
        """On the device."""
        if phase != "prefetch" or self.cache_ratio is None:
            return launch_ms(model, self.tables, phase)
        fetched = [_fetched_rows(table, self.cache_ratio) for table in self.tables]
        return model.prefetch_floor_ms() + sum(map(model.prefetch_ms, self.tables, fetched))

    def _last_ms(self, model: CudaLookups, phase: str) -> float:
        """Bytes of a pass's last kernel: all of a forward, and all but the sort of a backward."""
        if phase == "backward":
            return sum(model.backward_ms(table) - model.sort_ms(table) for table in self.tables)
        return self._pass_ms(model, phase) - model.forward_floor_ms()


def _fetched_rows(table: LookupShard, cache_ratio: float) -> float:
    """Distinct rows of a batch that a cache of this share of the working set misses."""
    return table.distinct_rows * (1.0 - HITS * min(cache_ratio, 1.0))


def validate_tbe(folder: Path) -> Report:
    """Predict every launch in ``folder`` with the shipped constants.

    Raises:
        InputError: the folder is not there, or neither file, or one cannot be read.
    """
    data_folder(folder, [MEASURED_FILE, PR_FILE])
    launches: list[Launch] = []
    skipped: list[str] = []
    if (folder / MEASURED_FILE).is_file():
        table = read_table(folder / MEASURED_FILE, MEASURED_COLUMNS, _measured)
        launches += [launch for row in table.rows for launch in row]
        skipped += merged_lines(table.problems)
    if (folder / PR_FILE).is_file():
        found = read_table(folder / PR_FILE, PR_COLUMNS, _of_pr)
        launches += found.rows
        skipped += merged_lines(found.problems)
    rows = [_compared(launch) for launch in launches if not launch.sweep]
    sweeps: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        if launch.sweep:
            sweeps[launch.sweep].append(launch)
    for sweep, members in sweeps.items():
        if len(members) == 1:
            skipped.append(f"{PR_FILE}: {sweep}: one row alone has no shape")
        else:
            rows += _shape(members)
    locations = {row.family for row in rows if row.part == LOOKUPS}
    by_location = {
        family: [row for row in rows if row.part == LOOKUPS and row.family == family]
        for family in sorted(locations)
    }
    notes = (
        "timed alone, a pass waits for the host; misses of a cache were not recorded: of the rows "
        f"of a batch it is taken to hold {HITS} times its share of the working set",
        f"{SHAPE}: predicted with {DEFAULT_HARDWARE}, times one factor for all rows of a sweep",
    )
    return Report(
        "tbe",
        tuple(rows),
        LOOKUPS,
        tuple(skipped),
        notes,
        parts=by_location,
        held_out=(EVAL, FLOOR, SHAPE, RATIO),
    )


def _measured(row: Row) -> list[Launch]:
    """The passes of one row; missing times are left out."""
    profile = profile_of_device(row["gpu"])
    if profile is None:
        raise ValueError(no_profile(row["gpu"]))
    tables = number(row, "num_tables")
    ids = number(row, "ids_total") / tables
    rows, dim = int(number(row, "rows_per_table")), int(number(row, "dim"))
    if row["pooling"] not in ("none", "sum", "mean"):
        raise ValueError(f"pooling is '{row['pooling']}'; known are none, sum, mean")
    shard = LookupShard(
        _bins(row, rows, ids, tables),
        ids,
        ids if row["pooling"] == "none" else number(row, "batch_per_table"),
        rows,
        dim,
        element_bytes=_known(row, "weights_dtype", ELEMENT_BYTES),
        optimizer=_known(row, "optimizer", OPTIMIZERS),
        pooled=row["pooling"] != "none",
        mean=row["pooling"] == "mean",
        kernel=_known(row, "location", KERNELS),
        lengths=number(row, "batch_per_table"),
    )
    name: dict[str, str | int | float] = {
        **{key: row[key] for key in ("gpu", "commit", "location", "optimizer")},
        "tables": int(tables),
        "ids": number(row, "ids_total"),
        "rows": rows,
        "dim": dim,
        "cache": row["cache_ratio"] or row["hbm_bytes"],
    }
    times = {p: number(row, f"{p}_ms") for p in PASSES if row[f"{p}_ms"].strip()}
    if not times:
        raise ValueError("forward_ms, backward_ms and eval_ms are empty")
    return [
        Launch(
            {**name, "pass": phase},
            profile,
            (shard,) * int(tables),
            _phases(phase, shard.kernel),
            time,
            _part(profile, {**name, "pass": phase}),
            row["source"],
            number(row, "cache_ratio") if row["cache_ratio"].strip() else 1.0,
        )
        for phase, time in times.items()
    ]


def _part(profile: str, name: Mapping[str, str | int | float]) -> str:
    if name["pass"] == "eval":
        return EVAL
    key = (profile, name["location"], name["optimizer"], name["pass"], name["cache"])
    shape = (name["tables"], name["ids"], name["dim"])
    return GAVE if key in GIVING and shape == GIVING_SHAPE else LOOKUPS


def _phases(timed: str, kernel: ComputeKernel) -> tuple[str, ...]:
    """A forward through a cache fills it first."""
    if timed == "backward":
        return ("backward",)
    fills = kernel is ComputeKernel.FUSED_UVM_CACHING
    return ("prefetch", "forward") if fills else ("forward",)


def _bins(row: Row, rows: int, ids: float, tables: float) -> Bins:
    """By the distinct ids where they are recorded and no power law gives them, else by it."""
    uniform = row["alpha"].strip() in ("", "0", "0.0", "uniform")
    bins = (Uniform() if uniform else Zipf(number(row, "alpha"), FLOORED)).bins(rows)
    if not row["ids_distinct"].strip():
        return bins
    distinct = number(row, "ids_distinct") / tables
    near = math.isclose(bins.unique(ids), distinct, rel_tol=0.02)
    return bins if near else counted_bins(rows, ids, distinct)


def _known(row: Row, column: str, values: dict[str, T]) -> T:
    text = row[column].strip().rstrip("?")
    if text not in values:
        known = ", ".join(filter(None, values))
        raise ValueError(
            f"{column} is '{row[column]}'{did_you_mean(text, list(values))}; known are {known}"
        )
    return values[text]


def _of_pr(row: Row) -> Launch:
    """One row of a pull request."""
    kernel = row["kernel"]
    if "VBE" in kernel or "before" in kernel:
        raise ValueError(f"kernel is '{kernel}', which is another kernel than the one predicted")
    phases = next((phases for kind, phases in KINDS.items() if kernel.startswith(kind)), None)
    if phases is None:
        raise ValueError(f"kernel is '{kernel}'; it starts with none of {', '.join(KINDS)}")
    if row["usable_for"].startswith(HOST_BOUND):
        raise ValueError(f"usable_for is '{row['usable_for']}': the host's time, not the device's")
    stated = row["gpu"].strip()
    profile = profile_of_device(stated) if stated else DEFAULT_HARDWARE
    if profile is None:
        raise ValueError(no_profile(stated))
    count = int(number(row, "T"))
    shards = [
        _pr_shard(row, dict(zip(("B", "E", "D", "L"), sizes, strict=True)))
        for sizes in zip(
            *(_each(row, column, count) for column in ("B", "E", "D", "L")), strict=True
        )
    ]
    columns = ("commit_or_pr", "gpu", "B", "E", "T", "D", "L", "location", "kernel")
    alike = ["commit_or_pr", "B", "T"] + ([] if "ratios" in row["usable_for"] else ["kernel"])
    sweep = ", ".join(f"{column} {row[column]}" for column in alike)
    absolute = stated and "ratios" not in row["usable_for"]
    return Launch(
        {column: row[column] for column in columns},
        profile,
        tuple(shards),
        phases,
        number(row, "time_us") * 1e-3,
        FLOOR if absolute else RATIO if stated else SHAPE,
        f"{row['source']} {row['commit_or_pr']}",
        sweep="" if absolute else sweep,
    )


def _each(row: Row, column: str, count: int) -> list[float]:
    """The values of a column for every table; one value holds for all."""
    parts = [number({column: text}, column) for text in row[column].split(";")]
    if len(parts) not in (1, count):
        raise ValueError(f"{column} is '{row[column]}'; T is {count}")
    return parts * count if len(parts) == 1 else parts


def _pr_shard(row: Row, sizes: dict[str, float]) -> LookupShard:
    rows = int(sizes["E"])
    # FBGEMM's own benchmark draws uniform ids up to an alpha of 1 (generate_requests)
    skewed = row["alpha"] not in ("", "uniform") and number(row, "alpha") > 1.0
    law = Zipf(number(row, "alpha"), FLOORED) if skewed else Uniform()
    ids = sizes["B"] * sizes["L"]
    nobag = "nobag" in row["kernel"]
    location, _, clf = row["location"].partition(" clf ")
    return LookupShard(
        law.bins(rows),
        ids,
        ids if nobag else sizes["B"],
        rows,
        int(sizes["D"]),
        element_bytes=_known(row, "weights_dtype", ELEMENT_BYTES),
        optimizer=_known(row, "optimizer", OPTIMIZERS),
        weighted=row["weighted"].strip() == "1",
        pooled=not nobag,
        kernel=_known({"location": location}, "location", KERNELS),
        cache_load_factor=float(clf) if clf else 0.2,
        lengths=sizes["B"],
    )


def _compared(launch: Launch, factor: float = 1.0) -> ComparedRow:
    predicted = factor * launch.predicted_ms
    groups = ["embedding", "memory"]
    return ComparedRow(
        {**launch.name, "profile": launch.profile},
        launch.time_ms,
        predicted,
        family=str(launch.name["location"]),
        part=launch.part,
        source=launch.source,
        interval_ms=kernel_interval(load_hardware(launch.profile), groups, predicted),
    )


def _shape(members: Sequence[Launch]) -> list[ComparedRow]:
    """Rows of a sweep, predicted up to the one factor that makes their mean right."""
    ratios = [launch.time_ms / launch.predicted_ms for launch in members]
    factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return [_compared(launch, factor) for launch in members]
