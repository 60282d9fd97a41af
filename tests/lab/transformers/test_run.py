"""Op lists against real steps, which shapes are run, what a folder holds, and failing ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.transformer import TransformerShape
from lab.transformers import run as transformers
from lab.transformers.files import (
    calibrations,
    gradient_sum,
    is_disturbed,
    read_ops,
    read_rounds,
    rounds_file,
    rounds_of,
    targets,
    training_step,
    write_ops,
)
from predictor.cost.ops.cpu_ops import BINS, OpRow
from predictor.errors import InputError, ShardoptError
from predictor.iteration.op_graph import RankCalls
from shardopt.ranks import launch
from tests.quick import quick_first

TINY = (2, 32, 2, 64, 50, 8, 2)


@pytest.fixture(scope="module", params=quick_first(1, ["bert", "gpt2", "xlnet"]))
def shape(request: pytest.FixtureRequest) -> TransformerShape:
    pytest.importorskip("torch")
    return TransformerShape(request.param, *TINY)


def test_fake_tensors_issue_the_ops_of_a_real_step(shape: TransformerShape) -> None:
    from lab.transformers.worker import record_step

    fake, real = record_step(shape), record_step(shape, real=True)
    assert [_plain(of.call) for of in fake.calls] == [_plain(of.call) for of in real.calls]
    assert (fake.marks, fake.gradients) == (real.marks, real.gradients)


def _plain(call) -> tuple:
    sizes = [(o.shape, o.strides, o.offset, o.storage_bytes) for o in (*call.inputs, *call.outputs)]
    return call.name, sizes, len(call.freed), call.mutates


def test_rows_hold_every_call_and_gradient(shape: TransformerShape) -> None:
    from lab.transformers.worker import record_step, row_index, step_calls

    recording = record_step(shape)
    step, index = step_calls(recording), row_index(recording)
    rows = [row for part in step.calls for row in part.rows]
    assert [index.count(at) for at in range(len(rows))] == [row.count for row in rows]
    assert [part.op for part in step.calls] == ["forward", "backward.0", "optimizer"]
    assert sum(b.gradients for b in step.collectives) == len(recording.gradients)
    assert sum(b.bytes for b in step.collectives) == sum(size for _, size in recording.gradients)


def test_gradients_leave_in_buckets() -> None:
    pytest.importorskip("torch")
    from lab.transformers.worker import record_step, step_calls

    step = step_calls(record_step(TransformerShape("bert", 3, 512, 8, 2048, 4000, 8, 1)))
    assert len(step.collectives) == 3
    # the output layer's weight alone is larger than the first bucket has to be
    assert 2**20 < step.collectives[0].bytes < 25 * 2**20 < step.collectives[1].bytes
    backward = [f"backward.{i}" for i in range(3)]
    assert [part.op for part in step.calls] == ["forward", *backward, "optimizer"]


@pytest.mark.slow
def test_losses_fall() -> None:
    pytest.importorskip("torch")
    from lab.replay.transformers import MODELS, Training

    for family in MODELS:
        training = Training(TransformerShape(family, *TINY))
        for group in training.optimizer.param_groups:
            group["lr"] = 1e-2
        before = training.model(training.ids).item()
        for _ in range(20):
            training.step()
        assert training.model(training.ids).item() < 0.8 * before


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_target_is_captured(ranks: int) -> None:
    captured = {shape.name for n in (1, 2) for shape in calibrations(n)}
    predicted = {shape.name for shape in targets(ranks)}
    assert not captured & predicted
    assert len(predicted) == {1: 15, 2: 9}[ranks]
    assert calibrations(ranks) == calibrations(ranks)


def step(kind: str) -> RankCalls:
    reuse = (1024.0, *[0.0] * (BINS - 2), 2048.0)
    row = OpRow(kind, (1, 2, 3, 0), reuse, 2)
    return training_step({"forward": (row,), "backward.0": (row,)}, (gradient_sum(3, 400),))


def test_ops_are_read_as_written(tmp_path: Path) -> None:
    steps = {"bert-l1-d8-h1-f8-v8-s8-b8": step("mul c>1"), "a": step("clone 10>1")}
    write_ops(tmp_path, steps)
    assert read_ops(tmp_path) == steps


def round_line(scale: float) -> str:
    return json.dumps(
        {
            "round": 0,
            "other_cores": 0.1,
            "steps": {"a": [[scale, 2 * scale], [3 * scale, 5 * scale]]},
            "alone": {"a": [[scale], [scale]]},
            "captured": {"a": [[1.0, 2.0], [3.0, 4.0]]},
        }
    )


def test_rounds_are_medians_of_the_slowest_rank(tmp_path: Path) -> None:
    rounds_file(tmp_path, 2).write_text(f"{round_line(1)}\n{round_line(1)}\n")
    assert [len(rounds_of(tmp_path, ranks).rows) for ranks in (2, 1)] == [2, 0]
    rounds = read_rounds(tmp_path, 2)
    assert rounds.count == 2
    assert rounds.steps == {"a": 4.0}
    assert rounds.alone == {"a": 1.0}
    assert rounds.captured == {"a": (2.0, 3.0)}


@pytest.mark.parametrize(
    ("other_cores", "idle", "expected"),
    [(None, 0, False), (0.1, 0, False), (0.3, 0, True), (1.1, 1, False), (1.3, 1, True)],
)
def test_ranks_are_disturbed_where_no_idle_core_is_left(
    other_cores: float | None, idle: int, expected: bool
) -> None:
    assert is_disturbed(other_cores, idle) is expected


def test_rounds_that_others_disturbed_are_only_counted(tmp_path: Path) -> None:
    busy = '{"round": 1, "other_cores": 1.1}'
    rounds_file(tmp_path, 2).write_text("\n".join([round_line(1), busy, round_line(1)]))
    rounds = read_rounds(tmp_path, 2)
    assert (rounds.count, rounds.disturbed) == (2, 1)
    rounds_file(tmp_path, 2).write_text(busy)
    with pytest.raises(InputError, match="all 1 rounds were disturbed"):
        read_rounds(tmp_path, 2)


@pytest.mark.parametrize("line", ["{", "[]", '{"round": 1}'])
def test_broken_rounds_are_named_by_line(tmp_path: Path, line: str) -> None:
    rounds_file(tmp_path, 1).write_text(f"{round_line(1)}\n{line}\n")
    with pytest.raises(InputError, match=r"rounds-1.jsonl:2: not a round"):
        read_rounds(tmp_path, 1)


def test_a_rank_that_dies_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops.csv").write_text("")
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    with pytest.raises(ShardoptError, match="rank 0 died with exit code 1"):
        transformers.run_transformers(tmp_path, 1, (1,))
