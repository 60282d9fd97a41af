"""One traced step of a TorchRec model on eight B200, kernel class by kernel class.

`primus_dlrm_step_measured.csv` says in its head what the model is: attention over sequences of
tokens (OneTrans), TorchRec's embeddings row by row on eight ranks. Each product, layer of attention
and collective of the trace is a row here, predicted by its own size; and so are the step and what
each class of its kernels takes, predicted of the whole model (`lab.onetrans`) as it is captured.

The rank of the trace holds the hot rows: its exchange of embeddings moves 7.81 GB in and out, but
its own samples have 4,504 ids of 256 bytes, so it sends 6.6 GB and receives 1.2. Sending one way,
it is a quarter faster than the exchange of equal parts that a prediction takes it for. Row-wise
blocks keep the ids' order, and low ids are the popular ones.

The same table shows what learning is worth on a GPU: half of the kernels of each class teach a
factor, and the other half is predicted with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path

from lab.onetrans import BATCH, HEADS, HISTORIES, LENGTH, TABLES, one_trans
from lab.statistics import grouped
from lab.suites import SUITES, Cell, ComparedRow, Report
from lab.tasks.plans import plan_of, row_wise
from lab.validate.tables import compare_tables, kernel_interval, profile_of_row
from predictor.cost.collectives import Collectives
from predictor.cost.gemm import attention_ms, gemm_ms
from predictor.cost.ops import op_time
from predictor.cost.posterior import LEAST_NOISE, posterior
from predictor.csv_rows import Row, count, number
from predictor.hardware.learned import DENSE, Evidence
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.dlrm_program import dense_program
from predictor.model.op_calls import Event, OpCall
from predictor.model.topology import Topology
from predictor.predict import Prediction, predict

FILE = "primus_dlrm_step_measured.csv"
RANKS, HEAD_WIDTH = 8, 64
FEWEST = 4
"""Kernels that teach a factor, and kernels that it is tried on."""
ROW_BYTES = 256
IDS = BATCH * (len(TABLES) * (HISTORIES * LENGTH + 1) + 1)
"""Of a rank's samples."""
BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}
EXCHANGED = {"Embedding data": ROW_BYTES, "KJT lengths": 8}
"""What is exchanged by ids -> bytes of an id; the row of the lengths has the size of the ids."""
PRODUCTS, ATTENTION, COLLECTIVES = "products", "attention", "collectives"
STEP, CLASSES = "step", "classes of kernels"
TOPOLOGY = Topology.uniform(RANKS, RANKS, hbm_bytes=180 << 30, ddr_bytes=0)
GROUPS = {
    "GEMM (cuBLAS)": "gemm",
    "Attention (FA4)": "gemm",
    "Fused ops (Triton)": "elementwise",
    "Elementwise": "elementwise",
    "Embeddings (FBGEMM)": "embedding",
    "NCCL — exposed": "collectives.intra",
    "Misc (optimizer, sort, etc.)": "elementwise",
}
"""Classes of kernels in the table -> the group of the profile that they are priced by."""
LAYOUTS = {"TNT": "forward", "NNT": "gradients of inputs", "NTN": "gradients of weights"}
"""Last part of the name of a product's kernel -> what it computes."""
SUITE = SUITES["primus-step"]


def validate_primus_step(folder: Path) -> Report:
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
    hw, kind, name = profile_of_row(row), row["kind"], row["name"]
    interval = None
    if kind == "step":
        found = _step(hw.name)
        part, ms, group, interval = STEP, found.iteration_ms, "", found.interval_ms
    elif kind == "kernels of a step" and name in GROUPS:
        part, ms, group = CLASSES, _classes(hw.name)[name], GROUPS[name]
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
        raise ValueError(f"kind is '{kind}' and name '{name}', which nothing predicts")
    return ComparedRow(
        {"kind": kind, "name": name, **{c: row[c] for c in ("m", "n", "k", "q") if row[c]}},
        number(row, "ms"),
        ms,
        family=kind,
        part=part,
        source="AMD-AGI/Primus-DLRM doc/perf_analysis.md",
        interval_ms=interval or kernel_interval(hw, [group], ms),
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


@cache
def _step(hardware: str) -> Prediction:
    """The whole model on a profile, all tables row by row."""
    workload = one_trans()
    plan = plan_of(workload, TOPOLOGY, tuple(row_wise(t, RANKS) for t in workload.tables))
    return predict(workload, TOPOLOGY, load_hardware(hardware), plan)


@cache
def _classes(hardware: str) -> dict[str, float]:
    """What the kernels of each class take in a step, in ms; exchanges while nothing else runs."""
    hw, step, program = load_hardware(hardware), _step(hardware), dense_program(one_trans())
    times = op_time.OpTimes(hw, "fp32")
    found = dict.fromkeys(GROUPS, 0.0)
    for events in (program.forward, program.backward):
        for chain in op_time.fused_chains(_calls(events)):
            name, ms = op_time.plain_name(chain[0]), times.cost_of_chain(chain).ms
            if len(chain) > 1:
                found["Fused ops (Triton)"] += ms
            elif name in op_time.PRODUCTS:
                found["GEMM (cuBLAS)"] += ms
            elif name in op_time.ATTENTION:
                found["Attention (FA4)"] += ms
            else:
                found["Elementwise"] += ms
    found["Misc (optimizer, sort, etc.)"] = sum(
        times.cost(call).ms for call in _calls(program.optimizer)
    )
    for phase, ms in step.breakdown.items():
        if phase.startswith("embedding_"):
            found["Embeddings (FBGEMM)"] += ms
        elif phase.startswith(("input_dist", "output_dist", "all_reduce")):
            found["NCCL — exposed"] += ms
    return found


def _calls(events: Sequence[Event]) -> list[OpCall]:
    return [event for event in events if isinstance(event, OpCall)]
