"""Replays and predictions of benchmarks in words."""

from shardopt.report.bench.replay import LISTED, prediction_view
from shardopt.report.blocks import View


def shown(ops: int, *, untimed: int = 0) -> View:
    without = {f"corp::op{i}": {"count": i + 1, "share": 0.01} for i in range(ops)}
    figures = {"predicted_ms": 12.3456, "ranks": 2, "recorded_share": 0.25}
    return prediction_view({**figures, "untimed": untimed, "without_law": without})


def test_a_prediction_says_what_it_rests_on() -> None:
    view = shown(LISTED + 3, untimed=7)
    text = "\n".join(map(str, view.full))
    assert text.startswith("12.346 ms per iteration predicted on 2 CPU ranks; 25.0% of the ops'")
    assert "7 of these ops have no recorded time" in text
    assert "1.0%  2 x corp::op1" in text
    assert "and 3 more" in text
    assert f"corp::op{LISTED}" not in text
    assert view.brief == view.full[:1]


def test_a_whole_prediction_lists_nothing() -> None:
    assert len(shown(0).full) == 1
