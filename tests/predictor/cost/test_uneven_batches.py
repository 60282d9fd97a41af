"""Batches of unlike length: against drawn batches, and what must not change anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.uneven_batches import SampleLengths, sample_lengths
from predictor.hardware.loader import load_hardware
from predictor.model.dense_settings import LengthShares
from predictor.model.plan import TablePlan
from predictor.model.workload import DenseTimes, Feature, MeasuredDense, Table, Workload
from predictor.predict import WAITING, Prediction, predict
from predictor.units import MIB
from tests.builders import a_topology, a_workload, data_parallel, plan_of, table_wise
from tests.quick import quick_first

SHARES = LengthShares(0.4, 0.5)
DENSE = MeasuredDense(DenseTimes(32, 30.0, 60.0, 1.0, 10**7 / MIB), length_shares=SHARES)


def sequence(name: str, deviation: float | None = 80.0, **more: object) -> Table:
    feature = Feature(name, 100.0, pooling_factor_std=deviation, **more)  # type: ignore[arg-type]
    return Table(name, 10_000, 64, (feature,), pooling="none")


def predicted(workload: Workload, ranks: int = 8, *, copied: bool = False) -> Prediction:
    topology = a_topology(ranks)
    plans: list[TablePlan] = [
        data_parallel(t, ranks) if copied else table_wise(t, i % ranks)
        for i, t in enumerate(workload.tables)
    ]
    hardware = load_hardware("h100-sxm")
    return predict(workload, topology, hardware, plan_of(workload, topology, plans))


def drawn(lengths: SampleLengths, size: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if lengths.most is None:
        return rng.gamma(lengths.mean**2 / lengths.variance, lengths.variance / lengths.mean, size)
    share = lengths.mean / lengths.most
    both = share * (1 - share) * lengths.most**2 / lengths.variance - 1
    return lengths.most * rng.beta(share * both, (1 - share) * both, size)


@pytest.mark.parametrize("ranks", quick_first(2, [2, 8, 32]))
@pytest.mark.parametrize("shares", [(0.9, 0.0), (0.0, 0.9), (0.4, 0.5)])
@pytest.mark.parametrize(
    "lengths",
    [
        SampleLengths(100.0, 50.0**2),
        SampleLengths(868.0, 1551.0**2, 4096.0),
        SampleLengths(2048.0, 1182.0**2, 4096.0),
    ],
)
def test_the_longest_batch_is_that_of_drawn_ones(
    ranks: int, shares: tuple[float, float], lengths: SampleLengths
) -> None:
    """Batches of 32 samples, by the work that grows with ids and with their square."""
    ids = drawn(lengths, (4000, ranks, 32), ranks)
    linear, square = shares
    work = 1 - linear - square + linear * ids.mean(-1) / ids.mean()
    work += square * (ids**2).mean(-1) / (ids**2).mean()
    longest = work.max(axis=1).mean() - 1
    assert lengths.excess(linear, square, 32, ranks) == pytest.approx(longest, rel=0.08)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
def test_features_that_go_together_add_up(correlation: float) -> None:
    """Four features whose lengths share a part that is the sample's own."""
    tables = [sequence(f"t{i}", length_correlation=correlation) for i in range(4)]
    lengths = sample_lengths(a_workload(*tables))
    assert lengths is not None
    rng = np.random.default_rng(0)
    own = rng.standard_normal((4, 200_000)) * np.sqrt(1 - correlation**2)
    total = (80 * (correlation * rng.standard_normal(200_000) + own)).sum(axis=0)
    assert lengths.mean == 400
    assert np.sqrt(lengths.variance) == pytest.approx(total.std(), rel=0.02)


@pytest.mark.parametrize("deviation", [None, 0.0])
def test_samples_that_are_alike_change_nothing(deviation: float | None) -> None:
    tables = (sequence("a", deviation), sequence("b", deviation))
    plain = a_workload(*tables, batch_size=32, dense=replace(DENSE, length_shares=None))
    same = replace(plain, dense=DENSE)
    assert predicted(same).iteration_ms == predicted(plain).iteration_ms
    assert WAITING not in predicted(same).breakdown


def test_waiting_is_a_part_of_the_breakdown_that_balancing_takes_away() -> None:
    even = predicted(a_workload(sequence("a", None), batch_size=32, dense=DENSE))
    workload = a_workload(sequence("a"), batch_size=32, dense=DENSE)
    uneven = predicted(workload)
    lengths = sample_lengths(workload)
    assert lengths is not None
    share = lengths.excess(SHARES.linear, SHARES.square, 32, 8)
    assert uneven.breakdown[WAITING] == pytest.approx(90.0 * share, rel=0.02)
    assert sum(uneven.breakdown.values()) == pytest.approx(uneven.iteration_ms)
    assert uneven.iteration_ms == pytest.approx(even.iteration_ms + uneven.breakdown[WAITING])
    balanced = predicted(replace(workload, balance_batches=True))
    assert balanced.iteration_ms == pytest.approx(even.iteration_ms)
    assert WAITING not in balanced.breakdown


@pytest.mark.parametrize(("ranks", "batch"), [(2, 32), (8, 32), (8, 512)])
def test_more_ranks_wait_longer_and_larger_batches_less(ranks: int, batch: int) -> None:
    dense = DENSE.at_batch_size(batch)
    here, more_ranks, larger = (
        predicted(a_workload(sequence("a"), batch_size=size, dense=dense), world)
        for size, world in ((batch, ranks), (batch, 2 * ranks), (4 * batch, ranks))
    )
    share = [
        prediction.breakdown[WAITING] / prediction.iteration_ms
        for prediction in (here, more_ranks, larger)
    ]
    assert share[1] > share[0] > share[2]


def test_copied_tables_wait_for_ids_that_go_together() -> None:
    """Forty pooled features of one user: lookups of a rank's own samples vary together."""

    def waiting(correlation: float, *, balanced: bool = False) -> float:
        tables = [
            replace(sequence(f"t{i}", 150.0, length_correlation=correlation), pooling="sum")
            for i in range(40)
        ]
        workload = a_workload(*tables, batch_size=64, balance_batches=balanced)
        ops = predicted(workload, copied=True).graph.ops
        return sum(op.waiting_on(0) for op in ops)

    assert waiting(1.0) > 1.5 * waiting(0.0) > 0
    assert waiting(1.0, balanced=True) == 0


def test_the_dense_part_says_how_it_grows() -> None:
    """Sequences that a DLRM sums are work that grows with their ids; pooled embeddings are not."""

    def uneven(table: Table) -> float:
        workload = a_workload(table, batch_size=32)
        return FixedCosts(workload, a_topology(8), load_hardware("h100-sxm")).uneven

    assert 0 < uneven(sequence("a")) < 0.1
    assert uneven(replace(sequence("a"), pooling="sum")) == 0
