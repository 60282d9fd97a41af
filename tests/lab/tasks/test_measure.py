"""A task set: its order, what it skips and continues, what it refuses; nothing is measured."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.cli import main, seeds
from lab.suites import COMMITTED
from lab.tasks import measure
from lab.tasks import task_set as parts
from lab.tasks.against import Task
from lab.tasks.measure import TaskSetSettings, measure_task_set
from predictor.errors import InputError
from predictor.model.topology import Topology
from shardopt.bench.job import Job
from shardopt.bench.rows import check_continues, read_rows, write_rows
from shardopt.bench.run import new_rows
from shardopt.config import load_model
from shardopt.config.write import with_digest
from shardopt.ranks.rank import RankDiedError
from shardopt.ranks.realtime import Runtime
from tests.builders import a_table, a_topology, a_workload, plan_of, table_wise
from tests.lab.validate.reports import a_round

MACHINE = {"processor": "a", "memory_bytes": 2**34, "torch": "2"}
WARM = {"rounds": 1, "settled": True}
DRIFTING = COMMITTED / "drifting" / "2026-11-22-plain"


def a_task(seed: int, plans: int, topology: Topology) -> Task:
    model = with_digest(a_workload(a_table("t", rows=100 + seed, dim=8)))
    found = {
        f"on_{at}": plan_of(
            model, topology, [table_wise(model.tables[0], at % topology.world_size)]
        )
        for at in range(plans)
    }
    return model, found


class Lab:
    """Stands for all that measures; remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.drawn: list[int] = []
        self.dies: dict[str, int] = {}
        """Rows file -> rounds after which a rank dies."""
        self.plans = 2

    def calibrate(self, settings: TaskSetSettings, say: Callable[[str], None]) -> None:
        self.calls.append("calibrate")

    def draw_task(self, seed: int, task_set: SimpleNamespace, models: str, count: int) -> Task:
        self.drawn.append(seed)
        return a_task(seed, self.plans, task_set.ranks)

    def run_bench(self, job: Job, path: Path, say: Callable[[str], None]) -> None:
        self.calls.append(path.name)
        self.jobs[path.name] = job
        rows = new_rows(job)
        rows.sessions.append({"environment": MACHINE, "started": "", "load": 0.1, "warmup": WARM})
        if path.exists():
            old = read_rows(path)
            check_continues(path, old, rows)
            old.sessions = old.sessions or rows.sessions
            rows = old
        for index in range(len(rows.rounds), job.rounds):
            if self.dies.get(path.name) == index:
                raise RankDiedError(f"rank 1 died in {path.name}", 3)
            rows.rounds.append(
                a_round(index, {name: [[1.0] * job.block] * 2 for name in rows.names})
            )
            write_rows(path, rows)
            say(f"round {index + 1} of {job.rounds}")


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    fake = Lab()
    monkeypatch.setattr(measure, "_calibrate", fake.calibrate)
    monkeypatch.setattr(measure, "draw_task", fake.draw_task)
    monkeypatch.setattr(measure, "run_bench", fake.run_bench)
    monkeypatch.setattr(measure, "load_task_set", ranks_of)
    monkeypatch.setattr(measure, "environment", lambda backend: dict(MACHINE))
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: {0, 1})
    return fake


def ranks_of(folder: Path) -> SimpleNamespace:
    about = json.loads((folder / "batch.json").read_text())
    return SimpleNamespace(ranks=a_topology(2, about["local_world_size"]))


def asked(folder: Path, tasks: list[int], **more: Any) -> TaskSetSettings:
    return TaskSetSettings(folder / "batch", tasks, **{"rounds": 2, "block": 3, **more})


def quiet(text: str) -> None:
    pass


def test_calibration_first_then_tasks_then_repeats(tmp_path: Path, lab: Lab) -> None:
    messages: list[str] = []
    measure_task_set(asked(tmp_path, [3, 0, 7], repeats=[7]), messages.append)
    assert lab.calls == [
        "calibrate",
        *(f"task-{seed:03d}.rows.json" for seed in (3, 0, 7)),
        "task-007.again.rows.json",
    ]
    assert "task 0 (2 of 3): round 1 of 2" in messages
    assert "task 7 again (1 of 1): round 2 of 2" in messages
    folder = tmp_path / "batch"
    about = json.loads((folder / "batch.json").read_text())
    started = about.pop("started")
    assert started.endswith("+00:00")
    assert about == {
        "schema": "shardopt.lab-batch/1",
        "topology": "loopback",
        "link_gbit_s": None,
        "world_size": 2,
        "local_world_size": 2,
        "block": 3,
        "models": "shapes",
        "runtime": "plain",
        "environment": MACHINE,
        "tasks": [0, 3, 7],
    }
    first, again = (lab.jobs[f"task-007.{end}"] for end in ("rows.json", "again.rows.json"))
    assert first == again
    assert load_model(folder / "task-007.yaml") == first.workload


def test_what_is_complete_is_skipped_and_the_rest_goes_on(tmp_path: Path, lab: Lab) -> None:
    lab.dies = {"task-001.rows.json": 1}
    with pytest.raises(RankDiedError) as caught:
        measure_task_set(asked(tmp_path, [0, 1, 2], repeats=[2]), quiet)
    assert str(caught.value).startswith("task 1 (2 of 3) did not end well: rank 1 died")
    assert caught.value.exit_code == 3
    assert lab.calls[-2:] == ["task-002.rows.json", "task-002.again.rows.json"]
    assert lab.drawn == [0, 1, 2]
    lab.calls, lab.dies = [], {}
    messages: list[str] = []
    measure_task_set(asked(tmp_path, [0, 1, 2], repeats=[2]), messages.append)
    assert lab.calls == ["calibrate", "task-001.rows.json"]
    assert lab.drawn == [0, 1, 2], "plans come from the files"
    assert len(read_rows(tmp_path / "batch" / "task-001.rows.json").rounds) == 2
    assert "task 0 (1 of 3): complete" in messages


def test_a_task_that_died_before_its_first_round_is_not_repeated(tmp_path: Path, lab: Lab) -> None:
    lab.dies = {"task-000.rows.json": 0, "task-001.rows.json": 0}
    messages: list[str] = []
    with pytest.raises(RankDiedError, match=r"so did task 1 \(2 of 3\)"):
        measure_task_set(asked(tmp_path, [0, 1, 2], repeats=[0]), messages.append)
    assert messages[-1].startswith("task 0 again (1 of 1): left out")


def test_more_rounds_and_more_tasks_are_added(tmp_path: Path, lab: Lab) -> None:
    measure_task_set(asked(tmp_path, [0]), quiet)
    measure_task_set(asked(tmp_path, [4, 0], rounds=3), quiet)
    assert len(read_rows(tmp_path / "batch" / "task-000.rows.json").rounds) == 3
    assert json.loads((tmp_path / "batch" / "batch.json").read_text())["tasks"] == [0, 4]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"processor": "b"}, "processor was 'a', now it is 'b'"),
        ({"memory_bytes": 2**35}, "memory in GiB was 16, now it is 32"),
        ({"extra": 1}, "extra was None, now it is 1"),
        ({"memory_bytes": 2**34 - 4096}, ""),  # some pages are no other machine
    ],
)
def test_another_machine_is_refused(
    tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], told: str
) -> None:
    measure_task_set(asked(tmp_path, [0]), quiet)
    lab.calls = []
    monkeypatch.setattr(measure, "environment", lambda backend: {**MACHINE, **change})
    with pytest.raises(InputError, match=told) if told else nullcontext():
        measure_task_set(asked(tmp_path, [1]), quiet)
    assert bool(lab.calls) != bool(told)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"link_gbit_s": 0.5}, "topology was 'loopback'"),
        ({"block": 4}, "block was 3"),
        ({"runtime": Runtime.TUNED}, "runtime was 'plain'"),
        ({"models": "published"}, "models was 'shapes'"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, lab: Lab, more: dict[str, Any], told: str
) -> None:
    measure_task_set(asked(tmp_path, [0]), quiet)
    lab.calls = []
    with pytest.raises(InputError, match=told):
        measure_task_set(asked(tmp_path, [0], **more), quiet)
    assert lab.calls == []


def test_a_folder_that_says_neither_is_tuned_and_random(tmp_path: Path, lab: Lab) -> None:
    measure_task_set(asked(tmp_path, [0], runtime=Runtime.TUNED), quiet)
    path = tmp_path / "batch" / "batch.json"
    about = json.loads(path.read_text())
    del about["runtime"], about["models"]
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match="models was 'random'"):
        measure_task_set(asked(tmp_path, [1], runtime=Runtime.TUNED), quiet)
    path.write_text(json.dumps({**about, "models": "shapes"}))
    with pytest.raises(InputError, match="runtime was 'tuned'"):
        measure_task_set(asked(tmp_path, [1]), quiet)


def test_plans_that_are_too_many_run_in_parts(
    tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_AT_ONCE", 3)
    lab.plans = 6
    messages: list[str] = []
    lab.dies = {"task-004.part-2.rows.json": 1}
    with pytest.raises(RankDiedError):
        measure_task_set(asked(tmp_path, [4], repeats=[4]), messages.append)
    names = ["task-004.rows.json", "task-004.part-2.rows.json", "task-004.part-3.rows.json"]
    # a part that dies ends the task, what is left of it is measured by the next call
    assert lab.calls == ["calibrate", *names[:2], "task-004.again.rows.json"]
    assert "task 4 (1 of 1), part 2 of 3: round 1 of 2" in messages
    lab.calls, lab.dies = [], {}
    measure_task_set(asked(tmp_path, [4], repeats=[4]), messages.append)
    assert lab.calls == ["calibrate", *names[1:]]
    assert lab.drawn == [4]
    folder = tmp_path / "batch"
    found = [read_rows(folder / name).names for name in names]
    assert found == [["on_0", "on_1", "on_2"], ["on_0", "on_3", "on_4"], ["on_0", "on_5"]]
    assert read_rows(folder / "task-004.again.rows.json").names == found[0]


def test_a_plan_that_never_fits_is_named_and_left_out(
    tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "split_plans", lambda _, plans, __: ([dict(plans)], ["huge"]))
    messages: list[str] = []
    measure_task_set(asked(tmp_path, [4]), messages.append)
    assert "huge" in messages[0]


def test_a_link_makes_two_hosts(tmp_path: Path, lab: Lab) -> None:
    measure_task_set(asked(tmp_path, [0], link_gbit_s=4), quiet)
    about = json.loads((tmp_path / "batch" / "batch.json").read_text())
    assert (about["topology"], about["local_world_size"]) == ("4 Gbit/s", 1)
    job = lab.jobs["task-000.rows.json"]
    assert job.link is not None
    assert (job.link.gbit_s, job.local_world_size) == (4, 1)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"world_size": 1}, "ranks is 1"),
        ({"world_size": 3}, "ranks is 3"),
        ({"repeats": [5]}, "task 5"),
        ({"models": "shape"}, "'shape'"),
        (
            {"like": COMMITTED / "drifting" / "2026-11-22-plain", "tasks": [99]},
            "task 99",
        ),
        ({"like": COMMITTED}, "batch.json"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    tmp_path: Path, lab: Lab, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        measure_task_set(asked(tmp_path, **{"tasks": [0], **more}), quiet)
    assert lab.calls == []


def test_tasks_are_measured_again_as_another_set_has_them(tmp_path: Path, lab: Lab) -> None:
    measure_task_set(asked(tmp_path, [3], like=DRIFTING), quiet)
    assert lab.drawn == []
    assert json.loads((tmp_path / "batch" / "batch.json").read_text())["models"] == "drifting"
    job, was = lab.jobs["task-003.rows.json"], read_rows(DRIFTING / "task-003.rows.json")
    assert list(job.plans) == was.names
    window = load_model(DRIFTING / "task-003.window-2.yaml")
    name = next(name for name in was.names if name.endswith(" @2"))
    assert job.data[name] == window != job.workload
    assert job.workload == load_model(DRIFTING / "task-003.yaml")
    assert len(read_rows(tmp_path / "batch" / "task-003.rows.json").rounds) == 2


def test_a_model_that_is_no_dlrm_is_built_again(tmp_path: Path, lab: Lab) -> None:
    pytest.importorskip("torchrec")
    from lab.rankers import RankerBuilder

    like = COMMITTED / "architectures" / "2026-11-22-plain"
    measure_task_set(asked(tmp_path, [1], like=like), quiet)
    job, was = lab.jobs["task-001.rows.json"], read_rows(like / "task-001.rows.json")
    assert isinstance(job.build, RankerBuilder)
    assert job.facts["architecture"] == was.model["architecture"]
    assert read_rows(tmp_path / "batch" / "task-001.rows.json").model == was.model


def test_a_folder_without_a_parent_is_refused(tmp_path: Path, lab: Lab) -> None:
    with pytest.raises(InputError, match="no"):
        measure_task_set(asked(tmp_path / "no", [0]), quiet)


def test_seeds_are_numbers_and_ranges() -> None:
    assert seeds("--tasks", "0-3") == [0, 1, 2, 3]
    assert seeds("--tasks", "7, 3,2-4") == [7, 3, 2, 4]


@pytest.mark.parametrize("given", ["", "a", "3-1", "-1", "1,,2", "1-", "1.5", "9999999"])
def test_other_texts_are_refused(given: str) -> None:
    with pytest.raises(InputError, match="--tasks"):
        seeds("--tasks", given)


def test_the_command_measures_a_task_set(
    tmp_path: Path, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["batch", str(tmp_path / "b"), "--tasks", "0-1", "--rounds", "1"]
    assert main([*words, "--repeat", "1"]) == 0
    assert lab.calls[1:] == [
        "task-000.rows.json",
        "task-001.rows.json",
        "task-001.again.rows.json",
    ]
    assert "shardopt: task 1 (2 of 2): round 1 of 1" in capsys.readouterr().err
    assert main([*words, "--rounds", "0"]) == 2
