"""Sessions in a group of one rank: what runs, fails, and goes on."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shardopt.race import Entrant, Race, run_race
from shardopt.ranks.rank import Talk

torch = pytest.importorskip("torch")
dist = torch.distributed
room = importlib.import_module("shardopt.ranks.sessions")
Alarm, JoinedSessions = room.Alarm, room.JoinedSessions

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def race_of(*names: str) -> Race:
    race = Race()
    race.enter({name: Entrant(name, name) for name in names})
    return race


class Plans:
    """Steps that count, or fail.

    Args:
        fails: plan -> what its step raises.
        most: plans that fit into memory together.
        after: steps before which none fails.
    """

    def __init__(
        self, fails: dict[str, BaseException] | None = None, most: int = 9, after: int = 0
    ) -> None:
        self.fails, self.most, self.after = fails or {}, most, after
        self.steps: list[str] = []
        self.alive: set[str] = set()

    def __call__(self, plan: str, group: Any) -> Any:
        self.alive = {plan} if group is not getattr(self, "group", None) else self.alive | {plan}
        self.group = group
        if len(self.alive) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def step() -> None:
            self.steps.append(plan)
            if plan in self.fails and len(self.steps) > self.after:
                raise self.fails[plan]

        return step


def measured(plans: Plans, *names: str, seconds: float = 0.05) -> Race:
    race = race_of(*names)
    sessions = JoinedSessions(plans, CPU, Talk())
    run_race(race, sessions, sessions.now() + seconds)
    sessions.talk.close()
    return race


@pytest.mark.usefixtures("group")
def test_a_plan_that_dies_is_out_and_the_others_go_on() -> None:
    race = measured(Plans({"bad": ValueError("no such shard")}), "good", "bad")
    assert race.left == ["good"]
    assert "ValueError: no such shard" in race.why["bad"]
    assert race.times["good"]


@pytest.mark.usefixtures("group")
def test_a_plan_that_runs_out_of_memory_alone_is_out() -> None:
    race = measured(Plans({"large": torch.OutOfMemoryError("CUDA out of memory")}), "large", "a")
    assert list(race.why) == ["large"]
    assert "CUDA out of memory" in race.why["large"]
    assert race.times["a"]


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_plans_that_do_not_fit_together_run_one_at_a_time() -> None:
    race = measured(Plans(most=1), "a", "b", "c")
    assert not race.why
    assert all(race.times[name] for name in "abc")


@pytest.mark.usefixtures("group")
def test_an_interrupt_ends_it_on_all_ranks_with_what_is_there() -> None:
    # in the second round, however slow the machine is
    race = measured(Plans({"b": KeyboardInterrupt()}, after=30), "a", "b", seconds=60)
    assert race.interrupted
    assert race.leader is not None
    assert not race.why


@pytest.mark.usefixtures("group")
def test_an_interrupt_before_any_plan_was_timed_ends_the_script() -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(Plans({"b": KeyboardInterrupt()}), "a", "b")


@pytest.mark.usefixtures("group")
def test_on_gpus_one_failed_rank_makes_the_others_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a stand-in for a GPU, which share the store that a process group has."""
    store, aborted = dist.HashStore(), []
    monkeypatch.setattr(room, "LOOK_S", 0.01)
    monkeypatch.setattr(room, "rendezvous", lambda: store)
    monkeypatch.setattr(room, "abort_nccl", aborted.append)
    failed, waits = Alarm("group of rank 0", 1), Alarm("group of rank 1", 1)
    other = Alarm("group of another session", 2)
    failed.sound()
    waits.thread.join()
    for alarm in (failed, waits, other):
        alarm.stop()
    assert set(aborted) == {"group of rank 0", "group of rank 1"}


@pytest.mark.usefixtures("group")
def test_on_gpus_plans_run_on_nccl_and_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, only the requested group and the clock can be checked."""
    asked: list[str] = []
    new_group = dist.new_group

    def on_gloo(*, backend: str, timeout: Any) -> Any:
        asked.append(backend)
        return new_group(backend="gloo", timeout=timeout)

    monkeypatch.setattr(dist, "new_group", on_gloo)
    monkeypatch.setattr(dist, "barrier", lambda group: asked.append("barrier"))
    monkeypatch.setattr(room, "steps_ms", lambda step, count, device: [step() or 2.0] * count)
    gpu: Any = SimpleNamespace(type="cuda")

    def make(plan: str, group: Any) -> Any:
        asked.append("build")
        return lambda: None

    race, sessions = race_of("a"), JoinedSessions(make, gpu, Talk())
    sessions.run(race, 1, ["a"], 0.0)
    # ranks agree over gloo, and those of NCCL connect before any can fail
    assert asked[:4] == ["gloo", "nccl", "barrier", "build"]
    assert race.median_ms("a") == 2.0
