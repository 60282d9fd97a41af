"""Constants of small CPU kernels come back from rows of a machine that has them."""

from __future__ import annotations

import pytest

from predictor.cost.elementwise import columns_ms, memory_ms
from predictor.cost.gemm import batched_ms
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.design.ops import op_points
from shardopt.calibrate.design.points import QUICK, Point
from shardopt.calibrate.profile.small_ops import batched_products, copies, gathers
from shardopt.calibrate.rows import PASSES, Measurement, row_of_samples
from shardopt.measure.timing import Samples

pytest.importorskip("scipy")

POINTS = op_points(QUICK)
GB_S = 16.0
CALL_US = 7.0
"""What a row has beyond its data."""
PIECE_US = 0.3
"""Of each tensor that is joined or taken apart."""


def machine(**groups: dict[str, float]) -> HardwareProfile:
    """A CPU without floors; ``groups`` change constants of groups."""
    base = load_hardware("cpu-gloo")
    given = {
        "gemm": {"floor_us": 0.0, **groups.get("gemm", {})},
        "elementwise": {"floor_us": 0.0, **groups.get("elementwise", {})},
        "memory": {"hbm_gb_s": GB_S},
    }
    changed = {
        name: getattr(base, name).model_copy(update=update) for name, update in given.items()
    }
    return base.model_copy(update=changed)


def of(family: str, *ops: str) -> list[Point]:
    return [p for p in POINTS if p.family == family and p.params["op"] in ops]


def row(point: Point, time_us: float, part: str = "", **facts: object) -> Measurement:
    return row_of_samples(point, Samples((time_us * 1e-6,) * 3), part, **facts)


def pooled_rows(hw: HardwareProfile, nonsense: float = 1.0) -> list[Measurement]:
    """Every op of the family; ``nonsense`` scales those that copy no columns."""
    rows = []
    columns = {("forward", "cat"), ("backward", "split")}
    for point in of("pooled", "permute", "cat", "split"):
        pieces = len(point.params["dims"])
        size = 4 * point.params["batch"] * sum(point.params["dims"])
        # read and written, as the iteration graph counts them
        time = CALL_US + PIECE_US * pieces + 1e3 * float(columns_ms(hw, 2 * size))
        for part in PASSES:
            scale = 1.0 if (part, point.params["op"]) in columns else nonsense
            rows.append(row(point, time * scale, part, bytes=size, pieces=pieces))
    return rows


def moves(
    pooled: list[Measurement], jagged: list[Measurement], gb_s: float = GB_S
) -> dict[str, float]:
    return copies(pooled, jagged, gb_s, CALL_US)


@pytest.mark.parametrize("columns", [0.2, 0.45, 1.0])
def test_the_share_of_columns_is_that_which_predicts_the_rows(columns: float) -> None:
    hw = machine(elementwise={"columns": columns})
    assert moves(pooled_rows(hw), []) == {"columns": pytest.approx(columns, rel=1e-2)}


def test_only_copies_of_columns_count_and_none_is_faster_than_streaming() -> None:
    hw = machine(elementwise={"columns": 0.2})
    assert moves(pooled_rows(hw, 50.0), []) == moves(pooled_rows(hw), [])
    assert moves(pooled_rows(hw), [], 1e-3) == {"columns": 1.0}


def jagged_rows(each_ns: float, gb_s: float) -> list[Measurement]:
    rows = []
    for point in of("jagged", "bucketize", "permute"):
        p = point.params
        ids = p["features"] * p["batch"] * p["pooling"]
        # ids are read and written twice
        time = CALL_US + ids * (each_ns * 1e-3 + 4 * 8 / (gb_s * 1e3))
        rows.append(row(point, time if p["op"] == "bucketize" else 100 * time, ids=ids))
    return rows


@pytest.mark.parametrize("each_ns", [3.0, 12.0])
def test_sorting_an_id_costs_beyond_moving_it(each_ns: float) -> None:
    found = moves([], jagged_rows(each_ns, GB_S))
    assert found == {"bucketize_ns_per_id": pytest.approx(each_ns, rel=1e-2)}


def test_ids_that_move_faster_than_memory_cost_nothing_more() -> None:
    assert moves([], jagged_rows(0.0, 10 * GB_S)) == {"bucketize_ns_per_id": 0.0}


def bmm_rows(hw: HardwareProfile) -> list[Measurement]:
    """A product forward, two backward, of the shapes that the interaction has."""
    rows = []
    for point in of("interaction", "bmm"):
        batch, v, dim = shape(point)
        forward = batched_ms(hw, batch, v, v, dim, "fp32")
        # both operands are the same: two gradients are written, then added
        added = memory_ms(hw, 5 * 4 * batch * v * dim).item()
        backward = 2 * batched_ms(hw, batch, v, dim, v, "fp32") + added
        rows.append(row(point, CALL_US + 1e3 * forward, "forward"))
        rows.append(row(point, 2 * CALL_US + 1e3 * backward, "backward"))
    return rows


@pytest.mark.parametrize(("each_us", "share"), [(0.2, 0.5), (0.6, 0.15)])
def test_products_of_a_batch_run_one_by_one(each_us: float, share: float) -> None:
    hw = machine(gemm={"batched_us": each_us, "batched_share": share})
    found = batched_products(bmm_rows(hw), hw)
    assert found["batched_us"] == pytest.approx(each_us, rel=1e-2)
    assert found["batched_share"] == pytest.approx(share, rel=1e-2)


def test_a_rate_above_that_of_large_products_is_cut_to_it() -> None:
    quick, slow = (
        {"batched_us": 0.2, "batched_share": 0.5, "tflops": {"fp32": t}} for t in (1, 0.1)
    )
    found = batched_products(bmm_rows(machine(gemm=quick)), machine(gemm=slow))
    assert found["batched_share"] == 1.0


def dot_rows(bmm: list[Measurement], hw: HardwareProfile, each_ns: float) -> list[Measurement]:
    """The whole layer: its products, the vectors stacked, the pairs picked; both ways."""
    times = {(r.part, *shape(r.point)): r.median_us for r in bmm}
    rows = []
    for point in of("interaction", "dot"):
        batch, v, dim = shape(point)
        for part, ways in zip(PASSES, (1, 2), strict=True):
            picked = ways * batch * v * (v - 1) / 2
            beyond = columns_ms(hw, 2 * 4 * batch * v * dim) + memory_ms(hw, 2 * 4 * picked)
            # stacked, picked, joined to the dense vector
            time = 3 * CALL_US + 1e3 * float(beyond) + 1e-3 * each_ns * picked
            rows.append(row(point, times[part, batch, v, dim] + time, part))
    return rows


def shape(point: Point) -> tuple[int, int, int]:
    p = point.params
    return p["batch"], p["vectors"], p["dim"]


@pytest.mark.parametrize("each_ns", [1.5, 8.0])
def test_pairs_are_picked_beyond_products_and_stacking(each_ns: float) -> None:
    hw = machine(elementwise={"columns": 0.3})
    bmm = bmm_rows(hw)
    found = gathers([*bmm, *dot_rows(bmm, hw, each_ns)], hw, CALL_US)
    assert found == {"gather_ns_per_element": pytest.approx(each_ns, rel=1e-2)}


def test_a_layer_faster_than_its_parts_picks_for_nothing() -> None:
    hw = machine(elementwise={"columns": 0.3})
    bmm = bmm_rows(hw)
    slower = [row(r.point, 2 * r.median_us, r.part) for r in bmm]
    dots = dot_rows(bmm, hw, 0.0)
    assert gathers([*slower, *dots], hw, CALL_US) == {"gather_ns_per_element": 0.0}


def test_what_was_not_measured_is_not_found() -> None:
    hw = machine()
    bmm = bmm_rows(hw)
    assert moves([], []) == {}
    assert batched_products([], hw) == {}
    assert gathers(bmm, hw, CALL_US) == {}, "no whole layers"
    assert gathers(dot_rows(bmm, hw, 3.0), hw, CALL_US) == {}, "no products to take off"
