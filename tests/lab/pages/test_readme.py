"""The generated tables of the README."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lab.pages.accuracy import COLUMNS, SUMMARY
from lab.pages.readme import readme_text
from lab.suites import SUITES
from predictor.errors import InputError
from tests.public_data import ROOT

EMPTY = """# Title
<!-- generated: first scores -->
<!-- end of first scores -->
<!-- generated: accuracy -->
stale
<!-- end of accuracy -->
between
<!-- generated: gain -->
<!-- end of gain -->
end
"""
CALIBRATED = '"shardopt, machine calibrated"'
SHIPPED = '"shardopt, shipped profile, where it gives another plan"'
TOLD = '"shardopt, shipped profile, as it foretells"'
GAIN = f"""plans of,runtime,models,task set,tasks,faster,equal,slower,mean gain,from,to,least
{CALIBRATED},plain,all,all,12,7,4,1,0.029,0.01,0.048,-0.07
{CALIBRATED},plain,shapes,b,5,5,0,0,0.035,0.011,0.059,0
{CALIBRATED},tuned,all,all,5,5,0,0,0.077,0.011,0.059,0
{SHIPPED},plain,all,all,3,1,1,1,-0.002,-0.04,0.038,-0.31
"""
EXPECTED_COLUMNS = (
    *("plans of", "runtime", "models", "task set", "mean expected", "mean measured"),
    *("expected - measured", "from", "to", "optimism", "optimism from", "optimism to"),
    "in the interval",
)
EXPECTED = f"""{",".join(EXPECTED_COLUMNS)}
{CALIBRATED},plain,all,all,0.058,0.029,0.021,0.009,0.033,0.030,0.017,0.043,0.925
{SHIPPED},plain,all,all,0.016,-0.002,0.018,0,0.1,0.02,0,0.1,0.9
{TOLD},plain,all,all,0.12,-0.002,0.122,0,0.1,0.2,0,0.1,0.47
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with every part that the README shows."""
    with (tmp_path / SUMMARY).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for suite in SUITES.values():
            writer.writerows(
                (suite.name, part, 1, 12, 0.045, 0.027, 0.226, "")
                for row in suite.readme
                for part in row["parts"]
            )
    (tmp_path / "against-torchrec-against-torchrec-s-planner.csv").write_text(GAIN)
    (tmp_path / "against-torchrec-expected-gains.csv").write_text(EXPECTED)
    return tmp_path


def test_each_table_goes_to_its_place(folder: Path) -> None:
    text = readme_text(EMPTY, folder)
    accuracy, gain = text.split("between")
    assert "| 12 | 4.5 % | 2.7 % | - |" in accuracy
    assert "| 12 / 12 / 12 | 4.5 / 4.5 / 4.5 % |" in accuracy, "all bands of a row"
    assert accuracy.count("\n| `") == sum(len(suite.readme) for suite in SUITES.values())
    assert "stale" not in text
    assert text.startswith("# Title\n")
    assert text.endswith("end\n")
    assert readme_text(text, folder) == text
    calibrated = "| 12 | +2.9 % (+1.0 % to +4.8 %) | +5.8 % | 7 faster, 4 equal, 1 slower; -7.0 %"
    assert calibrated in gain
    assert "7.7 %" not in gain, "of a tuned runtime"


def test_shipped_plans_are_shown_with_what_their_profile_foretold(folder: Path) -> None:
    gain = readme_text(EMPTY, folder).split("between")[1]
    assert (
        "| 3 | -0.2 % (-4.0 % to +3.8 %) | +12.0 % | 1 faster, 1 equal, 1 slower; -31.0 %" in gain
    )
    assert "2.1 (0.9 to 3.3)" in gain
    assert "3.0 (1.7 to 4.3)" in gain
    assert "The measured gain is 50 % of the expected one" in gain
    assert "47.0 %" in gain


def test_what_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match="generated: gain"):
        readme_text(EMPTY.replace("generated: gain", ""), folder)
    (folder / SUMMARY).write_text(",".join(COLUMNS))
    with pytest.raises(InputError, match=next(iter(SUITES.values())).readme[0]["parts"][0]):
        readme_text(EMPTY, folder)


def test_the_readme_shows_at_most_ten_rows() -> None:
    assert sum(len(suite.readme) for suite in SUITES.values()) <= 10


def test_the_readme_can_be_surveyed() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert ["make demo" in lines[1], "make test" in lines[2]] == [True, True]
