"""Waiting for the longest batch is said where no plan gains as much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.hardware.loader import load_hardware
from predictor.model.dense_settings import LengthShares
from predictor.model.workload import DenseTimes, Feature, MeasuredDense, Workload
from predictor.predict import WAITING
from predictor.predict import predict as predict_plan
from search.tune.knobs import Case, steps
from shardopt.explain.uneven import DECIDES, uneven_words
from tests.builders import a_table, a_topology, a_workload, in_turns


def histories(deviation: float | None) -> Workload:
    feature = Feature("f", 100.0, pooling_factor_std=deviation)
    shares = LengthShares(0.5, 0.4)
    dense = MeasuredDense(DenseTimes(32, 30.0, 60.0, 1.0, 0.0), length_shares=shares)
    return a_workload(a_table(features=(feature,), pooling="none"), batch_size=32, dense=dense)


@pytest.mark.parametrize("deviation", [None, 100.0])
def test_it_is_said_where_other_plans_gain_less(deviation: float | None) -> None:
    workload, topology = histories(deviation), a_topology(8)
    plan = in_turns(workload, topology)
    prediction = predict_plan(workload, topology, load_hardware("h100-sxm"), plan)
    share = prediction.breakdown.get(WAITING, 0.0) / prediction.iteration_ms
    assert (share > DECIDES) is (deviation is not None)
    assert (uneven_words(prediction, 0.0) is not None) is (deviation is not None)
    assert uneven_words(prediction, 2 * share) is None
    assert uneven_words(prediction, None) is None


@pytest.mark.parametrize(("deviation", "balanced"), [(None, False), (100.0, False), (100.0, True)])
def test_balancing_is_tried_where_batches_are_uneven(
    deviation: float | None, balanced: bool
) -> None:
    workload = replace(histories(deviation), balance_batches=balanced)
    case = Case(workload, a_topology(8), load_hardware("h100-sxm"))
    balancing = [step for step in steps(case) if step.name == "balance_batches"]
    assert bool(balancing) is (deviation is not None and not balanced)
    assert all(step.turn(case).workload.balance_batches for step in balancing)
