"""`shardopt bench run` over real processes: measured, interrupted by a death, taken up again."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.errors import InfeasibleError, InputError, PlanError
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.plan_json import plan_to_dict
from predictor.model.workload import DenseArch
from shardopt.bench.job import Job, check_job, check_memory, rank_bytes
from shardopt.bench.rows import read_rows
from shardopt.bench.run import run_bench
from shardopt.cli.app import main
from shardopt.config.write import write_model
from tests.builders import a_table, a_workload, cut, table_wise

pytestmark = pytest.mark.distributed

DENSE = DenseArch(4, (8,), (8, 1), "dot")
TABLES = (a_table("a", 100, 8), a_table("b", 50, 8))
WORKLOAD = a_workload(*TABLES, batch_size=16, dense=DENSE)
PLANS = {
    "whole": [table_wise(table, rank) for rank, table in enumerate(TABLES)],
    "split": [cut(table, ShardingType.ROW_WISE, [0, 1]) for table in TABLES],
}


def plan(name: str, world_size: int = 2) -> ShardingPlan:
    return ShardingPlan(dict(zip(WORKLOAD.keys, PLANS[name], strict=True)), world_size, world_size)


def make_job(**settings: Any) -> Job:
    return Job(WORKLOAD, {name: plan(name) for name in PLANS}, **settings)


def write_job(folder: Path) -> list[str]:
    """Files of a model of the pipeline sparse_dist and of the plans."""
    model = folder / "model.yaml"
    write_model(model, replace(WORKLOAD, train_pipeline="sparse_dist"))
    for name in PLANS:
        (folder / f"{name}.json").write_text(json.dumps(plan_to_dict(plan(name))))
    return [str(model), *(str(folder / f"{name}.json") for name in PLANS)]


@pytest.mark.slow
def test_a_death_keeps_what_is_finished_and_the_same_command_goes_on(
    tmp_path: Path, pids: list[int]
) -> None:
    path = tmp_path / "rows.json"

    def told(text: str) -> None:
        if text.startswith("round 2 "):
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(Exception, match="rank 1 died of signal SIGKILL") as caught:
        run_bench(make_job(rounds=10_000), path, say=told)
    assert f"saved in {path}" in str(caught.value)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    kept = read_rows(path)
    assert len(kept.rounds) >= 2
    assert kept.sessions[0]["warmup"]["settled"] in (True, False)

    rounds = len(kept.rounds) + 1
    rows = run_bench(make_job(rounds=rounds), path)
    assert rows == read_rows(path)
    assert rows is not None
    assert rows.rounds[:-1] == kept.rounds
    assert [measured["session"] for measured in rows.rounds] == [0] * (rounds - 1) + [1]
    count = len(pids)
    assert run_bench(make_job(rounds=rounds), path) == rows
    assert len(pids) == count, "nothing was left to measure"


@pytest.mark.slow
def test_the_command_runs_sparse_dist_and_prints_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model, *plans = write_job(tmp_path)
    words = ["bench", "run", model, *plans, "--rounds", "2", "--block", "3", "--warmup", "1"]
    assert main([*words, "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["plan"] for row in document["rows"]] == plans
    for row in document["rows"]:
        assert len(row["samples_ms"]) == 6
        assert row["median_ms"] > 0
        assert row["predicted_ms"] > 0
        assert len(row["ranks_median_ms"]) == 2
    assert document["rows"][1]["significant"] is False
    assert set(document["reference"]) == {"lookup_forward", "lookup_backward", "gemm", "all_to_all"}
    assert document["hardware"] == "cpu-gloo"


@pytest.mark.slow
def test_a_plan_that_torchrec_cannot_run_ends_in_its_own_message() -> None:
    turned = cut(TABLES[0], ShardingType.ROW_WISE, [1, 0])
    split = plan("split")
    job = Job(WORKLOAD, {"split": replace(split, tables={**split.tables, "a": turned})})
    with pytest.raises(Exception, match=r"table 'a'.*not run") as caught:
        run_bench(job)
    assert caught.value.exit_code == 2


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("shardopt.ranks.launch._start", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_another_world_size_is_refused_before_any_process_starts() -> None:
    with pytest.raises(PlanError, match="2 ranks, but 4"):
        run_bench(make_job(), given_ranks=4)
    with pytest.raises(PlanError, match=r"three is for 3 ranks .* whole for 2"):
        run_bench(Job(WORKLOAD, {"whole": plan("whole"), "three": plan("whole", 3)}))
    many = len(os.sched_getaffinity(0)) + 1
    with pytest.raises(InputError, match=f"for {many} ranks"):
        run_bench(Job(WORKLOAD, {"many": plan("whole", many)}))


@pytest.mark.usefixtures("nothing_starts")
def test_what_the_machine_lacks_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    needs = rank_bytes(job.workload, list(job.plans.values()))
    check_memory(job, sum(needs))
    with pytest.raises(InfeasibleError, match=r"rank 0 .*rank 1 .*100 B"):
        check_memory(job, sum(needs) - 100)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="needs CUDA and as many GPUs"):
        check_job(make_job(backend="nccl"))
    monkeypatch.setattr("shardopt.extras.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install torchrec"):
        check_job(job)


def test_the_rows_file_is_no_input_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plan, _ = write_job(tmp_path)
    assert main(["bench", "run", model, plan, "-o", plan]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert main(["bench", "run", model, plan, "--warmup", "soon"]) == 2
    assert "--warmup is soon" in capsys.readouterr().err
