"""Rank counts that were not measured."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.fit.collectives import CollectiveRows, mape
from predictor.fit.rank_counts import cube_mesh_rings, has_cube_mesh, predict_ranks


def test_rings_of_the_cube_mesh() -> None:
    rings = [cube_mesh_rings(n) for n in range(2, 9)]
    assert rings == pytest.approx([1, 2, 4, 1.6, 2, 4, 6])


def rows(bandwidth: dict[int, float]) -> CollectiveRows:
    """5 us per doubling and a bus bandwidth in bytes per us for each rank count."""
    found = []
    for n, rate in bandwidth.items():
        for exponent in range(18, 31):
            size = 2.0**exponent
            bus = size * 2 * (n - 1) / n
            found.append((size, float(n), float(5 * np.log2(n) + bus / rate)))
    return CollectiveRows.of(found)


def test_rank_counts_between_those_of_a_switch() -> None:
    known = rows(dict.fromkeys((2, 4, 8), 200e3))
    left_out = rows(dict.fromkeys((3, 6, 16), 200e3))
    predicted = predict_ranks(known, left_out, "all_reduce", "a100")
    assert mape(predicted / left_out.time_us - 1) < 0.05


def test_rings_predict_what_no_interpolation_could() -> None:
    link = 22e3
    known = rows({n: link * cube_mesh_rings(n) for n in (2, 4, 8)})
    left_out = rows({n: link * cube_mesh_rings(n) for n in (3, 5, 6, 7)})
    assert has_cube_mesh("V100 (vtrain)", known.ranks)
    assert not has_cube_mesh("a100 (vtrain)", known.ranks)
    predicted = predict_ranks(known, left_out, "all_reduce", "v100")
    assert mape(predicted / left_out.time_us - 1) < 0.05
