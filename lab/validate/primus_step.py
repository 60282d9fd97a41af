"""One traced step of a TorchRec model on eight B200, kernel class by kernel class.

`primus_dlrm_step_measured.csv` says in its head what the model is: attention over sequences of
tokens (OneTrans), TorchRec's embeddings row by row on eight ranks. Each product, layer of attention
and collective of the trace is a row here. What is not predicted is its memory-bound kernels, since
its module is not public in this form, and so the step.

The rank of the trace holds the hot rows: its exchange of embeddings moves 7.81 GB in and out, but
its own samples have 4,504 ids of 256 bytes, so it sends 6.6 GB and receives 1.2. Sending one way,
it is a quarter faster than the exchange of equal parts that a prediction takes it for. Row-wise
blocks keep the ids' order, and low ids are the popular ones: `HOT_SHARE` of all ids are on it.

The same table shows what learning is worth on a GPU: half of the kernels of each class teach a
factor, and the other half is predicted with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from lab.statistics import grouped
from lab.suites import SUITES, Cell, ComparedRow, Report
from lab.validate.tables import compare_tables, kernel_interval, profile_of_row
from predictor.cost.collectives import Collectives
from predictor.cost.gemm import attention_ms, gemm_ms
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard
from predictor.cost.posterior import LEAST_NOISE, posterior
from predictor.csv_rows import Row, count, number
from predictor.hardware.learned import DENSE, Evidence
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import Zipf
from predictor.model.topology import Topology

FILE = "primus_dlrm_step_measured.csv"
RANKS, BATCH, HEADS, HEAD_WIDTH = 8, 1024, 6, 64
FEWEST = 4
"""Kernels that teach a factor, and kernels that it is tried on."""
TABLES = {9_390_624: 1501, 1_293_395: 1501, 3_367_692: 1501, 1_000_001: 1}
"""Rows of a table -> ids of a sample."""
ROW_BYTES = 256
IDS = BATCH * sum(TABLES.values())
"""Of a rank's samples."""
BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}
EXCHANGED = {"Embedding data": ROW_BYTES, "KJT lengths": 8}
"""What is exchanged by ids -> bytes of an id; the row of the lengths has the size of the ids."""
LOOKUPS = "Embeddings (FBGEMM)"
PRODUCTS, ATTENTION, COLLECTIVES, CLASSES = "products", "attention", "collectives", "lookups"
TOPOLOGY = Topology.uniform(RANKS, RANKS, hbm_bytes=0, ddr_bytes=0)
LAYOUTS = {"TNT": "forward", "NNT": "gradients of inputs", "NTN": "gradients of weights"}
"""Last part of the name of a product's kernel -> what it computes."""
SUITE = SUITES["primus-step"]


def validate_primus_step(folder: Path) -> Report:
    """Predict what the trace has a row for."""
    rows, skipped = compare_tables(folder, {FILE: step_row})
    return SUITE.report(rows, skipped, scores=[SUITE.table("learned by class", _learned(rows))])


def _learned(rows: Sequence[ComparedRow]) -> Iterator[tuple[Cell, ...]]:
    """Every class of which a half can teach the other: both halves, before and after."""
    classes = grouped(rows, _class_of)
    classes = {name: of for name, of in classes.items() if name and len(of) >= 2 * FEWEST}
    for name, half in ((name, half) for half in range(2) for name in classes):
        taught, other = (classes[name][i::2] for i in (half, 1 - half))
        part = f"{DENSE}.{name}"
        evidence = Evidence(
            what=name,
            measured_ms=sum(row.measured_ms for row in taught),
            noise=LEAST_NOISE,
            parts_ms={part: sum(row.predicted_ms for row in taught)},
        )
        learned, _ = posterior([evidence], load_hardware("b200"), TOPOLOGY)
        factor = prod(of.factor for of in learned)
        measured = sum(row.measured_ms for row in other)
        predicted = sum(row.predicted_ms for row in other)
        before, after = predicted / measured - 1, factor * predicted / measured - 1
        yield name, len(taught), factor, len(other), before, after


def _class_of(row: ComparedRow) -> str | None:
    """Kernels that are off alike; None for those of no class."""
    if row.part == ATTENTION:
        return row.family
    layout = LAYOUTS.get(str(row.name["name"]).rpartition("_")[2])
    return None if row.part != PRODUCTS or layout is None else f"products, {layout}"


def step_row(row: Row) -> ComparedRow:
    """A row with its prediction.

    Raises:
        ValueError: a column cannot be read, or nothing predicts what it is.
    """
    hw, kind = profile_of_row(row), row["kind"]
    if kind == "kernels of a step" and row["name"] == LOOKUPS:
        part, ms, group = CLASSES, _lookups_ms(hw), "embedding"
    elif kind == "product":
        m, n, k = (count(row, column, 2**40) for column in "mnk")
        part, ms, group = PRODUCTS, gemm_ms(hw, m, n, k, "bf16"), "gemm"
    elif kind in ("attention forward", "attention backward"):
        shape = (count(row, "q"), count(row, "kv"), HEAD_WIDTH)
        backward = kind.endswith("backward")
        ms = attention_ms(hw, BATCH * HEADS, shape, "bf16", backward=backward, causal=True)
        part, group = ATTENTION, "gemm"
    elif kind == "collective":
        part, ms, group = COLLECTIVES, _collective_ms(hw, row), "collectives.intra"
    else:
        raise ValueError(f"kind is '{kind}' and name '{row['name']}', which needs the whole model")
    return ComparedRow(
        {"kind": kind, "name": row["name"], **{c: row[c] for c in ("m", "n", "k", "q") if row[c]}},
        number(row, "ms"),
        ms,
        family=kind,
        part=part,
        source="AMD-AGI/Primus-DLRM doc/perf_analysis.md",
        interval_ms=kernel_interval(hw, [group], ms),
    )


def _collective_ms(hw: HardwareProfile, row: Row) -> float:
    """``vol_per_call`` is what a rank sends and receives."""
    figure, unit = row["vol_per_call"].split()
    both = float(figure) * BYTES[unit]
    engine = Collectives(hw, TOPOLOGY)
    if "AllReduce" in row["name"]:
        return float(engine.all_reduce(both / 2))
    own = next((IDS * size for name, size in EXCHANGED.items() if name in row["name"]), both / 2)
    return float(engine.all_to_all(both - own))


HOT_SHARE = (7.81e9 - IDS * ROW_BYTES) / (RANKS * IDS * ROW_BYTES)
"""Of all ids, those on the rank of the trace."""
ALPHA = 0.85
"""Zipf exponent at which an eighth of the rows draws `HOT_SHARE` of the ids."""


def _lookups_ms(hw: HardwareProfile) -> float:
    """Forward and backward of the rank with the hot rows, one launch a direction."""
    model = lookup_model(hw)
    shards = []
    for rows, ids in TABLES.items():
        own = -(-rows // RANKS)
        bins = Zipf(ALPHA).bins(rows).slice(0, own)
        draws = float(RANKS * BATCH * ids)
        shards.append(LookupShard(bins, draws, draws * bins.mass, own, 64, pooled=False))
    forward = sum(model.forward_ms(shard) for shard in shards) + model.forward_floor_ms()
    backward = sum(model.backward_ms(shard) for shard in shards) + model.backward_floor_ms()
    return forward + backward
