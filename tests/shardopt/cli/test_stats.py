"""`shardopt stats`: table, JSON, the file that model.yaml reads, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from predictor.model.distribution import EmpiricalByRange
from shardopt.config import load_model

ROWS = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    many = rng.zipf(1.3, (4000, 4)) % ROWS
    path = tmp_path / "data.npz"
    np.savez(path, user=many, day=rng.integers(0, 7, 4000))
    return path


def test_the_table_and_the_lines_to_paste(run, data: Path) -> None:
    done = run("stats", data, "-o", "stats.npz")
    assert done.code == 0, done.err
    assert "wrote stats.npz" in done.err
    for word in ("4,000 samples", "user", "day", "hottest rows of user", "For model.yaml"):
        assert word in done.out
    line = "{name: user, pooling_factor: 4, index_distribution: {file: stats.npz, feature: user}}"
    assert f"  - {line}\n" in done.out
    assert "largest id" in done.out
    assert len(run("stats", data, "--quiet").out.splitlines()) == 2


def test_json_has_curve_fit_histogram_and_hot_rows(as_json, data: Path) -> None:
    user, day = as_json("stats", data, "--table-rows", "4000", "--hot", "2")["features"]
    assert (user["name"], user["rows"], user["rows_given"]) == ("user", 4000, True)
    assert (user["samples"], user["ids"], user["pooling_factor"]) == (4000, 16000, 4)
    assert user["empty_share"] == 0
    assert user["curve"]["draws"][:3] == [1, 2, 4]
    assert user["curve"]["distinct"][-1] == user["distinct"]
    assert user["curve_error"] < 0.02
    assert user["zipf"]["alpha"] == pytest.approx(1.3, abs=0.15)
    assert day["zipf"]["alpha"] > 0
    assert len(user["hottest"]) == 2
    assert user["hottest"][0]["share"] > user["hottest"][1]["share"] > 0
    assert sum(user["reuse_histogram"]["fractions"]) == pytest.approx(1)
    assert day["distinct"] == 7


def test_a_model_reads_the_file(run, refused, data: Path, model: Path, tmp_path: Path) -> None:
    assert run("stats", data, "--table-rows", ROWS, "-o", "stats.npz", "--quiet").code == 0
    text = model.read_text().replace("num_embeddings: 200000", f"num_embeddings: {ROWS}")
    text = text.replace("{zipf: {alpha: 1.05}}", "{file: stats.npz}", 1)
    model.write_text(text)
    law = load_model(model).tables[0].features[0].distribution
    assert isinstance(law, EmpiricalByRange)
    parts = [law.between(a, a + 1000, ROWS) for a in (0, 1000, 2000)]
    assert sum(part.mass for part in parts if part) == pytest.approx(1)
    assert sum(part.rows for part in parts if part) == pytest.approx(ROWS, rel=1e-3)
    # and the model gives features and rows in return; "item" is not there
    done = run("stats", data, "--model", model)
    assert done.code == 0, done.err
    assert "item" in done.err
    refused("stats", data, "--model", model, "--features", "user,item", says="'item'")


def test_a_copy_of_the_model_has_the_statistics(run, refused, data: Path, model: Path) -> None:
    (model.parent / "copies").mkdir()
    copy = model.parent / "copies" / "filled.yaml"
    words = ("stats", data, "--modulo", "--model", model)
    done = run(*words, "-o", "stats.npz", "--write-model", copy)
    assert done.code == 0, done.err
    assert f"wrote {copy}" in done.err
    before, after = (
        {f.name: f for t in load_model(m).tables for f in t.features} for m in (model, copy)
    )
    assert after["user"].pooling_factor == 4
    assert isinstance(after["user"].distribution, EmpiricalByRange)
    assert after["item"] == before["item"], "the data has no such feature"
    refused("stats", data, "--write-model", copy, says="give both")
    refused(*words, "-o", "stats.npz", "--write-model", model, says="is an input")


def test_samples_without_ids_and_a_single_sample(run, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = arrow.list_(arrow.int64())
    table = arrow.table({"one": [3], "none": arrow.array([[]], type=kind)})
    parquet.write_table(table, tmp_path / "a.parquet")
    done = run("stats", "a.parquet", "-o", "stats.npz")
    assert done.code == 0, done.err
    assert "'none'" in done.err
    with np.load(tmp_path / "stats.npz") as arrays:
        assert "one.counts" in arrays
        assert not any(name.startswith("none.") for name in arrays)


def test_a_failed_run_leaves_the_old_file(run, tmp_path: Path) -> None:
    (tmp_path / "stats.npz").write_text("precious")
    np.save(tmp_path / "bad.npy", np.full((3, 2), -1))
    assert run("stats", "bad.npy", "-o", "stats.npz").code == 2
    assert (tmp_path / "stats.npz").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_goes_when_the_run_is_done(run, data: Path, tmp_path: Path) -> None:
    done = run("stats", data, "--checkpoint", "state.npz", "--chunk-rows", 100, "--quiet")
    assert done.code == 0
    assert not (tmp_path / "state.npz").exists()


def test_a_table_of_the_most_rows_warns_of_nothing(run, data: Path) -> None:
    """Warnings are errors in tests."""
    done = run("stats", data, "--table-rows", 10**12, "--quiet")
    assert (done.code, done.err) == (0, "")


@pytest.fixture
def days(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "days.npz"
    np.savez(path, user=rng.zipf(1.3, 3000) % ROWS, when=rng.integers(0, 3, 3000) * 86_400)
    return path


def test_a_file_for_each_day_and_how_the_features_move(run, days: Path, tmp_path: Path) -> None:
    done = run("stats", days, "--window", "when=1d", "-o", "stats.npz")
    assert done.code == 0, done.err
    assert "stats.1970-01-01.npz" in done.err
    for word in ("3, from 1970-01-01 to 1970-01-03", "user", "hot rows lost"):
        assert word in done.out
    assert "user.counts" in np.load(tmp_path / "stats.1970-01-02.npz")
    (short,) = run("stats", days, "--window", "when=1d", "--quiet").out.splitlines()
    assert short.startswith("user: a window moves ids per sample 0.0%, distinct rows ")


def test_windows_as_json(as_json, days: Path) -> None:
    document = as_json("stats", days, "--window", "when=1d")
    assert [window["name"] for window in document["windows"]] == [
        f"1970-01-0{d}" for d in (1, 2, 3)
    ]
    assert all(window["file"] is None for window in document["windows"])
    assert sum(window["features"][0]["samples"] for window in document["windows"]) == 3000
    (drift,) = document["drift"]
    assert (drift["feature"], drift["windows"], drift["pooling_factors"]) == ("user", 3, [1, 1, 1])
    assert len(drift["hot_kept"]) == 2


def test_days_of_a_drifting_stream_are_planned_for(as_json, model: Path, tmp_path: Path) -> None:
    """New ids enter, and every day the hottest rows are others; its windows are scenarios."""
    rng, days, samples = np.random.default_rng(0), 3, 2000
    hot = rng.zipf(1.3, (days * samples, 4)) % ROWS
    when = np.repeat(np.arange(days), samples)
    np.savez(tmp_path / "stream.npz", user=hot + ROWS * when[:, None], when=when * 86_400)
    words = ("--window", "when=1d", "--table-rows", 200_000, "-o", "day.npz")
    (drift,) = as_json("stats", tmp_path / "stream.npz", *words)["drift"]
    assert max(drift["hot_kept"]) == 0
    files = [f"day.1970-01-0{day}.npz" for day in (1, 2, 3)]
    how = ("--objective", "regret", "--scenarios", "none", "--effort", 0.005)
    document = as_json("plan", model, "--gpus", 2, "--stats", ",".join(files), *how)
    assert document["objective"] == "regret"
    assert [scenario["name"] + ".npz" for scenario in document["scenarios"]] == files
    assert 0 <= document["worst_regret"] <= document["proved_regret"]
