"""Fitting curves: on made-up rows whose truth is known, and on the public tables where they lie."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.fit.links import gpu_fits, held_out_errors
from lab.validate.curves import (
    cube_mesh_rings,
    every_second,
    fit_rank_cost,
    has_cube_mesh,
    predict_ranks,
)
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from shardopt.calibrate.collectives import CollectiveRows, errors, fit_curve, predict_us
from shardopt.calibrate.fitting import mape
from tests.public_data import every_table


def synthetic(ranks: tuple[int, ...] = (8,)) -> CollectiveRows:
    """10 us + 5 us per doubling + 200 GB/s of bus bandwidth."""
    rows = []
    for n in ranks:
        for exponent in range(10, 31):
            size = 2.0**exponent
            time = 10 + 5 * np.log2(n) + size * (n - 1) / n / 200e3
            rows.append((size, float(n), float(time)))
    return CollectiveRows.of(rows)


def test_a_known_curve_is_found_again() -> None:
    rows = synthetic((2, 4, 8))
    curve = fit_curve(rows, "all_to_all")
    assert mape(errors(curve, rows, "all_to_all")) < 0.005
    assert curve.latency_us == pytest.approx(10, rel=0.1)
    assert curve.latency_per_doubling_us == pytest.approx(5, rel=0.1)
    assert 2**20 / curve.us_per_mib[-1] / 1e3 == pytest.approx(200, rel=0.02)


def test_a_given_latency_is_kept() -> None:
    assert fit_curve(synthetic(), "all_to_all", latency_us=3.0).latency_us == 3.0


def test_rank_cost_follows_bandwidth_that_jumps() -> None:
    rows = synthetic((2, 4, 8))
    slow = np.where(rows.ranks == 2, 3.0, 1.0)
    latency = 10 + 5 * np.log2(rows.ranks)
    jumping = CollectiveRows(rows.size_bytes, rows.ranks, latency + slow * (rows.time_us - latency))
    curve = fit_rank_cost(jumping, "all_to_all", 8)
    assert curve.rank_cost[8] == pytest.approx(1, rel=0.02)
    assert curve.rank_cost[2] == pytest.approx(3, rel=0.15)


@given(st.lists(st.floats(5, 1e5), min_size=6, max_size=20))
@settings(max_examples=50, deadline=None)
def test_whatever_the_rows_the_curve_never_falls(times: list[float]) -> None:
    rows = CollectiveRows.of([(2.0 ** (12 + i), 8.0, t) for i, t in enumerate(times)])
    curve = fit_curve(rows, "all_reduce")
    assert curve.latency_us >= 0
    assert min(curve.us_per_mib) >= 0


def test_every_second_size_is_held_out_per_rank_count() -> None:
    rows = synthetic((2, 8))
    chosen = every_second(rows)
    assert chosen.sum() == 22
    assert set(rows.size_bytes[chosen]).isdisjoint(rows.size_bytes[~chosen])


fits = cache(gpu_fits)
"""Fitted once for all that look at them."""
EVERY_SIZE = CollectiveRows.of([(2.0**k, n, 1.0) for k in range(2, 34) for n in (2, 4, 8)])


@every_table
def test_shipped_curves_are_those_of_the_tables(folder: Path) -> None:
    for name, fit in fits(folder).items():
        link = load_hardware(name).collectives.intra
        for op, curve in fit.curves.items():
            shipped = getattr(link, op)
            assert shipped.edge_mib == pytest.approx(curve.edge_mib, rel=1e-3)
            assert shipped.rank_cost == pytest.approx(curve.rank_cost, rel=1e-3)
            # where two bands go together, processors differ in which of them has the time
            times = (predict_us(one_curve, EVERY_SIZE, op) for one_curve in (shipped, curve))
            assert next(times) == pytest.approx(next(times), rel=1e-3)


# (all-to-all, the others) by size class: below 1 MiB, to 16 MiB, above
BARS = {
    "a100-80gb": ((0.08, 0.11, 0.06), (0.08, 0.14, 0.07)),
    "h100-sxm": ((0.12, 0.05, 0.08), (0.08, 0.12, 0.05)),
    "b200": ((0.07, 0.11, 0.06), (0.05, 0.15, 0.10)),
    "gb200": ((0.13, 0.15, 0.08), (0.08, 0.15, 0.13)),
}
"""A class may get three points worse than it was."""


@every_table
@pytest.mark.parametrize("name", BARS)
def test_sizes_left_out_of_the_curves_are_predicted(folder: Path, name: str) -> None:
    errors: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for op, rows, error in held_out_errors(folder, name):
        for size, off in zip(rows.size_bytes, np.abs(error), strict=True):
            errors[op != "all_to_all", bisect([2**20, 2**24], size)].append(float(off))
    for (across, size_class), errors_of in errors.items():
        assert np.mean(errors_of) < BARS[name][across][size_class], (across, size_class)


@every_table
def test_ranges_are_those_of_the_rows(folder: Path) -> None:
    fit = fits(folder)["h100-sxm"]
    assert fit.ranges == {"size_bytes": (512.0, 2.0**29), "ranks": (2.0, 8.0)}
    assert not fit.problems


def test_missing_tables_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not all rows behind v100-32gb are there"):
        gpu_fits(tmp_path)


def test_rings_of_the_cube_mesh() -> None:
    rings = [cube_mesh_rings(n) for n in range(2, 9)]
    assert rings == pytest.approx([1, 2, 4, 1.6, 2, 4, 6])


def wired(bandwidth: dict[int, float]) -> CollectiveRows:
    """5 us per doubling and a bus bandwidth in bytes per us for each rank count."""
    links = []
    for n, rate in bandwidth.items():
        for exponent in range(18, 31):
            size = 2.0**exponent
            bus = size * 2 * (n - 1) / n
            links.append((size, float(n), float(5 * np.log2(n) + bus / rate)))
    return CollectiveRows.of(links)


def test_rank_counts_between_those_of_a_switch() -> None:
    switch = wired(dict.fromkeys((2, 4, 8), 200e3))
    left_out = wired(dict.fromkeys((3, 6, 16), 200e3))
    predicted = predict_ranks(switch, left_out, "all_reduce", "a100")
    assert mape(predicted / left_out.time_us - 1) < 0.05


def test_rings_predict_what_no_interpolation_could() -> None:
    link = 22e3
    rings = wired({n: link * cube_mesh_rings(n) for n in (2, 4, 8)})
    left_out = wired({n: link * cube_mesh_rings(n) for n in (3, 5, 6, 7)})
    assert has_cube_mesh("V100 (vtrain)", rings.ranks)
    assert not has_cube_mesh("a100 (vtrain)", rings.ranks)
    predicted = predict_ranks(rings, left_out, "all_reduce", "v100")
    assert mape(predicted / left_out.time_us - 1) < 0.05
