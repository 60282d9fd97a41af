"""The page and the files beside it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lab.cli import main
from lab.pages.accuracy import COLUMNS, SUMMARY, updated, write_accuracy
from lab.pages.scores import report_object
from lab.suites import SUITES, ComparedRow, Report, Scores, Suite, noise_of
from predictor.errors import InputError
from tests.public_data import FULL, TRACES

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
    assert "2 rows (1 left out): [tbe.csv](accuracy/tbe.csv), [tbe-by-gpu.csv]" in page


ROOT = Path(__file__).resolve().parents[3]
EMPTY = """# Title
<!-- generated: accuracy -->
stale
<!-- end of accuracy -->
between
<!-- generated: gain -->
<!-- end of gain -->
end
"""
GAIN = """plans of,runtime,models,task set,tasks,faster,equal,slower,mean gain,from,to
"shardopt, machine calibrated",plain,all,all,12,7,4,1,0.029,0.01,0.048
"shardopt, machine calibrated",plain,shapes,b,5,5,0,0,0.035,0.011,0.059
"shardopt, shipped profile",plain,all,all,3,1,1,1,0.099,0.01,0.048
"""
EXPECTED = """plans of,runtime,models,task set,mean expected
"shardopt, machine calibrated",plain,all,all,0.033
random plans,plain,all,all,-0.3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with every part that the README shows."""
    with (tmp_path / SUMMARY).open("w", newline="") as file:
        made = csv.writer(file)
        made.writerow(COLUMNS)
        for suite in SUITES.values():
            made.writerows(
                (suite.name, row["part"], 1, 12, 0.045, 0.027, 0.226, "") for row in suite.readme
            )
    (tmp_path / "against-torchrec-against-torchrec-s-planner.csv").write_text(GAIN)
    (tmp_path / "against-torchrec-expected-gains.csv").write_text(EXPECTED)
    return tmp_path


def test_each_table_goes_to_its_place(folder: Path) -> None:
    found = updated(EMPTY, folder)
    accuracy, gain = found.split("between")
    assert "| 12 | 4.5 % | 2.7 % | - |" in accuracy
    assert accuracy.count("\n| `") == sum(len(suite.readme) for suite in SUITES.values())
    assert "| 12 | +2.9 % (+1.0 % to +4.8 %) | +3.3 % | 7 faster, 4 equal, 1 slower |" in gain
    assert "9.9 %" not in gain
    assert "stale" not in found
    assert found.startswith("# Title\n")
    assert found.endswith("end\n")
    assert updated(found, folder) == found


def test_what_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match="generated: gain"):
        updated(EMPTY.replace("generated: gain", ""), folder)
    (folder / SUMMARY).write_text(",".join(COLUMNS))
    with pytest.raises(InputError, match=SUITES["collectives"].readme[0]["part"]):
        updated(EMPTY, folder)


def test_the_readme_shows_at_most_ten_rows() -> None:
    assert sum(len(suite.readme) for suite in SUITES.values()) <= 10


def test_the_committed_readme_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text()
    assert updated(readme, ROOT / "docs" / "accuracy") == readme


def test_the_command_writes_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = folder / "README.md"
    readme.write_text(EMPTY)
    assert main(["readme", str(readme), str(folder)]) == 0
    assert "7 faster, 4 equal" in readme.read_text()
    assert main(["readme", str(readme), str(folder / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_the_figures_are_those_that_the_suite_gives(suite: Suite) -> None:
    if not (suite.committed or TRACES.is_dir()):
        pytest.skip("the public data is not here")
    parts = report_object(suite.run(None if suite.committed else FULL))["parts"]
    with (ROOT / "docs" / "accuracy" / SUMMARY).open(newline="") as file:
        committed = {r["part"]: r for r in csv.DictReader(file) if r["suite"] == suite.name}
    for name, found in parts.items():
        assert int(committed[name]["n"]) == found["n"]
        for column, key in (("mean", "mape"), ("geomean", "geomean")):
            if found[key] is not None:
                assert float(committed[name][column]) == pytest.approx(found[key], abs=6e-5)
