"""The page on running jobs says what its committed rows say."""

from pathlib import Path

import pytest

from lab.tools.live_steps import gains, page_with, read_rows
from predictor.errors import InputError

REPOSITORY = Path(__file__).parents[3]
ROWS = REPOSITORY / "configs" / "bench" / "live" / "2026-11-23-plain.json"


def test_the_page_shows_the_committed_rows() -> None:
    page = (REPOSITORY / "docs" / "live.md").read_text()
    assert page_with(page, read_rows(ROWS)) == page


def test_a_page_without_marks() -> None:
    with pytest.raises(InputError, match="has no marks"):
        page_with("# Page\n", read_rows(ROWS))


def test_gains_of_a_move() -> None:
    move = {
        "stays": [[100.0, 100.0], [100.0, 120.0], [100.0, 100.0]],
        "moved": [[80.0, 80.0], [80.0, 80.0], [60.0, 60.0]],
        "proposal": {"gain": 0.25},
    }
    foretold, measured, low, high = gains(move)
    assert (foretold, measured) == (0.25, pytest.approx(0.2))
    assert low <= measured <= high


def test_a_monitor_takes_less_than_it_may() -> None:
    """0.5 % of the steps that were measured."""
    found = read_rows(ROWS)["overhead"]
    steps = sum(len(block) for block in found["with"])
    share = sum(found["spent_ms"]) / len(found["spent_ms"])
    step = sum(ms for block in found["with"] for ms in block) / steps
    assert share < 0.005 * step
