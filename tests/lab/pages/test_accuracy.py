"""The page and the files beside it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lab.pages.accuracy import SUMMARY, accuracy_text, write_accuracy
from lab.pages.scores import report_object
from lab.suites import SUITES, ComparedRow, Report, Scores, Suite, noise_of
from tests.public_data import FULL, ROOT, TRACES

ROWS = (
    ComparedRow({"gpu": "H100", "commit": "abc"}, 1.0, 1.1, "f"),
    ComparedRow({"gpu": "B200", "dim": 64}, 2.0, 2.2, "f", interval_ms=(1.9, 2.5), source="s"),
)


def test_rows_of_several_files_have_columns_of_their_own(tmp_path: Path) -> None:
    further = Scores(
        "by GPU", (("gpu", "text"), ("gain", "share")), (("H100", 0.5), ("B200", None))
    )
    noise = {"other dates": noise_of([(1, 1.0), (1, 1.1)])}
    report = Report("tbe", ROWS, "test", ("a row",), scores=(further,), noise=noise)
    write_accuracy(tmp_path / "accuracy.md", [report])
    folder = tmp_path / "accuracy"
    assert (folder / "tbe.csv").read_text().splitlines() == [
        "part,gpu,commit,dim,measured_ms,predicted_ms,low_ms,high_ms,error,source",
        "test,H100,abc,,1.0,1.1,,,0.1,",
        "test,B200,,64,2.0,2.2,1.9,2.5,0.1,s",
    ]
    assert (folder / "tbe-by-gpu.csv").read_text() == "gpu,gain\nH100,0.5\nB200,\n"
    summary = (folder / SUMMARY).read_text().splitlines()
    assert summary[1] == "tbe,test,1,2,0.1,0.1,0.1,1.0"
    assert summary[2].startswith("tbe,noise: other dates,0,2,")
    page = (tmp_path / "accuracy.md").read_text()
    assert "| test * | 2 | 10.0 % | 10.0 % | 10.0 % | 100.0 % |" in page
    assert (
        "2 rows (1 left out): [rows](accuracy/tbe.csv), [by-gpu](accuracy/tbe-by-gpu.csv)" in page
    )


def test_a_suite_that_is_run_alone_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    table = Scores("by GPU", (("gpu", "text"),), (("H100",),))
    write_accuracy(
        page, [Report("tbe", ROWS, "test", scores=(table,)), Report("gemm", ROWS, "test")]
    )
    before = page.read_text()
    assert "(accuracy/tbe-by-gpu.csv)" in before
    write_accuracy(page, [Report("tbe", ROWS[:1], "test")])
    folder = tmp_path / "accuracy"
    assert not (folder / "tbe-by-gpu.csv").exists(), "the suite no longer has this table"
    text = page.read_text()
    assert text == accuracy_text(folder)
    assert text.partition("## gemm")[2] == before.partition("## gemm")[2]
    assert "1 rows (0 left out)" in text.partition("## gemm")[0]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_the_figures_are_those_that_the_suite_gives(suite: Suite) -> None:
    if not (suite.committed or TRACES.is_dir()):
        pytest.skip("the public data is not here")
    parts = report_object(suite.run(None if suite.committed else FULL))["parts"]
    with (ROOT / "docs" / "accuracy" / SUMMARY).open(newline="") as file:
        committed = {r["part"]: r for r in csv.DictReader(file) if r["suite"] == suite.name}
    for name, figures in parts.items():
        assert int(committed[name]["n"]) == figures["n"]
        for column, key in (("mean", "mape"), ("geomean", "geomean")):
            if figures[key] is not None:
                assert float(committed[name][column]) == pytest.approx(figures[key], abs=6e-5)
