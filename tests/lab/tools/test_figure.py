"""The picture, of rows made by hand."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.cli import main
from lab.suites import ComparedRow, Report
from lab.tasks.against import OURS, THEIRS
from lab.tools.figure import BOTTOM, LEFT_PANEL, TOP, figure

SVG = "{http://www.w3.org/2000/svg}"


def compared(task: int, plan: str, measured: float, predicted: float) -> ComparedRow:
    name = {"batch": "b", "task": task, "plan": plan}
    return ComparedRow(name, measured, predicted, family="loopback", part="plans")


PLANS = Report(
    "torchrec-cpu",
    tuple(
        compared(at, "p", ms, ms * error) for at, (ms, error) in enumerate(((20, 1), (80, 1.25)))
    ),
    headline="plans",
)
TASKS = Report(
    "against-torchrec",
    (compared(200, THEIRS, 60, 66), compared(200, OURS, 30, 33), compared(200, "other", 10, 10)),
    headline="plans",
)


def test_points_and_bars_are_where_the_times_are() -> None:
    drawn = ElementTree.fromstring(figure(PLANS, TASKS))
    points = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in drawn.iter(f"{SVG}circle")]
    assert len(points) == 2
    # both axes have one range, so an exact prediction lies on the diagonal
    (x, y), (far, above) = points
    share = (x - LEFT_PANEL[0]) / (LEFT_PANEL[1] - LEFT_PANEL[0])
    assert (BOTTOM - y) / (BOTTOM - TOP) == pytest.approx(share, abs=0.002)
    assert (BOTTOM - above) / (BOTTOM - TOP) > (far - LEFT_PANEL[0]) / (
        LEFT_PANEL[1] - LEFT_PANEL[0]
    )
    bars = [float(r.get("height", 0)) for r in drawn.iter(f"{SVG}rect")][1:]
    theirs, ours = (height for height in bars if height > 10)
    assert theirs == pytest.approx(2 * ours, rel=0.01)
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "mean error 12.5 %" in words
    assert "2 plans under TorchRec, two CPU ranks" in words


def test_bars_are_of_plain_ranks_where_there_are_any() -> None:
    plain = [replace(row, family="plain, shapes, loopback") for row in TASKS.rows]
    plain = [replace(row, name={**row.name, "task": 7}) for row in plain]
    both = replace(TASKS, rows=(*TASKS.rows, *plain))
    words = [t.text for t in ElementTree.fromstring(figure(PLANS, both)).iter(f"{SVG}text")]
    assert "1 models on plain ranks: TorchRec's plan, ours" in words


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["figure", str(tmp_path / "none" / "a.svg")]) == 2
    assert "none" in capsys.readouterr().err
