"""The picture, of rows made by hand."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.pages.figure import BOTTOM, LEFT_PANEL, TOP, figure, figure_of_rows
from lab.tasks.against import OURS, THEIRS

SVG = "{http://www.w3.org/2000/svg}"


def timed(task: int, plan: str, measured: float, predicted: float, **more: str) -> dict[str, str]:
    names = {"part": "plans", "batch": "b", "task": str(task), "plan": plan, **more}
    return {**names, "measured_ms": str(measured), "predicted_ms": str(predicted)}


PLANS = [timed(at, "p", ms, ms * error) for at, (ms, error) in enumerate(((20, 1), (80, 1.25)))]
TASKS = [timed(200, THEIRS, 60, 66), timed(200, OURS, 30, 33), timed(200, "other", 10, 10)]


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
    torchrecs, ours = (height for height in bars if height > 10)
    assert torchrecs == pytest.approx(2 * ours, rel=0.01)
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "mean error 12.5 %" in words
    assert "2 plans under TorchRec, two CPU ranks" in words


def test_bars_are_of_plain_ranks(tmp_path: Path) -> None:
    plain = [{**row, "batch": "c", "task": "7"} for row in TASKS]
    fresh = [{**row, "part": "batches fresh"} for row in PLANS]
    rows = {
        "torchrec-cpu.csv": [*fresh, {**PLANS[0], "part": "batches developed on"}],
        "against-torchrec.csv": [*TASKS, *plain],
        "against-torchrec-batches.csv": [
            {"batch": "b", "runtime": "tuned"},
            {"batch": "c", "runtime": "plain"},
        ],
    }
    for name, task_rows in rows.items():
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, task_rows[0])
            writer.writeheader()
            writer.writerows(task_rows)
    drawn = ElementTree.fromstring(figure_of_rows(tmp_path))
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "1 models on plain ranks: TorchRec's plan, ours" in words
    assert "2 plans under TorchRec, two CPU ranks" in words
