"""Recording a training loop: untraced steps are timed, and the traces say what they took."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.trace.read import load_traces

torch = pytest.importorskip("torch")
pytest.importorskip("torchrec")


def run(folder: Path, steps: int, **sizes: int) -> object:
    from shardopt.torchrec import record

    x = torch.ones(8, 8, requires_grad=True)
    with record(folder, **sizes) as recorder:
        for _ in range(steps):
            (x @ x).sum().backward()
            recorder.step()
    return recorder


def test_a_trace_says_what_a_step_takes_without_the_profiler(tmp_path: Path) -> None:
    recorder = run(tmp_path / "traces", 12, warm_up=2, timed=5, traced=3)
    (trace,) = load_traces([tmp_path / "traces"]).traces
    assert trace.untraced_step_ms == pytest.approx(recorder.step_ms)
    assert len(trace.steps) == 3
    assert any("mm" in event.name for event in trace.host)
    assert any(event.shapes for event in trace.host)


def test_a_loop_that_ends_early_warns_and_goes_on(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="5 steps"):
        run(tmp_path / "traces", 5, warm_up=2, timed=5, traced=3)
    assert not (tmp_path / "traces").exists()


def test_a_loop_that_ends_while_it_is_traced_writes_what_there_is(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(tmp_path / "traces", 9, warm_up=2, timed=5, traced=30)
    assert (tmp_path / "traces" / "rank0.json.gz").exists()


@pytest.mark.parametrize("sizes", [{"timed": 0}, {"traced": 0}, {"warm_up": -1}])
def test_too_few_steps_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(sizes))):
        run(tmp_path, 1, **sizes)
