"""GPT under Megatron: the public iteration times of vTrain on one node, and on several.

Rows of one node are sums of timings, one for each hidden size, tensor parallelism and micro-batch.
Rows behind the runtime's constants keep the part ``fit`` in any file. Other rows are sums of fitted
timings, or of timings that no fit saw: only the latter, the headline, test the constants. Nothing
was fitted on the table of several nodes.
"""

from __future__ import annotations

from pathlib import Path

from lab.runtimes.megatron import Configuration, GptTraining, MegatronStep, load_megatron
from lab.suites import COLUMNS, SUITES, ComparedRow, Report
from lab.validate.tables import ranks_of, read
from predictor.csv_rows import MOST_RANKS, ParsedRows, Row, count, number
from predictor.hardware.loader import load_hardware
from predictor.iteration.critical_path import Segment
from predictor.predict import iteration_interval
from shardopt.formatting import plural

SINGLE_FILE = "vtrain_gpt_8xA100_measured_iteration.csv"
MULTI_FILE = "vtrain_gpt_multinode_A100_measured_iteration.csv"
MULTI_HARDWARE = "a100-80gb"
"""175 billion parameters on 512 GPUs, 64 shards of the weights, do not fit 40 GB."""
UNSEEN, SEEN, FIT, MULTI = PARTS = (
    "timings that no fit saw",
    "other sums of fitted timings",
    "fit",
    "several nodes",
)
VOCABULARY = 50257
"""GPT-2's; vTrain's own model neither pads it nor rounds a shard up (src/config.py)."""
VOCABULARY_MULTIPLE = 128
"""Megatron pads each GPU's shard of the vocabulary to this (--make-vocab-size-divisible-by)."""
NAMES = tuple(COLUMNS[SINGLE_FILE][:-1])
"""Names of the numbers in a `Configuration`; the last column of either table is the time."""
TIMED = ("hidden_size", "attention_heads", "sequence_length", "tensor_parallel", "micro_batch")
"""Columns that determine the timings behind a row of one node (decision 0017)."""
MOST_PASSES = 10**6
"""Limit on micro-batches times stages; the largest published row has 12 288."""

Measured = tuple[Configuration, GptTraining, float]
Timing = tuple[int, ...]
"""Values of the columns `TIMED`."""


def validate_transformers(folder: Path) -> Report:
    runtime = load_megatron()
    rows: list[ComparedRow] = []
    skipped: list[str] = []
    for name, hardware in ((SINGLE_FILE, runtime.hardware), (MULTI_FILE, MULTI_HARDWARE)):
        table = read_steps(folder, name)
        skipped += table.problems
        step = MegatronStep(load_hardware(hardware), runtime.runtime)
        times = step.iteration_ms([model for _, model, _ in table.rows]) if table.rows else ()
        for (configuration, model, measured), time in zip(table.rows, times, strict=True):
            part = MULTI if name == MULTI_FILE else part_of(configuration)
            rows.append(
                ComparedRow(
                    dict(zip(NAMES, configuration, strict=True)),
                    measured,
                    float(time),
                    family=f"t={model.tensor} d={model.data} p={model.pipeline}",
                    part=part,
                    source="VIA-Research/vTrain data",
                    interval_ms=_interval(step, model, float(time)),
                )
            )
    split = ("tensor_parallel", "data_parallel", "pipeline_parallel")
    rows.sort(key=lambda row: (PARTS.index(row.part), *(int(row.name[key]) for key in split)))
    unseen = {tuple(row.name[column] for column in TIMED) for row in rows if row.part == UNSEEN}
    suite = SUITES["transformers"]
    return suite.report(rows, skipped, timings=plural(len(unseen), "timing"))


def _interval(step: MegatronStep, model: GptTraining, time: float) -> tuple[float, float]:
    """Return the 90 % interval of an iteration, from its shares by group of the profile."""
    path = [
        Segment(resource, "", resource, 0, 0.0, share * time)
        for resource, share in step.shares(model).items()
    ]
    return iteration_interval(time, path, step.hardware, ranks_of(step.hardware, model.gpus))


def part_of(configuration: Configuration) -> str:
    """Return the part of a row of one node."""
    fitted = load_megatron().rows
    if configuration in fitted:
        return FIT
    return SEEN if timing_of(configuration) in {timing_of(row) for row in fitted} else UNSEEN


def timing_of(configuration: Configuration) -> Timing:
    """Return the key of the timing behind a row of one node."""
    values = dict(zip(NAMES, configuration, strict=True))
    return tuple(values[name] for name in TIMED)


def read_steps(folder: Path, name: str = SINGLE_FILE) -> ParsedRows[Measured]:
    """Read one of the tables; activations were recomputed on several nodes."""
    *columns, timed = COLUMNS[name]
    several = name == MULTI_FILE

    def parse(row: Row) -> Measured:
        values = tuple(count(row, column) for column in columns)
        gpus, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = values
        multiple = VOCABULARY_MULTIPLE * tensor
        vocabulary = -(-VOCABULARY // multiple) * multiple if several else VOCABULARY
        model = GptTraining(
            hidden, heads, layers, sequence, vocabulary, micro, batch, tensor, data, pipeline,
            recompute=several,
        )  # fmt: skip
        if gpus != model.gpus or gpus > MOST_RANKS:
            split = f"{tensor} x {data} x {pipeline}"
            raise ValueError(f"{columns[0]} is {gpus}, split {split}; at most {MOST_RANKS} GPUs")
        if model.micro_batches * pipeline > MOST_PASSES:
            raise ValueError(
                f"{model.micro_batches} micro-batches are too many for {pipeline} stages"
            )
        return values, model, number(row, timed)

    return read(folder, name, parse)
