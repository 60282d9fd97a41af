"""Without a stage a search has no plans of it; instances run are not run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.pages.planners_page import benchmarks_text
from lab.planners import ablation
from lab.planners.ablation import ABLATION_ROWS, CHANGES, WHOLE, AblationRow, ablate
from lab.planners.instances import Instance
from shardopt.measure.store import read_rows

SMALL = Instance(tables=5, gpus=2, seed=1, fill=0.9)


@pytest.mark.slow
def test_every_stage_is_left_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, messages = tmp_path / "rows.csv", []
    ablated = ablate([SMALL], path, 0.05, messages.append)
    assert [row.without for row in ablated] == [*CHANGES]
    assert len(messages) == len(ablated)
    for row in ablated:
        assert row.bound_ms is not None
        assert row.bound_ms <= row.iteration_ms
    assert "annealing" not in {row.without: row for row in ablated}["annealing"].found_by

    stored = read_rows(path, ABLATION_ROWS)
    assert [(row.instance, row.without) for row in stored] == [(SMALL.name, n) for n in CHANGES]
    monkeypatch.setattr(ablation, "solve", None)  # nothing is run again
    assert ablate([SMALL], path, 0.05, messages.append) == stored


def test_the_page_says_what_is_lost() -> None:
    def rows(instance: str, lost: float) -> list[AblationRow]:
        complete = AblationRow(instance, WHOLE, 10.0, "annealing", 8.0, 1.0)
        slower = replace(complete, iteration_ms=10.0 * (1 + lost))
        return [complete, *(replace(slower, without=name) for name in CHANGES if name != WHOLE)]

    without = {"annealing": None}
    lost = [
        replace(row, iteration_ms=without.get(row.without, row.iteration_ms))
        for row in rows("x", 0.0)
    ]
    text = benchmarks_text([], [*rows("one", 0.0), *rows("two", 0.1), *lost])
    assert "| annealing | 5.00 % | 5.00 % | 10.00 % | two | 2 |" in text
    assert "| x | 10.00 | annealing | 25 % | no plan |" in text
    assert "## What each stage brings" not in benchmarks_text([])
