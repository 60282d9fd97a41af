"""What leaves the program: JSON that every language reads, whatever the model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from predictor.hardware import loader
from shardopt.cli.app import main
from shardopt.cli.output import to_json
from tests.shardopt.conftest import MODEL

ROWS = st.sampled_from([1, 3, 1000, 50_000, 10**6, 10**8])
DISTRIBUTIONS = st.sampled_from(["uniform", {"zipf": {"alpha": 1.05}}, {"zipf": {"alpha": 20}}])


@st.composite
def models(draw: st.DrawFn, most: int) -> dict[str, Any]:
    """Models from one table of one row to ``most`` tables, some larger than the machine."""
    dim = draw(st.sampled_from([4, 64, 256]))
    batch = draw(st.sampled_from([1, 16, 2048, 65536]))
    pooling = st.sampled_from([1e-6, 0.5, 1, 20, 1000])

    def table(number: int) -> dict[str, Any]:
        feature = {
            "name": f"f{number}",
            "pooling_factor": draw(pooling),
            "index_distribution": draw(DISTRIBUTIONS),
        }
        return {
            "name": f"t{number}",
            "num_embeddings": draw(ROWS),
            "embedding_dim": dim,
            "data_type": draw(st.sampled_from(["fp32", "fp16"])),
            "features": [feature],
        }

    return {
        "schema": 1,
        "batch_size": batch,
        "train_pipeline": draw(st.sampled_from(["base", "sparse_dist", "prefetch_sparse_dist"])),
        "tables": [table(i) for i in range(draw(st.integers(1, most)))],
        "dense": {
            **{"in_features": 13, "interaction": "concat"},
            **{"bottom_mlp": [64, dim], "top_mlp": [64, 1]},
        },
    }


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


def outputs(folder: Path, model: dict[str, Any], gpus: int, capsys: Any) -> list[Any]:
    """What each command prints for a model, if a plan of it fits."""
    path, plan = folder / "m.yaml", folder / "p.json"
    path.write_text(yaml.safe_dump(model))
    plan.unlink(missing_ok=True)
    made = ["plan", path, "--gpus", gpus, "--effort", 0.002, "--time-limit", 20, "-o", plan]
    found = []
    for words in (made, ["predict", path, plan], ["explain", path, plan], ["diff", plan, plan]):
        code = main([str(word) for word in (*words, "--json")])
        done = capsys.readouterr()
        assert code in (0, 3), done.err
        if code:
            assert (words, done.out) == (made, "")
            return []
        found.append(strict(done.out))
    return [*found, strict(plan.read_text())]


# what fails is not made smaller: every step of that searches plans
@pytest.mark.slow
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(model=models(most=60), gpus=st.sampled_from([1, 2, 8, 16]))
def test_no_number_is_infinite(model, gpus: int, tmp_path: Path, capsys) -> None:
    found = outputs(tmp_path, model, gpus, capsys)
    if found:
        planned, predicted, explained, compared, written = found
        (again,) = predicted["predictions"]
        times = [of["iteration_ms"] for of in (planned, again, explained, written)]
        assert times == pytest.approx([times[0]] * 4)
        assert compared["same"]


def test_what_is_not_known_is_null() -> None:
    data = {"a": math.inf, "b": [math.nan, (1.5, -math.inf)], "c": {"d": 2}}
    assert strict(to_json(data)) == {"a": None, "b": [None, [1.5, None]], "c": {"d": 2}}


def csv_model(folder: Path) -> str:
    text = MODEL[: MODEL.index("tables:")] + "tables: {csv: input}\n"
    (folder / "model.yaml").write_text(text + MODEL[MODEL.index("dense:") :])
    return "name,num_embeddings,embedding_dim,feature,pooling_factor\nusers,200000,64,user,4\n"


def stats_file(folder: Path) -> bytes:
    (folder / "data.tsv").write_bytes(b"\t".join([b"1"] * 14 + [b"a"] * 26) + b"\n")
    made = folder / "made.npz"
    assert main(["stats", str(folder / "data.tsv"), "-o", str(made), "--quiet"]) == 0
    return made.read_bytes()


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
