"""One public step of a generative recommender on two hosts of eight H100, class by class, and the
gain of balanced batches.

`hstu_16xh100_step_2026.csv` has a step of fixed lengths by classes of kernels, products and
attention by their shapes, and runs of varying lengths, before and after samples were balanced over
ranks by their work. The model is `lab.hstu`, as `to_yaml` captures it.

Attention runs a CUTLASS kernel for Hopper, where PyTorch runs FlashAttention-2. The prediction is
faster by the ratios that FlashAttention-3 reports (`FORWARD`, `BACKWARD`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from lab.hstu import BATCH, CACHED, HEADS, ITEMS, LAYERS, TOKENS, WIDTH, hstu
from lab.suites import SUITES, ComparedRow, Report
from lab.tasks.plans import data_parallel, plan_of, row_wise
from lab.validate.tables import compare_tables, kernel_interval
from predictor.cost.gemm import attention_ms, gemm_ms
from predictor.cost.ops import op_time
from predictor.cost.uneven_batches import SampleLengths
from predictor.csv_rows import Row, number
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.dlrm_program import dense_program
from predictor.model.op_calls import OpCall
from predictor.model.plan import ComputeKernel
from predictor.model.topology import Topology
from predictor.predict import Prediction, predict

FILE = "hstu_16xh100_step_2026.csv"
FORWARD, BACKWARD = 1.75, 1.6
"""FlashAttention-3 over FlashAttention-2 on an H100, the middle of the reported range: 1.5 to 2.0
forward, 1.5 to 1.75 backward (Shah et al. 2024, arXiv 2407.08608)."""
RANKS, HOST = 16, 8
TOPOLOGY = Topology.uniform(RANKS, HOST, hbm_bytes=80 << 30, ddr_bytes=256 << 30)
STEP, CLASSES, KERNELS, BALANCED = "step", "classes of kernels", "kernels", "without balancing"
TOKEN_COUNT = BATCH * TOKENS
PRODUCTS = {
    "gemm uvqk forward": [(TOKEN_COUNT, 4 * WIDTH, WIDTH)],
    "gemm uvqk backward": [(TOKEN_COUNT, WIDTH, 4 * WIDTH), (WIDTH, 4 * WIDTH, TOKEN_COUNT)],
    "gemm projection forward": [(TOKEN_COUNT, WIDTH, WIDTH)],
    "gemm projection backward": [(TOKEN_COUNT, WIDTH, WIDTH), (WIDTH, WIDTH, TOKEN_COUNT)],
}
"""Quantity -> m, n and k of the products of a layer."""
UNBALANCED, SHARED_OUT = "jagged run exp0 baseline", "jagged run exp1 shuffler"
TFLOP = {"linear": 33.01, "square": 30.88}
"""TFLOP of a step of fixed lengths on a rank: products, and attention."""
LONGEST, SKEW = 4096, 1.2
"""Lengths of samples: `numpy.random.zipf`, cut."""
SUITE = SUITES["hstu-step"]


def validate_hstu_step(folder: Path) -> Report:
    rows, skipped = compare_tables(folder, {FILE: partial(step_row, folder)})
    return SUITE.report(rows, skipped)


def step_row(folder: Path, row: Row) -> ComparedRow:
    """Predict a row.

    Raises:
        ValueError: nothing predicts the quantity.
    """
    hw, name = _hardware(), row["quantity"]
    measured, interval, groups = number(row, "value"), None, ["gemm"]
    classes = _classes()
    if name == "step_median":
        part, ms, interval = STEP, _step().iteration_ms, _step().interval_ms
    elif name in classes:
        part, ms = CLASSES, classes[name][1]
        groups = [classes[name][0]]
    elif name in PRODUCTS:
        part = KERNELS
        ms = LAYERS * sum(gemm_ms(hw, m, n, k, "bf16") for m, n, k in PRODUCTS[name])
    elif name in ("attention forward", "attention backward"):
        part, ms = KERNELS, LAYERS * _attention_ms(backward=name.endswith("backward"))
    elif name == UNBALANCED:
        part = BALANCED
        balanced, work = _rates(folder)[SHARED_OUT], _mean_tflop()
        measured = 1e3 * work / measured
        ms = 1e3 * work / balanced * (1 + _excess(1e3 * work / balanced))
    else:
        raise ValueError(f"quantity is '{name}', which nothing predicts")
    return ComparedRow(
        {"quantity": name},
        measured,
        ms,
        family=part,
        part=part,
        source="NVIDIA/recsys-examples examples/hstu/training/benchmark",
        interval_ms=interval or kernel_interval(hw, groups, ms),
    )


@cache
def _hardware() -> HardwareProfile:
    hw = load_hardware("h100-sxm")
    faster = {
        "attention_forward": hw.gemm.attention_forward * FORWARD,
        "attention_backward": hw.gemm.attention_backward * BACKWARD,
    }
    return hw.model_copy(update={"gemm": hw.gemm.model_copy(update=faster)})


def _attention_ms(*, backward: bool) -> float:
    shape = (TOKENS, TOKENS, WIDTH // HEADS)
    return attention_ms(_hardware(), BATCH * HEADS, shape, "bf16", backward=backward, causal=True)


@cache
def _step() -> Prediction:
    workload = hstu()
    tables = [
        replace(
            row_wise(table, RANKS),
            compute_kernel=ComputeKernel.DYNAMICEMB_CACHING,
            parameters={"cache_params": {"load_factor": CACHED}},
        )
        if table.storage == "dynamicemb"
        else data_parallel(table, RANKS)
        for table in workload.tables
    ]
    plan = plan_of(workload, TOPOLOGY, tuple(tables))
    return predict(workload, TOPOLOGY, _hardware(), plan)


@cache
def _classes() -> dict[str, tuple[str, float]]:
    """Return class of kernels -> its group of the profile, and its ms in a step."""
    program, times = dense_program(hstu()), op_time.OpTimes(_hardware(), "fp32")
    class_ms = dict.fromkeys(("elementwise", "gemm others"), 0.0)
    for events in (program.forward, program.backward):
        for chain in op_time.fused_chains([e for e in events if isinstance(e, OpCall)]):
            name, ms = op_time.plain_name(chain[0]), times.cost_of_chain(chain).ms
            product = len(chain) == 1 and name in op_time.PRODUCTS
            if not product and name not in op_time.ATTENTION:
                class_ms["elementwise"] += ms
            elif product and ms < SMALL_MS:
                class_ms["gemm others"] += ms
    step = _step()
    moving = ("embedding_forward", "embedding_backward", "prefetch")
    lookups = sum(
        float(np.mean(op.cost_ms))
        for op in step.graph.ops
        if op.phase in moving or (op.phase, op.resource) == ("input_dist", "elementwise")
    )
    exposed = sum(s.duration_ms for s in step.critical_path if s.resource == "collectives")
    return {
        "attention fwd+bwd": (
            "gemm",
            LAYERS * sum(_attention_ms(backward=way) for way in (False, True)),
        ),
        "elementwise": ("elementwise", class_ms["elementwise"]),
        "gemm others": ("gemm", class_ms["gemm others"]),
        "embedding op": ("embedding", lookups),
        "nccl exposed": ("collectives.inter", exposed),
    }


SMALL_MS = 0.2
"""Least time of a layer's product; other products take less."""


@cache
def _rates(folder: Path) -> dict[str, float]:
    """Read the TFLOPS a GPU of the runs of varying lengths."""
    rates = {}
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(",")
        if name.startswith("jagged run"):
            rates[name] = float(rest.split(",")[0])
    return rates


@cache
def _tokens() -> tuple[float, float, float]:
    """Return mean, variance and maximum of a sample's tokens."""
    lengths = np.arange(1, LONGEST + 1.0)
    share = lengths**-SKEW
    share /= share.sum() + (LONGEST + 0.5) ** (1 - SKEW) / (SKEW - 1)
    share[-1] += 1 - share.sum()
    tokens = 2 * lengths + TOKENS - 2 * ITEMS
    mean = float(share @ tokens)
    return mean, float(share @ (tokens - mean) ** 2), float(tokens[-1])


def _mean_tflop() -> float:
    """Return the mean TFLOP of a step on a rank over the lengths."""
    mean, variance, _ = _tokens()
    square = (variance + mean**2) / TOKENS**2
    return TFLOP["linear"] * mean / TOKENS + TFLOP["square"] * square


def _excess(step_ms: float) -> float:
    """Return the share of a balanced step that unbalanced batches wait for the longest.

    Attention was a Triton kernel of unknown rate, so it gets the rest of the step beside products
    and elementwise kernels.
    """
    mean, variance, most = _tokens()
    products = LAYERS * sum(
        gemm_ms(_hardware(), m, n, k, "bf16") for shapes in PRODUCTS.values() for m, n, k in shapes
    )
    linear = (products + _classes()["elementwise"][1]) * mean / TOKENS / step_ms
    lookups = _classes()["embedding op"][1] / step_ms
    lengths = SampleLengths(mean, variance, most)
    return lengths.excess(linear, 1 - linear - lookups, BATCH, RANKS)
