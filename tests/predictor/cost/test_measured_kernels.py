"""Kernels of one H100 and one H200 against the rows beside their profiles.

Constants were taken from these rows, so this is a check of forms, not of accuracy.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources

import numpy as np
import pytest

from predictor.cost.gemm import gemm_ms
from predictor.cost.ops.op_time import OpTimes
from predictor.hardware.loader import load_hardware
from predictor.model.dlrm_program import dense_program
from predictor.model.op_calls import OpCall
from predictor.model.workload import DcnV2, DenseArch
from tests.builders import a_table, a_workload

LAYOUTS = {"forward": "nt", "grad_input": "nn", "grad_weight": "tn"}
CARDS = ["h100-sxm", "h200-sxm"]


def rows(card: str) -> Iterator[dict[str, str]]:
    file = resources.files("predictor.hardware") / "profiles" / f"{card}.rows.csv"
    yield from csv.DictReader(file.read_text(encoding="utf-8").splitlines())


def product_errors(card: str, unaligned: bool) -> list[float]:
    hw, errors = load_hardware(card), []
    for row in rows(card):
        if row["group"] != "gemm":
            continue
        (data_type, way), words = row["kernel"].split(), row["where"].split()
        m, n, k = (int(size) for size in words[1::2])
        shape = {"forward": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[way]
        if 2e-9 * m * n * k < 2 or (k == 479 and data_type != "fp32") != unaligned:
            continue
        predicted = gemm_ms(hw, *shape, data_type, LAYOUTS[way])
        errors.append(abs(1e3 * predicted / float(row["us"]) - 1))
    return errors


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("unaligned", [False, True])
def test_products_of_all_types_layouts_and_alignments(card: str, unaligned: bool) -> None:
    errors = product_errors(card, unaligned)
    assert len(errors) >= 12
    assert np.mean(errors) < (0.25 if unaligned else 0.12)


@pytest.mark.parametrize("card", CARDS)
def test_a_width_of_479_costs_several_times_one_of_480(card: str) -> None:
    hw = load_hardware(card)
    for data_type, factor in (("bf16", 3), ("tf32", 1.5)):
        odd, even = (gemm_ms(hw, 32768, 1024, k, data_type, "nt") for k in (479, 480))
        assert odd > factor * even
    assert gemm_ms(hw, 32768, 1024, 479, "fp32") < 1.02 * gemm_ms(hw, 32768, 1024, 480, "fp32")


def dense_ms(card: str, dense: DenseArch, batch: int, names: tuple[str, ...]) -> float:
    """Kernel time of ops of some names in a step of MLPerf's DLRM with 26 features of 128."""
    tables = [a_table(f"t{i}", dim=128) for i in range(26)]
    workload = a_workload(*tables, batch_size=batch, dense=dense)
    program, times = dense_program(workload), OpTimes(load_hardware(card), dense.data_type)
    calls = [*program.forward, *program.backward, *program.optimizer]
    ops = [c for c in calls if isinstance(c, OpCall) and c.name in names]
    return sum(times.cost(call).ms for call in ops)


@pytest.mark.parametrize(
    ("card", "data_type", "batch", "measured_ms"),
    [("h200-sxm", "fp32", 16384, 1.358), ("h200-sxm", "bf16", 32768, 2.287)],
)
def test_the_backward_of_picking_pairs(
    card: str, data_type: str, batch: int, measured_ms: float
) -> None:
    dense = DenseArch(13, (512, 256, 128), (1024, 1024, 512, 256, 1), "dot", data_type=data_type)
    predicted_ms = dense_ms(card, dense, batch, ("index_put",))
    assert predicted_ms == pytest.approx(measured_ms, rel=0.15)


def test_what_autocast_adds_to_cross_layers() -> None:
    """Casts, adds and products of two types in DCN v2: 13.3 ms of a step of 22.4 on an H100."""
    dense = DenseArch(
        13, (512, 256, 128), (1024, 1024, 512, 256, 1), DcnV2(3, 512), data_type="bf16"
    )
    names = ("_to_copy", "mul", "add", "cat", "relu", "threshold_backward")
    assert dense_ms("h100-sxm", dense, 32768, names) == pytest.approx(13.3, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "odd"),
    [("nn", "nk"), ("nt", "nk"), ("tn", "mn"), ("tt", "mnk")],
)
def test_a_side_counts_as_odd_where_it_is_a_row_in_memory(layout: str, odd: str) -> None:
    """The gradient of weights has the batch as its depth, and the side of the outputs as a row."""
    hw = load_hardware("h100-sxm")
    even = {"m": 4096, "n": 4096, "k": 4096}
    fast = gemm_ms(hw, *even.values(), "bf16", layout)
    slower = {
        side
        for side in even
        if gemm_ms(hw, *(even | {side: 4095}).values(), "bf16", layout) > 2 * fast
    }
    assert slower == set(odd)
