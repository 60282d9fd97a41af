"""GPT under Megatron: the public iteration times of vTrain on one node, and on several.

Rows of one node are sums of what the source timed once for each hidden size, tensor parallelism and
micro-batch. Rows that the runtime's constants were fitted on keep the part ``fit`` in any file.
Others are composed of timings that the fit saw in other sums, or of timings that it did not see:
only these, the headline, test the constants. Nothing was fitted on the table of several nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lab.runtimes.megatron import Configuration, GptTraining, MegatronStep, load_megatron
from lab.validate.report import ComparedRow, Report, data_folder
from predictor.csv_rows import MOST_RANKS, ParsedRows, Row, count, number, read_table
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.iteration.critical_path import Segment
from predictor.model.topology import Topology
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
SPLIT = ("tensor_parallel", "data_parallel", "pipeline_parallel")
SOURCE = "VIA-Research/vTrain data"

VOCABULARY = 50257
"""GPT-2's; vTrain's own model neither pads it nor rounds a shard up (src/config.py)."""
VOCABULARY_MULTIPLE = 128
"""Megatron pads each GPU's shard of the vocabulary to this (--make-vocab-size-divisible-by)."""

COLUMNS = {
    "n_gpus": "# GPUs",
    "global_batch": "global batch",
    "micro_batch": "micro batch",
    "hidden_size": "hidden size",
    "attention_heads": "attention heads",
    "layers": "# layers",
    "sequence_length": "sequence length",
    "tensor_parallel": "tensor parallelism",
    "data_parallel": "data parallelism",
    "pipeline_parallel": "pipeline parallelism",
}
"""Columns of the one-node table -> those of the other."""
TIMED = ("hidden_size", "attention_heads", "sequence_length", "tensor_parallel", "micro_batch")
"""Columns that say of which timings a row of one node is a sum (decision 0017)."""
TIMES = ("iteration_ms", "iteration time (ms)")
MOST_PASSES = 10**6
"""Micro-batches times stages; the largest published have 12 288."""

NOTES = (
    "six constants of the software were fitted on the rows `fit`, 100 rows chosen by a hash of "
    "their configuration; GEMM, softmax and collectives are those of the profile",
    "rows of one node are sums of times that the source measured once per hidden size, tensor "
    "parallelism and micro-batch, so errors are shared by all rows of such a combination",
)

Measured = tuple[Configuration, GptTraining, float]
Timing = tuple[int, ...]
"""Values of the columns `TIMED`."""


def validate_transformers(folder: Path) -> Report:
    """Predict every row of the tables in ``folder`` with the shipped constants.

    Raises:
        InputError: the folder is not there, or holds neither table.
    """
    data_folder(folder, [SINGLE_FILE, MULTI_FILE])
    known = load_megatron()
    rows: list[ComparedRow] = []
    skipped: list[str] = []
    for name, reader, hardware in (
        (SINGLE_FILE, read_single, known.hardware),
        (MULTI_FILE, read_multi, MULTI_HARDWARE),
    ):
        if not (folder / name).is_file():
            continue
        table = reader(folder)
        skipped += table.problems
        step = MegatronStep(load_hardware(hardware), known.runtime)
        times = step.iteration_ms([model for _, model, _ in table.rows])
        for (configuration, model, measured), time in zip(table.rows, times, strict=True):
            part = MULTI if name == MULTI_FILE else part_of(configuration)
            row = _compared(configuration, model, measured, float(time), part)
            rows.append(replace(row, interval_ms=_interval(step, model, float(time))))
    rows.sort(key=lambda row: (PARTS.index(row.part), *(int(row.name[key]) for key in SPLIT)))
    unseen = [row.name for row in rows if row.part == UNSEEN]
    timings = {tuple(name[column] for column in TIMED) for name in unseen}
    notes = (*NOTES, f"rows of '{UNSEEN}' are sums of {plural(len(timings), 'timing')}")
    return Report("transformers", tuple(rows), UNSEEN, tuple(skipped), notes)


def _interval(step: MegatronStep, model: GptTraining, time: float) -> tuple[float, float]:
    """90 % interval of an iteration, by how much of it each group of the profile gives."""
    hardware = step.hardware
    local = min(model.gpus, hardware.gpus_per_host)
    topology = Topology.uniform(
        model.gpus, local, hbm_bytes=hardware.hbm_bytes, ddr_bytes=hardware.ddr_bytes
    )
    path = [
        Segment(resource, "", resource, 0, 0.0, share * time)
        for resource, share in step.shares(model).items()
    ]
    return iteration_interval(time, path, hardware, topology)


def part_of(configuration: Configuration) -> str:
    """Part of a row of one node."""
    known = load_megatron()
    if configuration in known.rows:
        return FIT
    seen = {timing_of(row) for row in known.rows}
    return SEEN if timing_of(configuration) in seen else UNSEEN


def timing_of(configuration: Configuration) -> Timing:
    """What was timed once, for all rows of one node that agree in it."""
    values = dict(zip(COLUMNS, configuration, strict=True))
    return tuple(values[name] for name in TIMED)


def read_single(folder: Path) -> ParsedRows[Measured]:
    """Rows of the one-node table."""
    columns = tuple(COLUMNS)
    return read_table(folder / SINGLE_FILE, (*columns, TIMES[0]), _parser(columns, TIMES[0]))


def read_multi(folder: Path) -> ParsedRows[Measured]:
    """Rows of the table of several nodes; their activations were recomputed."""
    columns = tuple(COLUMNS.values())
    parse = _parser(columns, TIMES[1], several=True)
    return read_table(folder / MULTI_FILE, (*columns, TIMES[1]), parse)


def _parser(
    columns: tuple[str, ...], time: str, *, several: bool = False
) -> Callable[[Row], Measured]:
    def parse(row: Row) -> Measured:
        values = tuple(count(row, column) for column in columns)
        gpus, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = values
        vocabulary = VOCABULARY
        if several:
            multiple = VOCABULARY_MULTIPLE * tensor
            vocabulary = -(-VOCABULARY // multiple) * multiple
        try:
            model = GptTraining(
                hidden, heads, layers, sequence, vocabulary, micro, batch, tensor, data, pipeline,
                recompute=several,
            )  # fmt: skip
        except InputError as error:
            raise ValueError(str(error)) from error
        if gpus != model.gpus or gpus > MOST_RANKS:
            split = f"{tensor} x {data} x {pipeline}"
            raise ValueError(f"{columns[0]} is {gpus}, split {split}; at most {MOST_RANKS} GPUs")
        if model.micro_batches * pipeline > MOST_PASSES:
            raise ValueError(
                f"{model.micro_batches} micro-batches are too many for {pipeline} stages"
            )
        return values, model, number(row, time)

    return parse


def _compared(
    configuration: Configuration, model: GptTraining, measured: float, time: float, part: str
) -> ComparedRow:
    split = f"t={model.tensor} d={model.data} p={model.pipeline}"
    return ComparedRow(
        dict(zip(COLUMNS, configuration, strict=True)),
        measured,
        time,
        family=split,
        part=part,
        source=SOURCE,
    )
