"""JSON output of the program: every language reads it, whatever the model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from predictor.hardware import loader
from shardopt.cli.app import main
from shardopt.cli.output import to_json
from tests.shardopt.conftest import MODEL


def strict(text: str) -> Any:
    """JSON as other languages read it.

    Raises:
        ValueError: it holds NaN or an infinite number.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            refuse(text)
        return value

    return json.loads(text, parse_constant=refuse, parse_float=finite)


def test_what_is_not_known_is_null() -> None:
    data = {"a": math.inf, "b": [math.nan, (1.5, -math.inf)], "c": {"d": 2}}
    assert strict(to_json(data)) == {"a": None, "b": [None, [1.5, None]], "c": {"d": 2}}


def csv_model(folder: Path) -> str:
    text = MODEL[: MODEL.index("tables:")] + "tables: {csv: input}\n"
    (folder / "model.yaml").write_text(text + MODEL[MODEL.index("dense:") :])
    return "name,num_embeddings,embedding_dim,feature,pooling_factor\nusers,200000,64,user,4\n"


def stats_file(folder: Path) -> bytes:
    (folder / "data.tsv").write_bytes(b"\t".join([b"1"] * 14 + [b"a"] * 26) + b"\n")
    path = folder / "made.npz"
    assert main(["stats", str(folder / "data.tsv"), "-o", str(path), "--quiet"]) == 0
    return path.read_bytes()


def distribution_model(folder: Path) -> bytes:
    text = MODEL.replace(
        "index_distribution: uniform", "index_distribution: {file: input, feature: cat_0}"
    )
    (folder / "model.yaml").write_text(text)
    return stats_file(folder)


def profile(folder: Path) -> bytes:
    return Path(loader.__file__).with_name("profiles").joinpath("h100-sxm.yaml").read_bytes()


WHERE = "./input"
SCENARIOS = "schema: 1\nscenarios: [{factors: {gemm: 1.1}}, {factors: {gemm: 0.9}}]\n"
INPUTS = {
    "profile": (profile, ("--hardware", WHERE)),
    "scenarios": (lambda folder: SCENARIOS, ("--scenarios", WHERE)),
    "csv": (csv_model, ()),
    "distribution": (distribution_model, ()),
    "stats": (stats_file, ("--stats", f"made.npz,{WHERE}")),
    "cluster": (lambda folder: "schema: 1\nhosts: 1\nranks_per_host: 2\n", ("--cluster", WHERE)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_no_input_is_overwritten(kind: str, run, model: Path, tmp_path: Path) -> None:
    """Whatever the file is and by whatever name it is called."""
    write, flags = INPUTS[kind]
    content = write(tmp_path)
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / "input").write_bytes(content)
    for name, link in (("hard", os.link), ("symbolic", os.symlink)):
        link(tmp_path / "input", tmp_path / name)
    ranks = () if kind == "cluster" else ("--gpus", 2)
    for output in ("input", tmp_path / "hard", tmp_path / "symbolic"):
        done = run("plan", model, *ranks, *flags, "--effort", 0.005, "-o", output, "--quiet")
        assert done.code == 2, done.err
        assert f"{output}: is an input" in done.err
        assert (tmp_path / "input").read_bytes() == content
