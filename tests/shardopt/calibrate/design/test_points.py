"""Which points are measured."""

import numpy as np
import pytest

from shardopt.calibrate.design import ops, phases
from shardopt.calibrate.design import points as design
from shardopt.calibrate.rows import key_of

pytest.importorskip("scipy")


def test_the_design_is_the_same_every_time() -> None:
    assert phases.alone(design.QUICK) == phases.alone(design.QUICK)
    assert phases.together(design.QUICK, 2) == phases.together(design.QUICK, 2)


def test_no_point_is_there_twice() -> None:
    points = phases.alone(design.FULL) + phases.together(design.FULL, 2)
    keys = [key_of(point) for point in points]
    assert len(set(keys)) == len(keys)


def test_quick_points_are_the_first_of_the_full_design() -> None:
    full = {key_of(p): p for p in phases.alone(design.FULL)}
    for point in phases.alone(design.QUICK):
        assert full[key_of(point)].test == point.test


def test_lookups_stay_inside_what_can_be_measured() -> None:
    points = design.lookup_points(design.FULL.lookups)
    for point in points:
        tables = point.params["tables"]
        assert 1 <= len(tables) <= design.TABLES[1]
        assert sum(t["rows"] * t["dim"] * 4 for t in tables) <= 1.01 * design.MAX_TABLE_BYTES
        ids = point.params["batch"] * sum(t["pooling"] for t in tables)
        assert ids < 1.2 * design.MAX_IDS
        assert all(t["rows"] >= 1 and t["pooling"] > 0 for t in tables)
    assert {t["dim"] for p in points for t in p.params["tables"]} == set(design.DIMS)
    uniform = [t["alpha"] == 0 for p in points for t in p.params["tables"]]
    assert 0.15 < np.mean(uniform) < 0.4
    # one table and several, in the fit and in the test
    for held in (False, True):
        assert {len(p.params["tables"]) > 1 for p in points if p.test == held} >= {True}


def test_every_family_has_fit_and_test_points() -> None:
    points = phases.alone(design.QUICK) + phases.together(design.QUICK, 2)
    kinds = ("jagged", "pooled", "interaction", "optimizer", "lookup_dense")
    for family in ("lookup", "gemm", "elementwise", "collective", *kinds):
        held = [p.test for p in points if p.family == family]
        assert 0.15 < np.mean(held) < 0.6, family
    narrow = {p.test for p in points if p.params.get("dtype") == "bf16"}
    assert narrow == {False, True}


def test_dense_lookups_are_of_tables_that_ranks_copy() -> None:
    points = [p for p in phases.alone(design.FULL) if p.family == "lookup_dense"]
    for point in points:
        tables = point.params["tables"]
        assert sum(t["rows"] * t["dim"] * 4 for t in tables) <= 1.01 * ops.MAX_DENSE_BYTES
        assert point.params["batch"] * sum(t["pooling"] for t in tables) < 1.2 * design.MAX_IDS
    assert {len(p.params["tables"]) for p in points} == {1, 2, 3, 4}
    assert {t["dim"] for p in points for t in p.params["tables"]} == set(design.DIMS)


def test_largest_and_smallest_messages_are_fitted() -> None:
    points = [p for p in design.collective_points(design.QUICK, 2) if not p.test]
    low, high = design.QUICK.collective_octaves
    for op in design.COLLECTIVE_OPS:
        sizes = [p.params["bytes"] for p in points if p.params["op"] == op]
        assert (min(sizes), max(sizes)) == (2**low, 2**high)


def test_reference_kernels_lie_around_the_collectives() -> None:
    families = [p.family for p in phases.together(design.QUICK, 2)]
    runs = [family for i, family in enumerate(families) if i == 0 or families[i - 1] != family]
    assert runs == ["reference", "collective"] * 2 + ["reference", "iteration"]
    assert set(families) == set(phases.TOGETHER)
    assert {p.family for p in phases.alone(design.QUICK)}.isdisjoint(phases.TOGETHER)
