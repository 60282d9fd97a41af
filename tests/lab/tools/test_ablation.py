"""The ablation of the searchers: rows are kept, and the page counts what is worse without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.planners.instances import Instance
from lab.tools import ablation
from lab.tools.ablation import ALL, ROWS, AblationRow, page, run
from search.propose.searchers import SEARCHERS
from shardopt.measure.store import RowsFile

INSTANCES = [Instance(4, 2, seed, 0.4) for seed in (1, 2)]
TIMES = {ALL: 10.0, "rounding": 11.0, "cpsat": 10.0, "optuna": 9.0}


def _found(instance: Instance, without: str, code: str) -> AblationRow:
    return AblationRow(instance.name, without, 1.5, TIMES[without], code)


def test_what_is_known_is_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def search(instance: Instance, without: str, code: str) -> AblationRow:
        asked.append(without)
        return _found(instance, without, code)

    monkeypatch.setattr(ablation, "_search", search)
    path = tmp_path / "rows.csv"
    first = list(run(INSTANCES[:1], RowsFile(path, ROWS)))
    assert asked == [ALL, *SEARCHERS]
    assert list(run(INSTANCES[:1], RowsFile(path, ROWS))) == first
    assert len(asked) == len(first)
    # rows of other code are
    old = RowsFile(tmp_path / "old.csv", ROWS)
    old.append(replace(first[0], sources="other", iteration_ms=1.0))
    assert list(run(INSTANCES[:1], old)) == first


def test_the_page_counts_plans_that_are_slower_without_a_searcher() -> None:
    rows = [_found(i, without, "") for i in INSTANCES for without in (ALL, *SEARCHERS)]
    lines = page(rows).splitlines()
    assert "| 4x2-fill40-2 | 10.000 | 1.5 | +10.0% | 1.5 | +0.0% | 1.5 | -10.0% | 1.5 |" in lines
    assert "| rounding | 0 | 0 | 2 | +10.0% | +10.0% | +10.0% |" in lines
    assert "| cpsat | 0 | 2 | 0 | +0.0% | +0.0% | +0.0% |" in lines
    assert "| optuna | 2 | 0 | 0 | -10.0% | -10.0% | -10.0% |" in lines


@pytest.mark.slow
def test_a_small_instance_is_searched_with_and_without(tmp_path: Path) -> None:
    rows = list(run([Instance(3, 2, 5, 0.3)], RowsFile(tmp_path / "rows.csv", ROWS)))
    assert [row.without for row in rows] == [ALL, *SEARCHERS]
    assert min(row.iteration_ms for row in rows) > 0
