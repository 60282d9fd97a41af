"""Single ops of dense parts: which sizes are measured."""

import pytest

from shardopt.calibrate.design import dense_parts as design
from shardopt.calibrate.design.points import QUICK

pytest.importorskip("scipy")


def test_a_layer_is_three_products_of_the_same_sides() -> None:
    points = list(design.layer_points(QUICK.ops))
    for at in range(0, len(points), 3):
        sides = [sorted(p.params[key] for key in "mnk") for p in points[at : at + 3]]
        assert sides[0] == sides[1] == sides[2]
        assert [p.params["layout"] for p in points[at : at + 3]] == ["addmm", "nn", "tn"]
    assert any(p.params["n"] <= 16 for p in points if p.params["layout"] == "addmm")


def test_every_family_is_measured_and_held_out_in_part() -> None:
    points = design.dense_part_points(QUICK)
    families = {p.family for p in points}
    assert families == {
        *("product", "function", "attention", "concatenation", "lookup_unpooled", "layers"),
    }
    for family in families - {"layers"}:
        assert {p.test for p in points if p.family == family} == {True, False}
    assert {p.params["layout"] for p in design.batch_points(QUICK.ops)} == {
        "nn",
        "nt",
        "tn",
        "outer",
    }


def test_one_launch_without_pooling_has_tables_of_one_width() -> None:
    for point in design.unpooled_points(2 * QUICK.ops):
        tables = point.params["tables"]
        assert len({t["dim"] for t in tables}) == 1
        ids = point.params["batch"] * sum(t["pooling"] for t in tables)
        assert ids < 1.2 * design.MAX_UNPOOLED_IDS
