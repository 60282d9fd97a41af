"""Predictions beyond the measured rows behind their profile."""

from __future__ import annotations

from typing import Any

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.ranges import OutOfRange, ranks_outside
from predictor.model.workload import DenseArch, Feature, Table, Workload
from predictor.predict import predict
from tests.builders import a_topology, in_turns

H100 = load_hardware("h100-sxm")
ROWS, DIM = 10_000, 64


def workload(batch_size: int = 512) -> Workload:
    tables = tuple(Table(f"t{i}", ROWS, DIM, (Feature(f"f{i}", 4.0),)) for i in range(2))
    return Workload("two", batch_size, tables, DenseArch(13, (64, 64), (32, 1)))


def measured(group: str, **ranges: tuple[float, float]) -> HardwareProfile:
    """H100 with these ranges in one group, and none in the others."""

    def of(name: str, entry: Any) -> Any:
        ranged = ranges if name == group else {}
        return entry.model_copy(
            update={"provenance": entry.provenance.model_copy(update={"range": ranged})}
        )

    groups = {name: of(name, entry) for name, entry in H100.groups.items() if "." not in name}
    links = {
        name: of(f"collectives.{name}", getattr(H100.collectives, name))
        for name in ("intra", "inter")
    }
    wired = H100.collectives.model_copy(update=links)
    return H100.model_copy(update={**groups, "collectives": wired})


def found(hw: HardwareProfile, batch_size: int = 512, ranks: int = 2) -> tuple[OutOfRange, ...]:
    model, on = workload(batch_size), a_topology(ranks)
    return predict(model, on, hw, in_turns(model, on)).out_of_range


def test_nothing_is_said_of_groups_without_ranges() -> None:
    assert found(measured("memory")) == ()


@pytest.mark.parametrize(
    ("group", "quantity", "largest"),
    [
        ("gemm", "m", 512),
        ("gemm", "n", 64 + 3),
        ("gemm", "k", 512),
        ("gemm", "flop", 2 * 512 * 64 * 64),
        ("embedding", "dim", DIM),
        ("embedding", "rows", ROWS),
        ("embedding", "tables", 1),
        ("embedding", "ids", 4 * 512 * 2),
        # one table's outputs for the samples of both ranks
        ("collectives.intra", "size_bytes", 4 * DIM * 512 * 2),
    ],
)
def test_the_largest_asked_is_held_against_the_upper_end(
    group: str, quantity: str, largest: float
) -> None:
    (item,) = found(measured(group, **{quantity: (0.0, 0.5)}))
    assert (item.group, item.profile, item.quantity) == (group, "h100-sxm", quantity)
    assert (item.low, item.high) == (0.0, 0.5)
    assert item.asked == pytest.approx(largest)
    covered = measured(group, **{quantity: (item.asked * 0.5, item.asked)})
    assert found(covered) == ()
    # below the smallest row every law is a floor
    assert found(measured(group, **{quantity: (10 * item.asked, 20 * item.asked)})) == ()
    assert found(measured(group, **{quantity: (0, item.asked * 0.9)})) == (
        OutOfRange(group, "h100-sxm", quantity, item.asked, 0, item.asked * 0.9),
    )


def test_rank_counts_have_two_sides() -> None:
    hw = measured("collectives.intra", ranks=(4.0, 8.0))
    assert [item.asked for item in found(hw, ranks=2)] == [2]
    assert [item.asked for item in ranks_outside(hw, a_topology(16, 16))] == [16]
    assert ranks_outside(hw, a_topology(8)) == []
    assert ranks_outside(hw, a_topology(1)) == []
    between = measured("collectives.inter", ranks=(2.0, 16.0))
    assert [i.asked for i in ranks_outside(between, a_topology(32, 8))] == [32]
    assert ranks_outside(between, a_topology(8)) == []
