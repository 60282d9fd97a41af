"""Replays and predictions of benchmarks in words."""

import io

from rich.console import Console

from shardopt.report.bench.replay import LISTED, show_prediction


def shown(ops: int, *, untimed: int = 0, brief: bool = False) -> str:
    without = {f"corp::op{i}": {"count": i + 1, "share": 0.01} for i in range(ops)}
    result = {
        "predicted_ms": 12.3456,
        "ranks": 2,
        "recorded_share": 0.25,
        "untimed": untimed,
        "without_law": without,
    }
    console = Console(file=io.StringIO(), width=200)
    show_prediction(console, result, brief=brief)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_prediction_says_what_it_rests_on() -> None:
    text = shown(LISTED + 3, untimed=7)
    assert text.startswith("12.346 ms per iteration predicted on 2 CPU ranks; 25.0% of the ops'")
    assert "7 of these ops have no recorded time" in text
    assert "1.0%  2 x corp::op1" in text
    assert "and 3 more" in text
    assert f"corp::op{LISTED}" not in text


def test_a_whole_prediction_lists_nothing() -> None:
    assert "Ops without a kernel model" not in shown(0)
    assert len(shown(5, untimed=7, brief=True).splitlines()) == 1
