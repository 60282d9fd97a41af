"""Ranks whose clocks differ, or whose programs do."""

from pathlib import Path
from typing import Any

import pytest

from predictor.trace.read import clock_offsets, load_traces
from tests.predictor.trace.synthetic import kineto, read_kineto, write


@pytest.mark.parametrize("shift", [0.0, 300.0, 20_000.0, -20_000.0])
def test_clocks(tmp_path: Path, shift: float) -> None:
    """Small differences stay: collectives do not end at the very same time."""
    paths = [write(tmp_path, f"{r}.json", kineto(r, start_us=1e6 + shift * r)) for r in (0, 1)]
    assert clock_offsets([read_kineto(p) for p in paths]) == pytest.approx({0: 0.0, 1: shift})
    found = load_traces(paths)
    first, second = found.traces
    if abs(shift) < 1000:
        assert found.notes == ()
        assert second.steps[0].start_us - first.steps[0].start_us == pytest.approx(shift)
    else:
        assert f"rank 1 by {shift / 1e3:+.3f} ms" in found.notes[0]
        assert second.steps == first.steps
        assert second.device == first.device
        assert second.host == first.host


def renamed(document: dict[str, Any]) -> dict[str, Any]:
    for event in document["traceEvents"]:
        args = event.get("args", {})
        if "Collective name" in args:
            args["Collective name"] = "all_to_all"
    return document


def test_other_collectives(tmp_path: Path) -> None:
    paths = [write(tmp_path, "0.json", kineto(0)), write(tmp_path, "1.json", renamed(kineto(1)))]
    (told,) = load_traces(paths).notes
    assert "the one at position 0 is all_reduce on rank 0, all_to_all on rank 1" in told
