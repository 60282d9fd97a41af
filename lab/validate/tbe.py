"""Embedding lookups of FBGEMM on GPUs: passes of one launch, with the shipped profile of the GPU.

Two public files. ``fbgemm_tbe_h100_measured.csv`` times forward and backward of launches without
pooling, with rows in device memory, in host memory (``uvm``) and in host memory behind a cache
(``uvm_caching``). ``tbe_measured_prs.csv`` has times from pull requests. Most of them do not name
their GPU; only their shape counts, after one factor for all rows of a sweep.

A pass timed alone waits for the host that issues it.

Why: docs/decisions/0007-lookups-on-gpus.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.statistics import grouped
from lab.suites import SUITES, ComparedRow, Report
from lab.validate.tables import kernel_interval, known, merged_lines, profile_of_row, read
from predictor import units
from predictor.cost.fixed_costs import HOST_OPS
from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import LookupShard
from predictor.csv_rows import Row, number
from predictor.hardware.loader import DEFAULT_HARDWARE, load_hardware
from predictor.hardware.schema import CudaEmbedding, HardwareProfile
from predictor.model.distribution import Bins, Uniform, Zipf
from predictor.model.plan import ComputeKernel
from predictor.model.workload import Optimizer
from shardopt.calibrate.gpu_lookups import counted_bins, launch_ms

MEASURED_FILE = "fbgemm_tbe_h100_measured.csv"
PR_FILE = "tbe_measured_prs.csv"

LOOKUPS = "lookups on stated GPUs"
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
POOLINGS = {pooling: pooling for pooling in ("none", "sum", "mean")}
FLOORED = 0.5
"""Zipf's ``q`` of ids drawn from a continuous power law and rounded down: the integral of
``x^-alpha`` from k to k + 1 is about ``(k + 1/2)^-alpha``."""
HITS = 0.6
"""Share of a batch's distinct rows in a cache as large as the working set. The files do not record
it; the forward of one row implies it (`Suite.gave`), with the link's measured rate."""
SUITE = SUITES["tbe"]
PASSES = ("forward", "backward", "eval")
KINDS = {
    "fwd+bwd": ("forward", "backward"),
    "fwd": ("forward",),
    "bwd": ("backward",),
    "prefetch": ("prefetch",),
}
"""Name of a timed kernel in pull requests -> its passes."""


@dataclass(frozen=True)
class Launch:
    """Timed passes of one launch.

    Args:
        name: identifying columns of the file.
        tables: one shard each.
        phases: phases of `launch_ms`, in sequence.
        cache_ratio: rows of the cache over those of the working set; None: by the load factor of
            the tables.
        part: part of the report.
        sweep: rows with the same text share one factor; empty for rows of a stated GPU.
    """

    name: Mapping[str, str | int | float]
    hardware: HardwareProfile
    tables: tuple[LookupShard, ...]
    phases: tuple[str, ...]
    time_ms: float
    part: str
    source: str
    cache_ratio: float | None = None
    sweep: str = ""

    @property
    def predicted_ms(self) -> float:
        """Predicted time with the shipped constants.

        The clock starts on an idle device, so the first kernel waits for the host. The last and
        longest kernel starts when the host has issued all kernels and the device has run the
        others.
        """
        constants, host = self.hardware.embedding, self.hardware.overheads
        # without TorchRec, an op costs as much as one of a dense layer
        op_us = host.op_us if host.layer_op_us is None else host.layer_op_us
        if not isinstance(constants, CudaEmbedding):
            raise TypeError(f"{self.hardware.name} is no GPU")
        model = CudaLookups(self.hardware, constants)
        device = sum(self._pass_ms(model, phase) for phase in self.phases)
        if self.sweep:
            return device
        work = {
            "prefetch": (1.0, constants.prefetch_kernels),
            "forward": (1.0, constants.forward_kernels),
            "backward": (HOST_OPS["lookup_backward"], constants.backward_kernels),
        }
        counts = [work[phase] for phase in self.phases]
        issued_us = sum(ops * op_us + kernels * host.launch_us for ops, kernels in counts)
        last = self._last_ms(model, self.phases[-1])
        return max(units.us(op_us + host.launch_us) + device, units.us(issued_us) + last)

    def _pass_ms(self, model: CudaLookups, phase: str) -> float:
        if phase != "prefetch" or self.cache_ratio is None:
            return launch_ms(model, self.tables, phase)
        missed = 1.0 - HITS * min(self.cache_ratio, 1.0)
        fetched = [table.distinct_rows * missed for table in self.tables]
        return model.prefetch_floor_ms() + sum(map(model.prefetch_ms, self.tables, fetched))

    def _last_ms(self, model: CudaLookups, phase: str) -> float:
        """Return the ms of a pass's last kernel: a whole forward, or a backward without sort."""
        if phase == "backward":
            return sum(model.backward_ms(table) - model.sort_ms(table) for table in self.tables)
        return self._pass_ms(model, phase) - model.forward_floor_ms()

    def compared(self, factor: float = 1.0) -> ComparedRow:
        """Return the row with its prediction times a factor."""
        predicted = factor * self.predicted_ms
        return ComparedRow(
            {**self.name, "profile": self.hardware.name},
            self.time_ms,
            predicted,
            family=str(self.name["location"]),
            part=self.part,
            source=self.source,
            interval_ms=kernel_interval(self.hardware, ["embedding", "memory"], predicted),
        )


def validate_tbe(folder: Path) -> Report:
    measured, of_prs = read(folder, MEASURED_FILE, _measured), read(folder, PR_FILE, _of_pr)
    skipped = merged_lines(measured.problems) + merged_lines(of_prs.problems)
    launches = [*(launch for row in measured.rows for launch in row), *of_prs.rows]
    sweeps = grouped(launches, lambda launch: launch.sweep)
    rows = [launch.compared() for launch in sweeps.pop("", [])]
    by_location = grouped((row for row in rows if row.part == LOOKUPS), lambda row: row.family)
    for sweep, members in sweeps.items():
        if len(members) == 1:
            skipped.append(f"{PR_FILE}: {sweep}: one row alone has no shape")
            continue
        # one factor removes the mean log error of the sweep
        ratios = [launch.time_ms / launch.predicted_ms for launch in members]
        factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
        rows += [launch.compared(factor) for launch in members]
    return SUITE.report(
        rows,
        skipped,
        parts=dict(sorted(by_location.items())),
        hits=HITS,
        default=DEFAULT_HARDWARE,
    )


def _measured(row: Row) -> list[Launch]:
    hardware = profile_of_row(row)
    tables = number(row, "num_tables")
    ids = number(row, "ids_total") / tables
    rows, dim = int(number(row, "rows_per_table")), int(number(row, "dim"))
    pooling = known(row, "pooling", POOLINGS)
    shard = LookupShard(
        _bins(row, rows, ids, tables),
        ids,
        ids if pooling == "none" else number(row, "batch_per_table"),
        rows,
        dim,
        element_bytes=known(row, "weights_dtype", ELEMENT_BYTES),
        optimizer=known(row, "optimizer", OPTIMIZERS),
        pooled=pooling != "none",
        mean=pooling == "mean",
        kernel=known(row, "location", KERNELS),
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
    # a forward through a cache fills it first
    fills = ("prefetch",) if shard.kernel is ComputeKernel.FUSED_UVM_CACHING else ()
    return [
        Launch(
            {**name, "pass": timed},
            hardware,
            (shard,) * int(tables),
            ("backward",) if timed == "backward" else (*fills, "forward"),
            time,
            EVAL if timed == "eval" else SUITE.part_of({**name, "pass": timed}, LOOKUPS),
            row["source"],
            number(row, "cache_ratio") if row["cache_ratio"].strip() else 1.0,
        )
        for timed, time in times.items()
    ]


def _bins(row: Row, rows: int, ids: float, tables: float) -> Bins:
    """Return the bins of the power law, or of the recorded distinct ids where they disagree."""
    uniform = row["alpha"].strip() in ("", "0", "0.0", "uniform")
    bins = (Uniform() if uniform else Zipf(number(row, "alpha"), FLOORED)).bins(rows)
    if not row["ids_distinct"].strip():
        return bins
    distinct = number(row, "ids_distinct") / tables
    near = math.isclose(bins.unique(ids), distinct, rel_tol=0.02)
    return bins if near else counted_bins(rows, ids, distinct)


def _of_pr(row: Row) -> Launch:
    kernel = row["kernel"]
    if "VBE" in kernel or "before" in kernel:
        raise ValueError(f"kernel is '{kernel}', which is another kernel than the one predicted")
    phases = next((phases for kind, phases in KINDS.items() if kernel.startswith(kind)), None)
    if phases is None:
        raise ValueError(f"kernel is '{kernel}'; it starts with none of {', '.join(KINDS)}")
    if row["usable_for"].startswith("host"):
        raise ValueError(f"usable_for is '{row['usable_for']}': the host's time, not the device's")
    stated = row["gpu"].strip()
    hardware = profile_of_row(row) if stated else load_hardware(DEFAULT_HARDWARE)
    count = int(number(row, "T"))
    sizes = zip(*(_each(row, column, count) for column in "BEDL"), strict=True)
    shards = tuple(_pr_shard(row, *shard_sizes) for shard_sizes in sizes)
    columns = ("commit_or_pr", "gpu", "B", "E", "T", "D", "L", "location", "kernel")
    ratios = "ratios" in row["usable_for"]
    absolute = stated and not ratios
    alike = ("commit_or_pr", "B", "T", *(() if ratios else ("kernel",)))
    return Launch(
        {column: row[column] for column in columns},
        hardware,
        shards,
        phases,
        number(row, "time_us") * 1e-3,
        FLOOR if absolute else RATIO if stated else SHAPE,
        f"{row['source']} {row['commit_or_pr']}",
        sweep="" if absolute else ", ".join(f"{column} {row[column]}" for column in alike),
    )


def _each(row: Row, column: str, count: int) -> list[float]:
    """Return a column's values for every table; a single value holds for all."""
    parts = [number({column: text}, column) for text in row[column].split(";")]
    if len(parts) not in (1, count):
        raise ValueError(f"{column} is '{row[column]}'; T is {count}")
    return parts * count if len(parts) == 1 else parts


def _pr_shard(row: Row, batch: float, rows: float, dim: float, pooling: float) -> LookupShard:
    # FBGEMM's own benchmark draws uniform ids up to an alpha of 1 (generate_requests)
    skewed = row["alpha"] not in ("", "uniform") and number(row, "alpha") > 1.0
    law = Zipf(number(row, "alpha"), FLOORED) if skewed else Uniform()
    nobag = "nobag" in row["kernel"]
    location, _, load_factor = row["location"].partition(" clf ")
    return LookupShard(
        law.bins(int(rows)),
        batch * pooling,
        batch * pooling if nobag else batch,
        int(rows),
        int(dim),
        element_bytes=known(row, "weights_dtype", ELEMENT_BYTES),
        optimizer=known(row, "optimizer", OPTIMIZERS),
        weighted=row["weighted"].strip() == "1",
        pooled=not nobag,
        kernel=known({"location": location}, "location", KERNELS),
        cache_load_factor=float(load_factor) if load_factor else 0.2,
        lengths=batch,
    )
