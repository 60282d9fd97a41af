"""Which points are measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.cost.collectives import OPS
from shardopt.calibrate import Group, families, lookups, products
from shardopt.calibrate import points as design
from shardopt.calibrate.collectives import collective_points
from shardopt.calibrate.points import BRIEF, QUICK, TINY, Device, Point
from shardopt.calibrate.products import BATCH_LAYOUTS, GPU_DTYPES
from shardopt.calibrate.rows import key_of
from shardopt.config.model import load_model

pytest.importorskip("scipy")


MODELS = Path(__file__).parents[3] / "configs" / "models"
LARGE = Device(80 * 2**30, 1024 * 2**30)
SMALL = Device(8 * 2**30, 32 * 2**30)


@pytest.mark.parametrize("gpu", [None, LARGE])
def test_no_point_is_there_twice_and_quick_ones_are_of_the_full_design(gpu: Device | None) -> None:
    points = families.alone(design.FULL, gpu=gpu) + families.together(design.FULL, 2)
    full = {key_of(point): point for point in points}
    assert len(full) == len(points)
    quick = families.alone(QUICK, gpu=gpu)
    assert quick == families.alone(QUICK, gpu=gpu)
    for point in quick:
        assert full[key_of(point)].test == point.test


@pytest.mark.parametrize("gpu", [None, LARGE])
def test_families_alternate_so_that_half_of_the_points_have_half_of_each(
    gpu: Device | None,
) -> None:
    points = [p for p in families.alone(QUICK, gpu=gpu) if p.family not in ("clock", "host")]
    half = points[: len(points) // 2]
    for family in {point.family for point in points}:
        count = sum(point.family == family for point in points)
        assert abs(sum(p.family == family for p in half) - count / 2) <= 0.15 * count + 1, family


@pytest.mark.parametrize(
    ("family", "most_ids", "most_bytes"),
    [
        ("lookup", lookups.MAX_IDS, lookups.MAX_TABLE_BYTES),
        ("lookup_dense", lookups.MAX_IDS, lookups.MAX_DENSE_BYTES),
        ("lookup_unpooled", lookups.MAX_UNPOOLED_IDS, np.inf),
    ],
)
def test_lookups_stay_inside_what_can_be_measured(
    family: str, most_ids: int, most_bytes: float
) -> None:
    points = [p for p in families.alone(design.FULL) if p.family == family]
    for point in points:
        tables = point.params["tables"]
        assert sum(t["rows"] * t["dim"] * 4 for t in tables) <= 1.01 * most_bytes
        assert point.params["batch"] * sum(t["pooling"] for t in tables) < 1.2 * most_ids
        assert all(t["rows"] >= 1 and t["pooling"] > 0 for t in tables)
        assert family != "lookup_unpooled" or len({t["dim"] for t in tables}) == 1
    dims = lookups.UNPOOLED_DIMS if family == "lookup_unpooled" else lookups.DIMS
    assert {t["dim"] for p in points for t in p.params["tables"]} == set(dims)
    counts = {len(p.params["tables"]) for p in points}
    assert min(counts) == 1
    assert max(counts) == (lookups.TABLES[1] if family == "lookup" else max(counts)) > 3


def test_a_quarter_of_the_tables_has_no_skew_and_several_are_in_fit_and_test() -> None:
    points = lookups.lookup_points(design.FULL.lookups)
    uniform = [t["alpha"] == 0 for p in points for t in p.params["tables"]]
    assert 0.15 < np.mean(uniform) < 0.4
    for is_test in (False, True):
        assert {len(p.params["tables"]) > 1 for p in points if p.test == is_test} == {False, True}


@pytest.mark.parametrize("gpu", [None, LARGE])
def test_every_family_has_fit_and_test_points(gpu: Device | None) -> None:
    points = families.alone(design.QUICK, gpu=gpu) + families.together(design.QUICK, 2)
    kinds = {p.family for p in points} - {"reference", "iteration", "clock", "host", "layers"}
    for family in kinds - {"lookup_variant"}:
        held_out = [p.test for p in points if p.family == family]
        assert 0.1 < np.mean(held_out) < 0.6, family
    for dtype in GPU_DTYPES if gpu else ("fp32", "bf16"):
        held_out = [p.test for p in points if p.params.get("dtype") == dtype and p.family == "gemm"]
        assert set(held_out) == {False, True}, dtype
    layouts = {p.params["layout"] for p in points if p.family == "product"}
    assert layouts == (set() if gpu else set(BATCH_LAYOUTS))


def test_largest_and_smallest_messages_are_fitted() -> None:
    points = [p for p in collective_points(design.QUICK, 2) if not p.test]
    low, high = design.QUICK.collective_octaves
    for op in OPS:
        sizes = [p.params["bytes"] for p in points if p.params["op"] == op]
        assert (min(sizes), max(sizes)) == (2**low, 2**high)


def test_reference_kernels_lie_around_the_collectives() -> None:
    order = [p.family for p in families.together(design.QUICK, 2)]
    runs = [family for i, family in enumerate(order) if i == 0 or order[i - 1] != family]
    assert runs == ["reference", "collective"] * 2 + ["reference", "iteration"]
    assert set(order) == set(design.TOGETHER)
    assert {p.family for p in families.alone(design.QUICK)}.isdisjoint(design.TOGETHER)


@pytest.mark.parametrize("gpu", [None, LARGE])
def test_a_group_takes_its_own_points_and_no_others(gpu: Device | None) -> None:
    points = [*families.alone(TINY, gpu=gpu), *families.together(TINY, 2)]
    every = {point.family for point in points}
    assert all(families.needs(None, family) for family in every)
    # kernels of a GPU are timed by its clock, whichever they are
    for group in (Group.EMBEDDING, Group.GEMM):
        assert families.needs(group, "clock")
    every -= {"clock"}
    needed = [family for group in Group for family in every if families.needs(group, family)]
    assert len(needed) == len(set(needed)) < len(every)
    for group in Group:
        assert any(families.needs(group, family) for family in every), group


def test_the_host_alone_is_brief() -> None:
    points = [*families.alone(BRIEF, gpu=LARGE), *families.together(BRIEF, 2)]
    of_host = {p.family for p in points if families.needs(Group.HOST, p.family)}
    assert of_host == {"host", "iteration"}
    assert BRIEF.iteration_rounds < QUICK.iteration_rounds


def test_one_rank_has_a_host_and_no_partner() -> None:
    assert {point.family for point in families.together(QUICK, 1)} == {"iteration"}


@pytest.mark.parametrize("dense", ["fp32", "tf32", "bf16"])
def test_products_of_a_model_are_measured_before_others(dense: str) -> None:
    """Every layer's, forward and both gradients, in the type that it computes in."""
    model = load_model(MODELS / "dlrm_criteo_kaggle.yaml")
    model = replace(model, dense=replace(model.dense, data_type=dense))
    points = [p for p in families.alone(QUICK, model, gpu=LARGE) if p.family == "gemm"]
    own = products.model_points(model)
    assert points[: len(own)] == own
    assert {p.params["dtype"] for p in own} == {dense}
    assert len({key_of(p) for p in own}) == len(own)
    shapes = {(p.params["m"], p.params["n"], p.params["k"]) for p in own}
    wide, out = model.dense.in_features, model.dense.bottom_mlp[0]
    assert {(model.batch_size, out, wide), (out, wide, model.batch_size)} & shapes
    assert 0.3 < np.mean([p.test for p in own]) < 0.7
    assert not [p for p in families.alone(QUICK, model) if p in own], "a CPU's are not"


def gpu_lookups(device: Device = LARGE) -> list[Point]:
    return [p for p in families.alone(design.FULL, gpu=device) if p.family.startswith("lookup")]


@pytest.mark.parametrize("device", [LARGE, SMALL])
def test_lookups_fit_the_device(device: Device) -> None:
    for point in gpu_lookups(device):
        p = point.params
        each = (2 if p["dtype"] == "fp16" else 4) + (8 if p["optimizer"] == "adam" else 0)
        size = each * sum(t["rows"] * t["dim"] for t in p["tables"])
        most = lookups.MEMORY_SHARE * device.memory_bytes
        assert size <= 1.01 * (lookups.UVM_SHARE * device.host_bytes if "kernel" in p else most)
        ids = p["batch"] * sum(t["pooling"] for t in p["tables"])
        # pooling factors are not below 0.1
        assert ids <= max(1.01 * lookups.MAX_GPU_IDS, 0.11 * p["batch"] * len(p["tables"]))


def test_everything_that_a_constant_answers_to_varies() -> None:
    points = gpu_lookups()
    plain = [p.params for p in points if "kernel" not in p.params]
    assert {len(p["tables"]) for p in plain} == set(lookups.GPU_TABLES)
    assert {p["optimizer"] for p in plain} == set(lookups.GPU_OPTIMIZERS)
    assert {p["dtype"] for p in plain} == {"fp32", "fp16"}
    assert {t["dim"] for p in plain for t in p["tables"]} == set(lookups.GPU_DIMS)
    assert {t["alpha"] for p in plain for t in p["tables"]} == set(lookups.GPU_ALPHAS)
    assert {p.params.get("kernel", "fused") for p in points} == {
        *("fused", "fused_uvm", "fused_uvm_caching")
    }
    loads = {p.params["cache_load_factor"] for p in points if p.family == "lookup_cached"}
    assert loads == set(lookups.CACHED)
    batches = [p["batch"] for p in plain]
    assert min(batches) < 700
    assert max(batches) > 50_000


@pytest.mark.parametrize("kind", ["optimizer", "dtype", "tables", "alpha"])
def test_no_kind_goes_with_the_size_of_the_batch(kind: str) -> None:
    """Sizes follow from the bits of a point's number; what else did would be told apart by none."""
    plain = [p.params for p in gpu_lookups() if "kernel" not in p.params]

    def of(p: dict[str, object]) -> object:
        tables = p["tables"]
        assert isinstance(tables, list)
        values = {"tables": len(tables), "alpha": tables[0]["alpha"]}
        return values.get(kind, p.get(kind))

    overall = np.mean([np.log(p["batch"]) for p in plain])
    for value in {of(p) for p in plain}:
        mean = np.mean([np.log(p["batch"]) for p in plain if of(p) == value])
        assert mean == pytest.approx(overall, abs=0.35), value


def test_ranks_on_several_hosts_measure_both_links() -> None:
    points = families.together(design.QUICK, ranks=8, hosts=2)
    collectives = [p for p in points if p.family == "collective"]
    assert {(p.params["ranks"], p.params.get("hosts", 1)) for p in collectives} == {(8, 2), (4, 1)}
    alone = families.together(design.QUICK, ranks=2, hosts=2)
    assert {p.params["hosts"] for p in alone if p.family == "collective"} == {2}
