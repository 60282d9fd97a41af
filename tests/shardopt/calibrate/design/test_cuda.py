"""Which points are measured on a GPU."""

import numpy as np
import pytest

from shardopt.calibrate.design import cuda, phases
from shardopt.calibrate.design import points as design
from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import key_of

pytest.importorskip("scipy")

LARGE = cuda.Device(80 * 2**30, 1024 * 2**30)
SMALL = cuda.Device(8 * 2**30, 32 * 2**30)


def lookups(device: cuda.Device = LARGE) -> list[Point]:
    return list(cuda.lookup_points(design.FULL.lookups, device))


def test_the_design_is_the_same_every_time_and_no_point_is_there_twice() -> None:
    points = cuda.kernel_points(design.FULL, LARGE)
    assert points == cuda.kernel_points(design.FULL, LARGE)
    keys = [key_of(point) for point in points]
    assert len(set(keys)) == len(keys)


def test_quick_points_are_the_first_of_the_full_design() -> None:
    full = {key_of(p): p for p in cuda.kernel_points(design.FULL, LARGE)}
    for point in cuda.kernel_points(design.QUICK, LARGE):
        assert full[key_of(point)].test == point.test


@pytest.mark.parametrize("device", [LARGE, SMALL])
def test_lookups_fit_the_device(device: cuda.Device) -> None:
    for point in lookups(device):
        p = point.params
        each = (2 if p["dtype"] == "fp16" else 4) + (8 if p["optimizer"] == "adam" else 0)
        size = each * sum(t["rows"] * t["dim"] for t in p["tables"])
        most = cuda.MEMORY_SHARE * device.memory_bytes
        assert size <= 1.01 * (cuda.UVM_SHARE * device.host_bytes if "kernel" in p else most)
        ids = p["batch"] * sum(t["pooling"] for t in p["tables"])
        # pooling factors are not below 0.1
        assert ids <= max(1.01 * cuda.MAX_IDS, 0.11 * p["batch"] * len(p["tables"]))


def test_everything_that_a_constant_answers_to_varies() -> None:
    points = lookups()
    plain = [p.params for p in points if "kernel" not in p.params]
    assert {len(p["tables"]) for p in plain} == set(cuda.TABLES)
    assert {p["optimizer"] for p in plain} == set(cuda.OPTIMIZERS)
    assert {p["dtype"] for p in plain} == {"fp32", "fp16"}
    assert {t["dim"] for p in plain for t in p["tables"]} == set(cuda.DIMS)
    assert {t["alpha"] for p in plain for t in p["tables"]} == set(cuda.ALPHAS)
    assert {p.params.get("kernel", "fused") for p in points} == {
        *("fused", "fused_uvm", "fused_uvm_caching")
    }
    loads = {p.params["cache_load_factor"] for p in points if p.family == "lookup_cached"}
    assert loads == set(cuda.CACHED)
    for key in ("batch",):
        values = np.log([p[key] for p in plain])
        assert values.min() < np.log(700)
        assert values.max() > np.log(50_000)


@pytest.mark.parametrize("kind", ["optimizer", "dtype", "tables", "alpha"])
def test_no_kind_goes_with_the_size_of_the_batch(kind: str) -> None:
    """Sizes follow from the bits of a point's number; what else did would be told apart by none."""
    plain = [p.params for p in lookups() if "kernel" not in p.params]

    def of(p: dict[str, object]) -> object:
        tables = p["tables"]
        assert isinstance(tables, list)
        found = {"tables": len(tables), "alpha": tables[0]["alpha"]}
        return found.get(kind, p.get(kind))

    overall = np.mean([np.log(p["batch"]) for p in plain])
    for value in {of(p) for p in plain}:
        mean = np.mean([np.log(p["batch"]) for p in plain if of(p) == value])
        assert mean == pytest.approx(overall, abs=0.35), value


def test_every_family_has_fit_and_test_points() -> None:
    points = phases.alone(design.QUICK, gpu=LARGE)
    for family in ("lookup", "lookup_cached", "gemm", "elementwise", "copy_h2d"):
        held = [p.test for p in points if p.family == family]
        assert 0.1 < np.mean(held) < 0.5, family
    for dtype in cuda.GEMM_DTYPES:
        held = [p.test for p in points if p.params.get("dtype") == dtype and p.family == "gemm"]
        assert set(held) == {False, True}, dtype


def test_ranks_on_several_hosts_measure_both_links() -> None:
    points = phases.together(design.QUICK, ranks=8, hosts=2)
    collectives = [p for p in points if p.family == "collective"]
    assert {(p.params["ranks"], p.params.get("hosts", 1)) for p in collectives} == {(8, 2), (4, 1)}
    alone = phases.together(design.QUICK, ranks=2, hosts=2)
    assert {p.params["hosts"] for p in alone if p.family == "collective"} == {2}
