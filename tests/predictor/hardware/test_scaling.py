"""A profile with the times of one group scaled: what moves, what stays, and what ops then cost."""

from collections.abc import Callable

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.scaling import scale_group
from predictor.hardware.schema import HardwareProfile

H100 = load_hardware("h100-sxm")


@pytest.mark.parametrize(
    ("group", "read", "moves"),
    [
        ("overheads", lambda hw: hw.overheads.op_us, 2.0),
        ("overheads", lambda hw: hw.overheads.iteration_us, 2.0),
        ("gemm", lambda hw: hw.gemm.tflops["bf16"], 0.5),
        ("gemm", lambda hw: hw.gemm.tensor_cores["tf32"].l2_gb_s, 0.5),
        ("gemm", lambda hw: hw.gemm.split_k, 1.0),
        ("embedding", lambda hw: hw.embedding.backward_efficiency, 0.5),
        ("embedding", lambda hw: hw.embedding.prefetch_ns_per_lookup, 2.0),
        ("embedding", lambda hw: hw.embedding.row_overhead_bytes, 1.0),
        ("collectives", lambda hw: hw.collectives.inter.nic_gbit_s, 0.5),
        ("collectives", lambda hw: hw.collectives.intra.all_to_all.latency_us, 2.0),
        ("collectives", lambda hw: hw.collectives.intra.in_switch.us_per_mib[0], 2.0),
        ("collectives", lambda hw: hw.collectives.inter.tree_cost, 1.0),
        ("memory", lambda hw: hw.memory.l2_mib, 1.0),
        ("memory", lambda hw: hw.memory.hbm_gb_s, 0.5),
    ],
)
def test_times_double_and_rates_halve(
    group: str, read: Callable[[HardwareProfile], float], moves: float
) -> None:
    assert read(scale_group(H100, group, 2.0)) == pytest.approx(moves * read(H100))
