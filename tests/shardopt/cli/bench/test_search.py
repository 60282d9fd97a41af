"""`shardopt bench search`: both planners on one model, timed and compared."""

from pathlib import Path

import pytest

import shardopt

ROOT = Path(shardopt.__file__).resolve().parent.parent
QUICK = ("--gpus", 2, "--effort", 0.005, "--repeat", 2)
TIMED = ("shardopt_search", "shardopt_plan", "torchrec_planner")


@pytest.fixture
def model(model: Path) -> Path:
    """The small model under names that PyTorch takes."""
    model.write_text(model.read_text().replace("name: items", "name: goods"))
    return model


@pytest.mark.slow
def test_json_holds_times_and_plans(as_json, model: Path) -> None:
    pytest.importorskip("torchrec")
    data = as_json("bench", "search", model, *QUICK, "--hardware", "a100-80gb")
    assert (data["world_size"], data["hardware"], data["repeat"]) == (2, "a100-80gb", 2)
    assert data["times"].keys() == set(TIMED)
    for name in TIMED:
        times = data["times"][name]
        assert len(times["samples_s"]) == 2
        assert 0 < times["min_s"] <= times["median_s"] <= times["max_s"]
        assert times["stable"] in (True, False)
    search, plan = (data["times"][name]["median_s"] for name in TIMED[:2])
    assert data["start_up_s"] == pytest.approx(plan - search)
    assert data["significant"] in (True, False)
    ours, torchrec = data["plans"]["shardopt"], data["plans"]["torchrec"]
    assert ours["lower_bound_ms"] <= ours["iteration_ms"] <= torchrec["iteration_ms"]
    assert (ours["fits"], torchrec["fits"]) == (True, True)
    assert torchrec["rating_ms"] > 0
    for plan in (ours, torchrec):
        assert plan["tables"].keys() == {"users", "goods", "days"}
        assert sum(plan["breakdown"].values()) == pytest.approx(plan["iteration_ms"])
    assert data["machine"].keys() >= {"cores", "python", "load_average"}
    assert "shardopt" in data["versions"]


@pytest.mark.slow
def test_the_plan_is_that_of_the_plan_command(as_json, model: Path) -> None:
    """The words that the timed command gets ask for the same search."""
    pytest.importorskip("torchrec")
    flags = ("--gpus", 2, "--effort", 0.05, "--seed", 4, "--batch-size", 4096, "--hbm-gib", 30)
    bench = as_json("bench", "search", model, *flags, "--repeat", 1)
    plan = as_json("plan", model, *flags)
    assert bench["plans"]["shardopt"]["iteration_ms"] == plan["iteration_ms"]
    assert bench["plans"]["shardopt"]["tables"] == plan["plans"][0]["tables"]
    baseline = plan["baselines"]["torchrec default"]
    assert bench["plans"]["torchrec"]["iteration_ms"] == pytest.approx(baseline)
    assert bench["times"]["shardopt_plan"]["stable"] is None
    assert bench["significant"] is None


@pytest.mark.slow
def test_models_that_torchrec_cannot_build(refused, model: Path) -> None:
    pytest.importorskip("torchrec")
    text = model.read_text()
    model.write_text(text.replace("name: goods", "name: items"))
    refused("bench", "search", model, *QUICK, says="table 'items'")
    twin = """\
  - name: users
    module: other
    num_embeddings: 10
    embedding_dim: 64
    features: [{name: user_2, pooling_factor: 7, index_distribution: uniform}]
dense:"""
    model.write_text(text.replace("dense:", twin))
    refused("bench", "search", model, *QUICK, says="two modules have a table 'users'")
    model.write_text(text)
    none = ("--hbm-gib", 0.001, "--ddr-gib", 0.001)
    refused("bench", "search", model, *QUICK, *none, code=3, says="HBM")


MEASURED = """\
dense:
  measured: {batch_size: 32768, forward_ms: 1, backward_ms: 2, optimizer_ms: 0.1, gradient_mib: 1}
"""


@pytest.mark.parametrize("dense", ["captured", "measured"])
@pytest.mark.parametrize("command", [("bench", "search"), ("plan", "--confirm", 1)])
def test_a_model_without_layers_is_refused_before_anything_is_planned(
    refused, model: Path, monkeypatch: pytest.MonkeyPatch, dense: str, command: tuple[object, ...]
) -> None:
    def planned(*args: object, **kwargs: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("shardopt.bench.planners.compare", planned)
    monkeypatch.setattr("shardopt.api.answer.find_answer", planned)
    if dense == "captured":
        model = ROOT / "configs/models/ranker.yaml"
    else:
        text = model.read_text()
        model.write_text(text[: text.index("dense:")] + MEASURED)
    flags = ("--gpus", 2, "--effort", 0.005)
    refused(*command, model, *flags, says="bottom_mlp")


def test_nothing_to_measure(run, refused) -> None:
    refused("bench", says="shardopt bench --help")
    done = run("bench", "--help")
    assert (done.code, "search" in done.out) == (0, True)
