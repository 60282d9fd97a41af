"""Bytes of real CPU ranks against the predicted peak."""

from __future__ import annotations

import pytest

from lab.tools.rank_memory import RANKS, cases, measured_bytes, predicted_bytes

NAMES = ("concat row_wise sparse_dist", "concat column_wise sparse_dist", "concat mixed base")
MOST = 0.08
"""What docs/decisions/0053 states."""


def test_every_case_has_a_plan_and_a_prediction() -> None:
    found = [predicted_bytes(case) for case in cases()]
    assert all(len(ranks) == RANKS and min(ranks) > 0 for ranks in found)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_ranks_take_what_is_predicted(name: str) -> None:
    (case,) = (case for case in cases() if case.name == name)
    for measured, predicted in zip(measured_bytes(case), predicted_bytes(case), strict=True):
        assert predicted == pytest.approx(measured, rel=MOST)
