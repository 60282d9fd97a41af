"""Draws of cost errors: sizes from profiles, repeatable, independent by name, in pairs."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.cost.errors import (
    KERNEL_ERROR,
    LEARNED_ERROR,
    CostErrors,
    ErrorSize,
    FactorErrors,
    known_errors,
)
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ComputeKernel, Shard, ShardingType, TablePlan
from tests.search.problems import hosts

SIZES = {"embedding": ErrorSize(0.1, 0.07), "gemm": ErrorSize(0.2, 0.1)}
TW, CW = (
    TablePlan(kind, ComputeKernel.FUSED, (Shard(0, (0, 0), (100, 64)),))
    for kind in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
)


def test_sizes_come_from_the_profile() -> None:
    hardware = load_hardware("cpu-gloo")
    sizes = known_errors(hardware, hosts(2))
    assert set(sizes) >= {"embedding", "gemm", "memory", "elementwise", "overheads", "collectives"}
    embedding = hardware.embedding
    assert sizes["embedding"].shared == embedding.rel_error
    assert embedding.provenance.error is not None
    assert sizes["embedding"].own == pytest.approx(
        1.2533 * embedding.provenance.error.mean, rel=1e-3
    )
    derived = known_errors(load_hardware("h100-sxm"), hosts(2))
    assert derived["embedding"].own == KERNEL_ERROR


def test_a_factor_depends_on_seed_and_name_alone() -> None:
    first, second = CostErrors(SIZES, 8, 5), CostErrors(SIZES, 8, 5)
    second.op("gemm", "another")
    assert (first.op("gemm", "top 0") == second.op("gemm", "top 0")).all()
    assert (first.op("gemm", "top 0") != CostErrors(SIZES, 8, 6).op("gemm", "top 0")).all()
    assert (first.op("gemm", "top 0") != first.op("gemm", "top 1")).all()


def test_draws_come_in_pairs_around_one() -> None:
    errors = CostErrors(SIZES, 10, 0)
    for factor in (errors.shared("gemm"), errors.op("gemm", "x"), *errors.lookup(3, TW)):
        assert factor[:5] * factor[5:] == pytest.approx(np.ones(5))


def test_spread_and_correlation_are_as_stated() -> None:
    errors = CostErrors(SIZES, 20_000, 1)
    table_wise, columns = (np.log(errors.lookup(0, kind)) for kind in (TW, CW))
    assert table_wise.std(axis=1) == pytest.approx(0.07, rel=0.05)
    assert np.corrcoef(table_wise[0], columns[0])[0, 1] == pytest.approx(0.5, abs=0.03)
    assert abs(np.corrcoef(table_wise[0], table_wise[1])[0, 1]) < 0.03
    assert abs(np.corrcoef(table_wise[0], np.log(errors.lookup(1, TW))[0])[0, 1]) < 0.03
    layer = np.log(errors.op("gemm", "top 0"))
    assert layer.std() == pytest.approx(np.hypot(0.2, 0.1), rel=0.05)
    assert np.corrcoef(layer, np.log(errors.shared("gemm")))[0, 1] == pytest.approx(0.894, abs=0.02)


def test_draws_of_learned_factors_keep_their_correlations() -> None:
    """Two factors share a measured time: their product is known better than each of them."""
    root = np.array([[0.30, 0.0], [-0.29, 0.05], [0.0, 0.0], [0.0, 0.0]])
    names = ("exchanges", "exchanges.ids", "exchanges.latency", "exchanges.bytes")
    factor_errors = FactorErrors(
        at={name: i for i, name in enumerate(names)},
        root=np.pad(root, ((0, 0), (0, 2))),
        prior=lambda name: 0.25,
        measured=frozenset({"exchanges.ids"}),
        tables=(),
    )
    sizes = {**SIZES, "collectives": ErrorSize(0.5, 0.5)}
    errors = CostErrors(sizes, 20_000, 1, factor_errors)

    def spread(kind: str) -> float:
        return float(np.log(errors.op("collectives", kind, kind=kind)).std())

    assert spread("exchanges.ids") == pytest.approx(
        np.hypot(np.hypot(0.01, 0.05), LEARNED_ERROR), rel=0.05
    )
    unseen = np.hypot(np.hypot(0.30, 0.25), KERNEL_ERROR)
    assert spread("exchanges.gradients") == pytest.approx(unseen, rel=0.05)
    # of lookups nothing was learned: what the profile states
    assert np.log(errors.lookup(0, TW)).std() == pytest.approx(0.07, rel=0.05)
