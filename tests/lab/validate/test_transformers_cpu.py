"""A folder of made-up steps that follow known kernel models, scored as measured ones are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lab.transformers import FAMILIES, Bucket, TrainingStep
from predictor.cost.ops.cpu_ops import BINS, OpRow
from predictor.errors import InputError
from shardopt.measure.store import write_rows

pytest.importorskip("scipy")

from lab.validate.transformers_cpu import (
    BUCKET,
    BUCKETS,
    OP,
    OPS,
    read_ops,
    read_rounds,
    rounds_file,
    validate_transformers_cpu,
)

SLOWER = 1.1
"""Measured time over what the kernel models give, on targets."""
SYNC_MS = 2.0
PARTS = ("forward", "forward", "backward.0", "backward.0", "optimizer", "optimizer")
"""That the rows of a made step are of."""


def made(rng: random.Random) -> tuple[TrainingStep, list[float]]:
    """A step, and the ms of each of its rows."""
    sizes = [(1, n, n, 0) for n in rng.sample(range(10**5, 10**6), 6)]
    rows = [OpRow("mul c>1", size, (8.0 * size[1], *[0.0] * (BINS - 1))) for size in sizes]
    return TrainingStep(tuple(rows), (Bucket(4, 10**6),)), [0.01 + 1e-6 * size[1] for size in sizes]


def write_ops(folder: Path, steps: dict[str, TrainingStep]) -> None:
    lines = [
        {
            "shape": name,
            "part": part,
            "kind": row.kind,
            "sizes": " ".join(map(str, row.sizes)),
            "count": row.count,
            "reuse_kib": " ".join(f"{at}:{size / 1024}" for at, size in enumerate(row.reuse)),
        }
        for name, step in steps.items()
        for part, row in zip(PARTS, step.rows, strict=True)
    ]
    write_rows(folder / OPS, OP, lines)
    buckets = [
        {"shape": name, "bucket": at, "gradients": bucket.gradients, "bytes": bucket.bytes}
        for name, step in steps.items()
        for at, bucket in enumerate(step.buckets)
    ]
    write_rows(folder / BUCKETS, BUCKET, buckets)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    names = [f"{family}-l{i}-d64-h1-f64-v64-s64-b1" for i in (1, 2) for family in FAMILIES]
    targets = [f"{family}-l9-d64-h1-f64-v64-s64-b1" for family in FAMILIES]
    rounds = {name: made(rng) for name in (*names, *targets)}
    write_ops(tmp_path, {name: step for name, (step, _) in rounds.items()})
    for ranks in (1, 2):
        sync = SYNC_MS if ranks == 2 else 0.0
        steps = {name: sum(ms) + sync for name, (_, ms) in rounds.items()}
        steps |= {name: SLOWER * steps[name] for name in targets}
        line = {
            "round": 0,
            "other_cores": 0.0,
            "steps": {name: [[ms, ms]] * ranks for name, ms in steps.items()},
            "alone": {name: [[sum(rounds[name][1])]] * ranks for name in names},
            "captured": {name: [rounds[name][1]] * ranks for name in names},
        }
        rounds_file(tmp_path, ranks).write_text(json.dumps(line) + "\n")
    return tmp_path


def test_targets_are_scored_apart_from_what_was_fitted(folder: Path) -> None:
    report = validate_transformers_cpu(folder)
    assert report.summary.n == 6
    assert report.summary.mape == pytest.approx(1 - 1 / SLOWER, abs=0.005)
    fit = report.by_part()["fit"]
    assert (fit.n, fit.worst) == (12, pytest.approx(0, abs=0.01))


def test_tables_say_how_far_it_generalizes(folder: Path) -> None:
    tables = {scores.name: scores for scores in validate_transformers_cpu(folder).scores}
    captured = [row for row in tables["steps"].rows if str(row[0]).startswith("captured")]
    assert [row[1] for row in captured] == [1, 2]
    assert all(row[3] < 0.01 for row in captured)
    assert [row[:2] for row in tables["fewer_captures"].rows] == [(1, 3), (1, 6), (2, 3), (2, 6)]
    assert len(tables["targets"].rows) == 6


def test_one_number_of_ranks_is_enough(folder: Path) -> None:
    rounds_file(folder, 2).unlink()
    assert {row.name["ranks"] for row in validate_transformers_cpu(folder).rows} == {1}


def test_ops_and_buckets_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / OPS).write_text(
        "shape,part,kind,sizes,count,reuse_kib\n"
        "one,forward,mul c>1,1 2 3 0,2,0:1 3:2\n"
        ",backward.0,clone 10>1,4 4,1,\n"
        "two,forward,mul c>1,1 2 3 0,1,\n"
    )
    (tmp_path / BUCKETS).write_text("shape,bucket,gradients,bytes\none,0,3,400\n")
    steps = read_ops(tmp_path)
    assert len(steps["one"].rows) == 2
    reuse = (1024.0, 0.0, 0.0, 2048.0, *[0.0] * (BINS - 4))
    assert steps["one"].rows[0] == OpRow("mul c>1", (1, 2, 3, 0), reuse, 2)
    assert steps["one"].buckets == (Bucket(3, 400),)
    assert steps["two"].buckets == ()


ROUND = json.dumps(
    {
        "round": 0,
        "other_cores": 0.1,
        "steps": {"a": [[1, 2], [3, 5]]},
        "alone": {"a": [[1], [1]]},
        "captured": {"a": [[1.0, 2.0], [3.0, 4.0]]},
    }
)
BUSY = '{"round": 1, "other_cores": 1.1}'


def test_rounds_are_medians_of_the_slowest_rank(tmp_path: Path) -> None:
    rounds_file(tmp_path, 2).write_text(f"{ROUND}\n{BUSY}\n{ROUND}\n")
    rounds = read_rounds(tmp_path, 2)
    assert (rounds.count, rounds.disturbed) == (2, 1)
    assert rounds.steps == {"a": 4.0}
    assert rounds.alone == {"a": 1.0}
    assert rounds.captured == {"a": (2.0, 3.0)}


@pytest.mark.parametrize(
    ("line", "named"), [("{", "jsonl:2"), ("[]", "jsonl:2"), (BUSY, "none of its 1")]
)
def test_rounds_that_tell_nothing_are_refused(tmp_path: Path, line: str, named: str) -> None:
    text = line if line == BUSY else f"{ROUND}\n{line}\n"
    rounds_file(tmp_path, 2).write_text(text)
    with pytest.raises(InputError, match=named):
        read_rounds(tmp_path, 2)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no ops\.csv"):
        validate_transformers_cpu(tmp_path)


def test_broken_rows_are_named(folder: Path) -> None:
    path = folder / "ops.csv"
    path.write_text(path.read_text() + "a,b,c,d,e,f\n")
    with pytest.raises(InputError, match=r"ops.csv:\d+: "):
        validate_transformers_cpu(folder)


def test_rounds_of_other_ops_are_refused(folder: Path) -> None:
    path = rounds_file(folder, 1)
    document = json.loads(path.read_text())
    name = next(iter(document["captured"]))
    document["captured"][name][0].append(1.0)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"7 times of '{name}'"):
        validate_transformers_cpu(folder)
    document["steps"]["bert-l7"] = [[1.0, 1.0]]
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="shape 'bert-l7'"):
        validate_transformers_cpu(folder)
