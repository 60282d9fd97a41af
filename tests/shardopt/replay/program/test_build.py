"""Traces with names and values that no PyTorch writes: what is generated is a program that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shardopt.replay.generate import generate
from tests.shardopt.cli.fuzz import check_programs

LINE = [1, 2, 0, 4, 4, "cpu"]


def node(number: int, name: str, schema: str, inputs: list[list[Any]]) -> dict[str, Any]:
    """An op; inputs as (value, shape, type)."""
    sides: dict[str, list[list[Any]]] = {"input": inputs, "output": [[LINE, [4], "Tensor(float)"]]}
    flat = {
        f"{side}{ending}": [of[at] for of in given]
        for side, given in sides.items()
        for at, ending in enumerate(("s", "_shapes", "_types"))
    }
    more = {"rf_id": number, "seq_id": -1, "scope": 0, "tid": 1, "fw_parent": 0}
    return {"id": number, "parent": 2, "name": name, "op_schema": schema, **more, **flat}


TENSOR = [LINE, [4], "Tensor(float)"]
RELU = ("aten::relu", "aten::relu(Tensor self) -> Tensor", [TENSOR])
HOSTILE: dict[str, tuple[str, str, list[list[Any]]]] = {
    "no namespace": ("main", "main(Tensor self) -> Tensor", [TENSOR]),
    "the list of ops": ("ops", "ops(Tensor self) -> Tensor", [TENSOR]),
    "keyword": ("lambda", "lambda(Tensor self) -> Tensor", [TENSOR]),
    "collective": ("c10d::main", "c10d::main(Tensor[] x) -> Tensor", [TENSOR]),
    "collective keyword": ("c10d::lambda_", "c10d::lambda_(Tensor[] x) -> Tensor", [TENSOR]),
    "a part": ("part::0_part", "part::0_part(Tensor self) -> Tensor", [TENSOR]),
    "dunder": ("_::name__", "_::name__(Tensor self) -> Tensor", [TENSOR]),
    "not ASCII": ("aten::名", "aten::名(Tensor self) -> Tensor", [TENSOR]),
    "surrogate": ("aten::\ud800", "aten::\ud800(Tensor self) -> Tensor", [TENSOR]),
    "line": ("aten::a\nimport os", "aten::a\nimport os(Tensor self) -> Tensor", [TENSOR]),
    "parameter": ("x::y", "x::y(Tensor self, *, int lambda) -> Tensor", [TENSOR, [1, [], "Int"]]),
    "tensor parameter": ("x::y", "x::y(*, Tensor lambda) -> Tensor", [TENSOR]),
    "digits": ("x::y", "x::y(*, int 1x) -> Tensor", [[1, [], "Int"]]),
    "tensor for a number": ("x::y", "x::y(Tensor self, int n) -> Tensor", [TENSOR, TENSOR]),
    "tensors for numbers": (
        "x::y",
        "x::y(int[] n) -> Tensor",
        [[[LINE, LINE], [[4], [4]], "GenericList[Tensor(float),Tensor(float)]"]],
    ),
    "long number": ("x::y", "x::y(int n) -> Tensor", [[10**400, [], "Int"]]),
    "text for a number": ("x::y", "x::y(int n) -> Tensor", [["open('x')", [], "String"]]),
}


def written(folder: Path, *ops: tuple[str, str, list[list[Any]]]) -> Path:
    document = {
        "schema": "1.0.1",
        "pid": 1,
        "nodes": [node(10 + at, *op) for at, op in enumerate(ops)],
    }
    path = folder / "et.json"
    path.write_text(json.dumps(document))
    generate([path], folder / "b")
    return folder / "b" / "benchmark.py"


@pytest.mark.parametrize("name", HOSTILE)
def test_the_program_is_one(name: str, tmp_path: Path) -> None:
    check_programs(written(tmp_path, RELU, HOSTILE[name], RELU).parent)


def test_the_program_of_all_of_them_runs(tmp_path: Path) -> None:
    kept = [op for name, op in HOSTILE.items() if "collective" not in name]
    path = written(tmp_path, RELU, *kept, RELU)
    words = [sys.executable, str(path), "--device", "cpu", "--iterations", "2", "--warm-up", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
