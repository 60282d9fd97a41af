"""The rows file: written, read back, and refused where it is broken or another's."""

import json
from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.bench.rows import BenchRows, check_continues, read_rows, write_rows

WARM = {"rounds": 1, "settled": True}


def rows(rounds: int = 2) -> BenchRows:
    def measured(index: int) -> dict[str, object]:
        return {
            "round": index,
            "session": 0,
            "at": "2026-01-01T00:00:00+00:00",
            "load": 0.5,
            "other_cores": 0.01,
            "order": ["b", "a"],
            "lead_ms": {"a": [9.0, 9.0], "b": [8.0, 8.0]},
            "ranks_ms": {"a": [[1.0, 2.0], [1.5, 2.5]], "b": [[3.0, 4.0], [3.5, 4.5]]},
            "reference_ms": {"gemm": [[0.1, 0.2], [0.1, 0.3]]},
        }

    return BenchRows(
        model={"name": "m", "sha256": "", "batch_size": 2, "train_pipeline": "base"},
        settings={"backend": "gloo", "world_size": 2, "block": 2, "runtime": "plain"},
        plans=[{"name": "a", "plan": {}}, {"name": "b", "plan": {}}],
        sessions=[{"environment": {"cores": 2}, "started": "", "load": 0.1, "warmup": WARM}],
        rounds=[measured(index) for index in range(rounds)],
    )


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_round_trip(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, rows(rounds))
    assert read_rows(path) == rows(rounds)
    assert json.loads(path.read_text())["schema"] == "shardopt.bench-rows/1"
    assert rows(rounds).samples_ms("b", 1) == [[3.5, 4.5]] * rounds


def test_files_from_before_there_were_two_runtimes_are_of_the_tuned_one(tmp_path: Path) -> None:
    old = rows()
    del old.settings["runtime"]
    write_rows(tmp_path / "rows.json", old)
    assert read_rows(tmp_path / "rows.json").settings["runtime"] == "tuned"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"round": 1', '"round": 7', "round is 7, but 1 is next"),
        ("[3.0, 4.0]", "[3.0]", "'b' are not 2 times above 0 for 2 ranks"),
        ("[1.5, 2.5]", "[1.5, -2.5]", "'a' are not 2 times"),
        ("[1.5, 2.5]", '["x", 2.5]', "'a' are not 2 times"),
        ('"reference_ms"', '"reference"', "'reference_ms' is missing"),
        ("[[0.1, 0.2], [0.1, 0.3]]", "[[], []]", "reference_ms of gemm are not"),
        ('"session": 0', '"session": 3', "session is 3, but there are 1"),
        ("[8.0, 8.0]", "[8.0, 0]", "lead_ms of plan 'b'"),
        ('"name": "b", ', "", "'name' is missing"),
        ("{", "", "not JSON"),
    ],
)
def test_what_is_corrupted_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, rows())
    lines = path.read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if old in line)
    lines[at] = lines[at].replace(old, new, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"rows\.json") as caught:
        read_rows(path)
    assert f"{path}:{at + 1}:" in str(caught.value)
    assert message in str(caught.value)


def test_another_schema_and_a_missing_part_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"schema": "shardopt.bench-rows/9"}')
    with pytest.raises(InputError, match="bench-rows/9"):
        read_rows(path)
    path.write_text('{"schema": "shardopt.bench-rows/1"}')
    with pytest.raises(InputError, match="'model' is missing"):
        read_rows(path)


def test_only_the_same_bench_is_continued() -> None:
    check_continues(Path("r"), rows(), rows(0))
    for part in ("model", "settings", "environment"):
        changed = rows(0)
        change = changed.sessions[0][part] if part == "environment" else getattr(changed, part)
        change["extra"] = 1
        with pytest.raises(InputError, match=r"another bench.*had extra None, now 1"):
            check_continues(Path("r"), rows(), changed)
    changed = rows(0)
    changed.plans.pop()
    with pytest.raises(InputError, match="the plans were a, b, now a"):
        check_continues(Path("r"), rows(), changed)
