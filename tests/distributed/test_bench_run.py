"""`shardopt bench run` over real processes: measured, interrupted by a death, taken up again."""

import json
import os
import signal
from pathlib import Path

import pytest

from predictor.errors import InfeasibleError, InputError, PlanError
from predictor.model.plan_json import plan_to_dict
from shardopt.bench.job import Job, check_job, check_memory, rank_bytes
from shardopt.bench.rows import read_rows
from shardopt.bench.run import run_bench
from shardopt.cli.app import main
from shardopt.config import read_model
from shardopt.plan import load_plan

pytest.importorskip("torchrec")
pytestmark = pytest.mark.distributed

MODEL = """
schema: 1
name: tiny
batch_size: 16
train_pipeline: {pipeline}
tables:
  - {{name: a, num_embeddings: 100, embedding_dim: 8,
      features: [{{name: fa, pooling_factor: 2, index_distribution: uniform}}]}}
  - {{name: b, num_embeddings: 50, embedding_dim: 8,
      features: [{{name: fb, pooling_factor: 1, index_distribution: uniform}}]}}
dense: {{in_features: 4, bottom_mlp: [8], interaction: dot, top_mlp: [8, 1]}}
"""
ROWS_OF = {"a": 100, "b": 50}


def write_plans(folder: Path, world_size: int = 2) -> list[Path]:
    """Both tables whole, on different ranks, and both cut by rows."""

    def table(kind: str, shards: list[tuple[int, int, int]]) -> dict[str, object]:
        return {
            "sharding_type": kind,
            "compute_kernel": "fused",
            "shards": [{"rank": r, "offset": [at, 0], "size": [n, 8]} for r, at, n in shards],
        }

    whole = {name: table("table_wise", [(i, 0, n)]) for i, (name, n) in enumerate(ROWS_OF.items())}
    split = {
        name: table("row_wise", [(0, 0, n // 2), (1, n // 2, n // 2)])
        for name, n in ROWS_OF.items()
    }
    paths = []
    for name, tables in (("whole", whole), ("split", split)):
        paths.append(folder / f"{name}.json")
        data = {"schema": "shardopt.plan/1", "world_size": world_size, "tables": tables}
        paths[-1].write_text(json.dumps(data))
    return paths


def make_job(folder: Path, pipeline: str = "base", **settings: object) -> Job:
    model = folder / "model.yaml"
    model.write_text(MODEL.format(pipeline=pipeline))
    workload, _, _ = read_model(model)
    plans = {path.stem: load_plan(path) for path in write_plans(folder)}
    return Job(workload, plans, **settings)


@pytest.mark.slow
def test_a_death_keeps_what_is_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    pids: list[int] = []

    def told(text: str) -> None:
        if text.startswith("round 2 "):
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(Exception, match="rank 1 died of signal SIGKILL") as caught:
        run_bench(make_job(tmp_path, rounds=10_000), path, say=told, on_start=pids.extend)
    assert f"saved in {path}" in str(caught.value)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    kept = read_rows(path)
    assert len(kept.rounds) >= 2
    assert kept.sessions[0]["warmup"]["settled"] in (True, False)

    rounds = len(kept.rounds) + 1
    rows = run_bench(make_job(tmp_path, rounds=rounds), path)
    assert rows == read_rows(path)
    assert rows is not None
    assert rows.rounds[:-1] == kept.rounds
    assert [measured["session"] for measured in rows.rounds] == [0] * (rounds - 1) + [1]
    again = run_bench(make_job(tmp_path, rounds=rounds), path, on_start=pids.extend)
    assert again == rows
    assert len(pids) == 2, "nothing was left to measure"


@pytest.mark.slow
def test_the_command_runs_sparse_dist_and_prints_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    make_job(tmp_path, "sparse_dist")
    plans = [str(tmp_path / "whole.json"), str(tmp_path / "split.json")]
    words = ["bench", "run", str(tmp_path / "model.yaml"), *plans, "--rounds", "2", "--block", "3"]
    assert main([*words, "--warmup", "1", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["plan"] for row in found["rows"]] == plans
    for row in found["rows"]:
        assert len(row["samples_ms"]) == 6
        assert row["median_ms"] > 0
        assert row["predicted_ms"] > 0
        assert len(row["ranks_median_ms"]) == 2
    assert found["rows"][1]["significant"] is False
    assert set(found["reference"]) == {"lookup_forward", "lookup_backward", "gemm", "all_to_all"}
    assert found["hardware"] == "cpu-gloo"


@pytest.mark.slow
def test_a_plan_that_torchrec_cannot_run_ends_in_its_own_message(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    data = plan_to_dict(job.plans["split"])
    for shard in data["tables"]["a"]["shards"]:
        shard["rank"] = 1 - shard["rank"]
    (tmp_path / "split.json").write_text(json.dumps(data))
    job = Job(job.workload, {"split": load_plan(tmp_path / "split.json")})
    with pytest.raises(Exception, match=r"table 'a'.*can be predicted, not run") as caught:
        run_bench(job)
    assert caught.value.exit_code == 2


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("shardopt.ranks.launch._start", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_another_world_size_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(PlanError, match="whole is for 2 ranks, but 4 are asked for"):
        run_bench(job, given_ranks=4)
    three = {"three": load_plan(write_plans(tmp_path, 3)[0])}
    with pytest.raises(PlanError, match=r"three is for 3 ranks .* whole for 2"):
        run_bench(Job(job.workload, {**job.plans, **three}))
    many = len(os.sched_getaffinity(0)) + 1
    plans = {"many": load_plan(write_plans(tmp_path, many)[0])}
    with pytest.raises(InputError, match=f"for {many} ranks, but this process may use"):
        run_bench(Job(job.workload, plans))


@pytest.mark.usefixtures("nothing_starts")
def test_what_the_machine_lacks_is_said_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    needs = rank_bytes(job.workload, list(job.plans.values()))
    check_memory(job, sum(needs))
    with pytest.raises(InfeasibleError, match=r"rank 0 .*rank 1 .*100 B are missing"):
        check_memory(job, sum(needs) - 100)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="nccl needs CUDA"):
        check_job(make_job(tmp_path, backend="nccl"))
    monkeypatch.setattr("shardopt.extras.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install torchrec"):
        check_job(job)


def test_the_rows_file_is_no_input_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path)
    model, plan = str(tmp_path / "model.yaml"), str(tmp_path / "whole.json")
    assert main(["bench", "run", model, plan, "-o", plan]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert main(["bench", "run", model, plan, "--warmup", "soon"]) == 2
    assert "--warmup is soon" in capsys.readouterr().err
