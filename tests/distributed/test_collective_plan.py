"""Planning together when a rank fails or stays away."""

import json
from typing import Any

import pytest

pytest.importorskip("torchrec")

from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks met."""
    job = tmp_path_factory.mktemp("together")
    run_ranks("collective_plan_worker", job)
    return [json.loads((job / f"met.{rank}.json").read_text()) for rank in range(2)]


def test_without_a_group_the_way_to_one_is_named(met: list[dict[str, Any]]) -> None:
    assert "init_process_group" in met[0]["no group"]


def test_the_planning_ranks_error_reaches_all(met: list[dict[str, Any]]) -> None:
    """TorchRec leaves the others waiting for a plan."""
    for rank in met:
        assert rank["failed"].startswith("PlannerInputError")
        assert "no pooling factor is given for 1 feature" in rank["failed"]
    assert met[0]["failed"] == met[1]["failed"]


def test_the_first_rank_searches_far_less_than_the_others_wait(met: list[dict[str, Any]]) -> None:
    assert met[0]["seconds"] == "[0.5, 0.1, 0.5]", "a quarter of the group's 2 s"


def test_a_rank_that_stays_away_is_named_after_the_timeout(met: list[dict[str, Any]]) -> None:
    words = met[0]["missing"]
    assert words.startswith("PlannerError: some ranks did not call collective_plan")
    assert "1" in words.split(";")[0]
    assert "init_process_group a longer timeout" in words
