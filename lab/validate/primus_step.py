"""One traced step of a TorchRec model on eight B200, kernel class by kernel class.

The head of `primus_dlrm_step_measured.csv` describes the model: attention over sequences of tokens
(OneTrans), and TorchRec's embeddings row by row on eight ranks. Each product, layer of attention
and collective of the trace is a row, predicted from its own size. The step and the time of each
class of kernels are predicted from the whole captured model (`lab.onetrans`).

The rank of the trace has the hot rows: its exchange of embeddings moves 7.81 GB in and out, but its
own samples have 4,504 ids of 256 bytes, so it sends 6.6 GB and receives 1.2. One-way traffic is a
quarter faster than the exchange of equal parts that a prediction assumes. Row-wise blocks keep the
order of the ids, and low ids are the popular ones.

The same table shows the value of learning on a GPU: half of the kernels of each class give a
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
"""Least number of kernels to learn a factor from, and to test it on."""
ROW_BYTES = 256
IDS = BATCH * (len(TABLES) * (HISTORIES * LENGTH + 1) + 1)
"""Ids of a rank's samples."""
BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}
EXCHANGED = {"Embedding data": ROW_BYTES, "KJT lengths": 8}
"""Exchange by ids -> bytes of an id; the row of the lengths has the size of the ids."""
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
"""Class of kernels in the table -> group of the profile that gives its cost."""
LAYOUTS = {"TNT": "forward", "NNT": "gradients of inputs", "NTN": "gradients of weights"}
"""Last part of a product's kernel name -> its result."""
SUITE = SUITES["primus-step"]


def validate_primus_step(folder: Path) -> Report:
    rows, skipped = compare_tables(folder, {FILE: step_row})
    return SUITE.report(rows, skipped, scores=[SUITE.table("learned by class", _learned(rows))])


def _learned(rows: Sequence[ComparedRow]) -> Iterator[tuple[Cell, ...]]:
    """Yield both halves of every class large enough, before and after learning from the other."""
    classes = grouped(rows, _class_of)
    classes = {
        name: rows_of_class
        for name, rows_of_class in classes.items()
        if name and len(rows_of_class) >= 2 * FEWEST
    }
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
        factor = prod(rows_of_class.factor for rows_of_class in learned)
        measured = sum(row.measured_ms for row in other)
        predicted = sum(row.predicted_ms for row in other)
        before, after = predicted / measured - 1, factor * predicted / measured - 1
        yield name, len(taught), factor, len(other), before, after


def _class_of(row: ComparedRow) -> str | None:
    """Return a row's class of kernels with similar errors; None if it has none."""
    if row.part == ATTENTION:
        return row.family
    layout = LAYOUTS.get(str(row.name["name"]).rpartition("_")[2])
    return None if row.part != PRODUCTS or layout is None else f"products, {layout}"


def step_row(row: Row) -> ComparedRow:
    """Predict a row.

    Raises:
        ValueError: a column cannot be read, or nothing predicts the row.
    """
    hw, kind, name = profile_of_row(row), row["kind"], row["name"]
    interval = None
    if kind == "step":
        step = _step(hw.name)
        part, ms, group, interval = STEP, step.iteration_ms, "", step.interval_ms
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
    """Predict a collective; ``vol_per_call`` is the sum of a rank's sent and received bytes."""
    figure, unit = row["vol_per_call"].split()
    both = float(figure) * BYTES[unit]
    engine = Collectives(hw, TOPOLOGY)
    if "AllReduce" in row["name"]:
        return float(engine.all_reduce(both / 2))
    own = next((IDS * size for name, size in EXCHANGED.items() if name in row["name"]), both / 2)
    return float(engine.all_to_all(both - own))


@cache
def _step(hardware: str) -> Prediction:
    """Predict the whole model on a profile, with all tables row-wise."""
    workload = one_trans()
    plan = plan_of(workload, TOPOLOGY, tuple(row_wise(t, RANKS) for t in workload.tables))
    return predict(workload, TOPOLOGY, load_hardware(hardware), plan)


@cache
def _classes(hardware: str) -> dict[str, float]:
    """Return the ms of each class of kernels in a step; of exchanges only exposed time."""
    hw, step, program = load_hardware(hardware), _step(hardware), dense_program(one_trans())
    times = op_time.OpTimes(hw, "fp32")
    class_ms = dict.fromkeys(GROUPS, 0.0)
    for events in (program.forward, program.backward):
        for chain in op_time.fused_chains(_calls(events)):
            name, ms = op_time.plain_name(chain[0]), times.cost_of_chain(chain).ms
            if len(chain) > 1:
                class_ms["Fused ops (Triton)"] += ms
            elif name in op_time.PRODUCTS:
                class_ms["GEMM (cuBLAS)"] += ms
            elif name in op_time.ATTENTION:
                class_ms["Attention (FA4)"] += ms
            else:
                class_ms["Elementwise"] += ms
    class_ms["Misc (optimizer, sort, etc.)"] = sum(
        times.cost(call).ms for call in _calls(program.optimizer)
    )
    for phase, ms in step.breakdown.items():
        if phase.startswith("embedding_"):
            class_ms["Embeddings (FBGEMM)"] += ms
        elif phase.startswith(("input_dist", "output_dist", "all_reduce")):
            class_ms["NCCL — exposed"] += ms
    return class_ms


def _calls(events: Sequence[Event]) -> list[OpCall]:
    return [event for event in events if isinstance(event, OpCall)]
