"""Contract of every kernel model on every shipped profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from predictor.cost.collectives import OPS, Collectives
from predictor.cost.elementwise import columns_ms, copy_h2d_ms, decode_ms, memory_ms
from predictor.cost.gemm import batched_ms, gemm_ms
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import ReuseHistogram, Uniform, Zipf
from predictor.model.plan import ComputeKernel
from predictor.model.topology import Topology

Cost = Callable[[HardwareProfile, float], float]

GROWTH = (1.0, 2.0, 7.0, 40.0, 900.0)
DISTRIBUTIONS = (Uniform(), Zipf(1.05), ReuseHistogram(1000.0, (0.6, 0.2, 0.15, 0.05)))


def _lookups(distribution: int, kernel: ComputeKernel) -> LookupShard:
    rows = 1_000_000
    bins = DISTRIBUTIONS[distribution].bins(rows)
    return LookupShard(bins, 1000.0, 1000.0, rows, 64, kernel=kernel)


def _by_draws(distribution: int, kernel: ComputeKernel, *, backward: bool) -> Cost:
    shard = _lookups(distribution, kernel)

    def cost(hw: HardwareProfile, x: float) -> float:
        model, more = lookup_model(hw), replace(shard, draws=1000.0 * x, bags=1000.0 * x)
        return model.backward_ms(more) if backward else model.forward_ms(more)

    return cost


def _collective(op: str, world: int) -> Cost:
    topology = Topology.uniform(world, min(world, 8), hbm_bytes=1, ddr_bytes=1)
    return lambda hw, x: float(getattr(Collectives(hw, topology), op)(1000.0 * x, "world"))


MODELS: dict[str, Cost] = {
    "memory": lambda hw, x: float(memory_ms(hw, 1e4 * x)),
    "copy_h2d": lambda hw, x: float(copy_h2d_ms(hw, 1e4 * x)),
    "columns": lambda hw, x: float(columns_ms(hw, 1e4 * x)),
    "decode": lambda hw, x: float(decode_ms(hw, 1e4 * x)),
    "gemm_m": lambda hw, x: gemm_ms(hw, 16 * x, 512, 256, "fp32"),
    "gemm_n": lambda hw, x: gemm_ms(hw, 512, 16 * x, 256, "bf16"),
    "gemm_k": lambda hw, x: gemm_ms(hw, 512, 256, 16 * x, "tf32"),
    "batch_m": lambda hw, x: batched_ms(hw, 4, 16 * x, 512, 256, "tf32"),
    "batch_count": lambda hw, x: batched_ms(hw, 2 * x, 128, 128, 64, "bf16"),
    **{f"{op}_{world}": _collective(op, world) for op in OPS for world in (2, 8, 16, 64)},
    **{
        f"lookup_{kernel}_{i}_{'bwd' if backward else 'fwd'}": _by_draws(
            i, kernel, backward=backward
        )
        for kernel in ComputeKernel
        for i in range(len(DISTRIBUTIONS))
        for backward in (False, True)
    },
}


@pytest.mark.parametrize("name", list_hardware())
def test_finite_positive_and_never_falling(name: str) -> None:
    hw = load_hardware(name)
    for model, cost in MODELS.items():
        times = [cost(hw, x) for x in GROWTH]
        assert np.isfinite(times).all(), model
        assert min(times) > 0, model
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times)), model
        assert times[-1] < 1e5, model


@pytest.mark.parametrize("name", list_hardware())
def test_lookup_models_have_launches_and_floors(name: str) -> None:
    hw = load_hardware(name)
    model = lookup_model(hw)
    floors = (model.forward_floor_ms(), model.backward_floor_ms(), model.prefetch_floor_ms())
    assert all(0 <= floor < 1 for floor in floors)
    assert 1 <= hw.embedding.forward_kernels <= hw.embedding.backward_kernels


@pytest.mark.parametrize("name", list_hardware())
def test_row_splits_add_up_to_no_less_than_the_whole_streams(name: str) -> None:
    """Two halves of a table cost together no less than the rows they read demand."""
    hw = load_hardware(name)
    unsplit = replace(_lookups(0, ComputeKernel.FUSED), draws=1e5, bags=1e5)
    half = replace(unsplit, bins=unsplit.bins.scaled(0.5), rows=unsplit.rows // 2)
    assert half.ids == pytest.approx(unsplit.ids / 2)
    model = lookup_model(hw)
    for cost in (model.forward_ms, model.backward_ms):
        assert cost(half) <= cost(unsplit) <= 2 * cost(half) * 1.05
