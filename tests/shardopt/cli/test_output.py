"""What leaves the program: JSON that every language reads, whatever the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardopt.cli.app import main
from shardopt.cli.output import to_json

ROWS = st.sampled_from([1, 3, 1000, 50_000, 10**6, 10**8])
DISTRIBUTIONS = st.sampled_from(["uniform", {"zipf": {"alpha": 1.05}}, {"zipf": {"alpha": 20}}])


def mlps(dim: int) -> dict[str, Any]:
    return {"in_features": 13, "bottom_mlp": [64, dim], "top_mlp": [64, 1], "interaction": "concat"}


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
        "dense": mlps(dim),
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
    made = ["plan", path, "--gpus", gpus, "--effort", 0.002, "--time-limit", 2, "-o", plan]
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


def check_numbers(folder: Path, model: dict[str, Any], gpus: int, capsys: Any) -> None:
    found = outputs(folder, model, gpus, capsys)
    if found:
        planned, predicted, explained, compared, written = found
        (again,) = predicted["predictions"]
        times = [of["iteration_ms"] for of in (planned, again, explained, written)]
        assert times == pytest.approx([times[0]] * 4)
        assert compared["same"]


# what fails is not made smaller: every step of that searches plans
SEARCHES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)


@settings(SEARCHES, max_examples=2)
@given(model=models(most=5), gpus=st.sampled_from([1, 2]))
def test_no_number_is_infinite(model, gpus: int, tmp_path: Path, capsys) -> None:
    check_numbers(tmp_path, model, gpus, capsys)


@pytest.mark.slow
@settings(SEARCHES, max_examples=40)
@given(model=models(most=60), gpus=st.sampled_from([1, 2, 8, 16]))
def test_no_number_is_infinite_in_many_models(model, gpus: int, tmp_path: Path, capsys) -> None:
    check_numbers(tmp_path, model, gpus, capsys)


def test_what_is_not_known_is_null() -> None:
    data = {"a": math.inf, "b": [math.nan, (1.5, -math.inf)], "c": {"d": 2}}
    assert strict(to_json(data)) == {"a": None, "b": [None, [1.5, None]], "c": {"d": 2}}
