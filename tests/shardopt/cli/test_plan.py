"""`shardopt plan`: the JSON contract, the plan file, repeatability."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from predictor.model.plan_json import load_plan
from tests.shardopt.cli.conftest import Run, said_as_json
from tests.shardopt.conftest import MODEL

QUICK = ("--gpus", 2, "--effort", 0.005)

CONTRACT = {
    "iteration_ms",
    "lower_bound_ms",
    "gap",
    "surrogate_gap",
    "stopped_by",
    "world_size",
    "hardware",
    "provenance",
    "search_seconds",
    "plans",
    "baselines",
}
PLAN_CONTRACT = {"iteration_ms", "found_by", "breakdown", "memory", "tables"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model and its plan."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model.yaml").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """JSON output of the command that wrote plan.json."""
    return said_as_json(folder, "plan", "model.yaml", *QUICK, "--top-k", 2, "-o", "plan.json")


def test_json_holds_the_contract(found: dict[str, Any]) -> None:
    assert found.keys() >= CONTRACT
    assert found["gap"] == pytest.approx(found["iteration_ms"] / found["lower_bound_ms"] - 1)
    assert found["gap"] >= -1e-9
    assert found["stopped_by"] in ("work", "gap", "time")
    assert all(isinstance(note, str) for note in found["bound_notes"])
    assert (found["world_size"], found["hardware"]) == (2, "h100-sxm")
    assert found["provenance"] in ("measured", "published", "derived", "not validated")
    assert found["model"]["name"] == "small"
    assert len(found["model"]["sha256"]) == 64
    assert all(value >= found["lower_bound_ms"] for value in found["baselines"].values())


def test_plans_of_the_json_are_ranked_and_whole(found: dict[str, Any]) -> None:
    assert 1 <= len(found["plans"]) <= 2
    times = [plan["iteration_ms"] for plan in found["plans"]]
    assert times == sorted(times)
    assert times[0] == found["iteration_ms"]
    for plan in found["plans"]:
        assert plan.keys() >= PLAN_CONTRACT
        assert sum(plan["breakdown"].values()) == pytest.approx(plan["iteration_ms"])
        assert [r["rank"] for r in plan["memory"]] == [0, 1]
        assert plan["memory"][0].keys() >= {"hbm_bytes", "hbm_cap_bytes", "ddr_bytes"}
        assert plan["tables"].keys() == {"users", "items", "days"}
        table = plan["tables"]["users"]
        assert table.keys() >= {"sharding_type", "compute_kernel", "module", "shards"}
        assert table["shards"][0].keys() == {"rank", "offset", "size"}


def test_json_and_console_say_what_the_plan_is_expected_to_gain(
    run, model: Path, found: dict[str, Any]
) -> None:
    gain = found["expected_gain"]
    assert gain.keys() == {"baseline", "mean", "interval", "nominal", "draws"}
    foretold = 1 - found["iteration_ms"] / found["baselines"][gain["baseline"]]
    assert gain["nominal"] == pytest.approx(foretold)
    low, high = gain["interval"]
    assert low <= gain["mean"] <= high
    preferred = found["preferred_to"]
    assert preferred is None or preferred["iteration_ms"] < found["iteration_ms"]
    shown = run("plan", model, *QUICK, "--top-k", 2).out
    assert max(map(len, shown.splitlines())) <= 100
    text = " ".join(shown.split())  # a line break may fall anywhere
    for words in (found["verdict"], "h100-sxm", "90 % interval", "TorchRec's planner"):
        assert words in text
    quiet = run("plan", model, *QUICK, "--top-k", 2, "--quiet")
    assert (quiet.code, quiet.err, len(quiet.out.splitlines())) == (0, "", 1)


def test_the_file_is_a_plan_with_all_that_is_known(
    run, folder: Path, found: dict[str, Any]
) -> None:
    plan = load_plan(folder / "plan.json")
    assert (plan.world_size, plan.local_world_size) == (2, 2)
    assert plan.tables.keys() == {"users", "items", "days"}
    for key in ("iteration_ms", "lower_bound_ms", "model"):
        assert plan.meta[key] == found[key]
    assert (plan.meta["hardware"], plan.meta["batch_size"]) == ("h100-sxm", 32768)
    assert "shardopt" in plan.meta["versions"]
    done = run("predict", folder / "model.yaml", folder / "plan.json", "--json")
    assert (done.code, done.err) == (0, "")
    (prediction,) = json.loads(done.out)["predictions"]
    assert prediction["iteration_ms"] == pytest.approx(found["iteration_ms"], rel=1e-12)


def test_same_seed_same_plan(run, model: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        done = run("plan", model, *QUICK, "--no-cache", "--seed", 7, "-o", name)
        assert (done.code, done.err) == (0, ""), "no progress where stderr is no terminal"
    assert load_plan(tmp_path / "a.json").meta["seed"] == 7
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


@pytest.mark.parametrize("searcher", ["cpsat", "optuna"])
def test_one_searcher_alone(as_json, model: Path, searcher: str) -> None:
    assert as_json("plan", model, *QUICK, "--search", searcher)["surrogate_gap"] is None


def test_cluster_file_gives_ranks_memory_and_hardware(as_json, model: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "schema: 1\nhosts: 2\nranks_per_host: 1\nhardware: a100-40gb\nhbm_gib: [30, 20]\n"
    )
    data = as_json("plan", model, "--cluster", "cluster.yaml", "--effort", 0.005)
    assert (data["world_size"], data["local_world_size"]) == (2, 1)
    assert data["hardware"] == "a100-40gb"
    caps = [rank["hbm_cap_bytes"] for rank in data["plans"][0]["memory"]]
    assert caps[0] > caps[1]


def test_flags_override_the_profile_and_uniform_indices_are_said_once(run, model: Path) -> None:
    model.write_text(model.read_text().replace(", index_distribution: uniform", ""))
    flags = ("--hbm-gib", 10, "--ddr-gib", 5, "--reserve", 0, "--batch-size", 64)
    done = run("plan", model, *QUICK, *flags, "--json")
    data = json.loads(done.out)
    memory = data["plans"][0]["memory"][0]
    assert memory["hbm_cap_bytes"] == 10 * 2**30
    assert memory["ddr_cap_bytes"] == 5 * 2**30
    assert data["batch_size"] == 64
    assert done.err.count("count as uniform") == 1
    assert any("count as uniform" in note for note in data["notes"])


def test_a_failed_search_leaves_the_old_file(
    run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text("old")

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("search.solve.solve", interrupted)
    done = run("plan", model, *QUICK, "--no-cache", "-o", "plan.json")
    assert (done.code, done.out) == (130, "")
    assert done.err == "shardopt: error: interrupted\n"
    assert {path.name for path in tmp_path.iterdir()} == {"model.yaml", "plan.json"}
    assert (tmp_path / "plan.json").read_text() == "old"


COMMENTED = """\
schema: 1
name: commented   # ours
batch_size: 512
tables:
  # the histories
  - name: hist
    module: ec
    num_embeddings: 300000
    embedding_dim: 64
    pooling: none
    features: [{name: ids, pooling_factor: 40, index_distribution: {zipf: {alpha: 1.2}}}]  # long
dense: {in_features: 4, bottom_mlp: [8], interaction: concat, top_mlp: [8, 1]}
"""


@pytest.mark.usefixtures("advice")
def test_advice_that_is_applied_takes_as_long_as_foretold(as_json, refused, tmp_path: Path) -> None:
    source, applied, plan = (tmp_path / name for name in ("m.yaml", "new.yaml", "plan.json"))
    source.write_text(COMMENTED)
    data = as_json("plan", source, *QUICK, "--apply", applied, "-o", plan)
    advice = data["advice"]
    assert advice[0].keys() >= {"name", "target", "value", "iteration_ms", "gain", "costs"}
    assert [a["gain"] for a in advice] == sorted((a["gain"] for a in advice), reverse=True)
    predicted = as_json("predict", applied, plan)
    assert predicted["predictions"][0]["iteration_ms"] == pytest.approx(advice[0]["iteration_ms"])
    text = applied.read_text()
    assert all(comment in text for comment in ("# ours", "# the histories", "# long"))
    refused("plan", source, *QUICK, "--apply", applied, "--advice", "99", says="99")
    refused("plan", source, *QUICK, "--advice", "1", says="--apply")


@pytest.mark.usefixtures("advice")
def test_advice_alone_prices_every_setting_and_writes_the_model(
    run, as_json, refused, model: Path, tmp_path: Path
) -> None:
    flags = ("plan", model, "--gpus", 2, "--advice-only")
    alone = as_json(*flags, "--apply", tmp_path / "changed.yaml")
    assert alone["advice_considered"]["tried"] > 5
    assert {"name", "why"} == {
        key for skipped in alone["advice_considered"]["not_tried"] for key in skipped
    }
    first = alone["advice"][0]
    assert first["gain"] > 0
    again = as_json("plan", tmp_path / "changed.yaml", "--gpus", 2, "--advice-only")
    assert first["name"] not in {a["name"] for a in again["advice"] if a["value"] == first["value"]}
    refused(*flags, "-o", "plan.json", says="--output")
    shown = run(*flags, "--apply", tmp_path / "second.yaml", "--advice", "2,2").out
    counts = [" ".join(shown.split()).count(a["how"]) for a in alone["advice"][:2]]
    assert counts == [0, 1]


def test_constraints_have_a_price(as_json, run, model: Path) -> None:
    free = as_json("plan", model, "--gpus", 2, *QUICK)
    assert (free["constraint_costs"], free["unconstrained"]) == ([], None)
    tables = yaml.safe_load(model.read_text())
    for table in tables["tables"]:
        table["constraints"] = {"ranks": [0], "sharding_types": ["table_wise"]}
    model.write_text(yaml.safe_dump(tables))
    bound = as_json("plan", model, "--gpus", 2, *QUICK)
    relaxed = bound["unconstrained"]
    assert relaxed["iteration_ms"] < bound["iteration_ms"]
    assert relaxed["plan"]["tables"].keys() == bound["plans"][0]["tables"].keys()
    assert bound["constraint_costs"]
    for cost in bound["constraint_costs"]:
        assert cost.keys() == {"table", "constraint", "iteration_ms_without", "gain"}
    brief = run("plan", model, "--gpus", 2, *QUICK, "--quiet").out
    assert f"{relaxed['iteration_ms']:.4g} ms" in brief


def test_the_next_command_predicts_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, as_json: Callable[..., Any]
) -> None:
    """A plan file has no cluster; without it the prediction is another, which is said."""
    monkeypatch.chdir(tmp_path)
    Path("m.yaml").write_text(MODEL)
    Path("c.yaml").write_text(
        "schema: 1\nhosts: 2\nranks_per_host: 1\nlevels: [{name: thin, gbit_s: 0.1}]\n"
    )
    machine = ("--cluster", "c.yaml", "--batch-size", 64, "--reserve", 0.2)
    planned = run("plan", "m.yaml", *machine, "--effort", 0.005, "-o", "p.json")
    _, _, *command = planned.out.rpartition("Next:")[2].split()
    best = json.loads(Path("p.json").read_text())["iteration_ms"]
    again = as_json("predict", *command)
    assert again["predictions"][0]["iteration_ms"] == pytest.approx(best)
    plain = run("predict", "m.yaml", "p.json", "--batch-size", 64, "--json")
    assert json.loads(plain.out)["predictions"][0]["iteration_ms"] < best / 2
    assert "c.yaml" in plain.err
