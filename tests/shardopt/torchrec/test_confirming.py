"""Plans in a training script, in a group of one rank: what runs, fails, and is left as it was."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from predictor.errors import InputError
from shardopt.race import Entrant, Race, run_race
from shardopt.ranks.rank import Talk
from shardopt.torchrec import confirming as room
from shardopt.torchrec.confirming import Alarm, Confirm, JoinedSessions, confirm, copy_of, untouched
from tests.shardopt.torchrec.hook_models import bag

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


def test_the_random_generators_go_on_as_if_nothing_had_run() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(3)
    random.seed(3)
    with untouched([]):
        torch.rand(7)
        random.random()
    assert (float(torch.rand(())), random.random()) == expected


def test_a_loader_with_a_generator_of_its_own_begins_anew() -> None:
    def loader() -> torch.utils.data.DataLoader[int]:
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(range(50), shuffle=True, generator=generator)

    asked, other = loader(), loader()
    with untouched(asked):
        next(iter(asked))
    assert list(asked) == list(other)


def test_a_copy_has_real_layers_and_tables_on_the_meta_device() -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    module = nn.Sequential(EmbeddingBagCollection(tables=[bag("t", 9, 4)]), nn.Linear(4, 1))
    weight = module[0].embedding_bags["t"].weight
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    copied = copy_of(module, [EmbeddingBagCollectionSharder()])
    other = copied[0].embedding_bags["t"].weight
    assert (other.device.type, weight.device.type) == ("meta", "cpu")
    assert other._optimizer_classes == [torch.optim.SGD]
    assert other._optimizer_kwargs == [{"lr": 0.5}]
    other._optimizer_kwargs[0]["optimizer"] = "as TorchRec does when it shards"
    assert weight._optimizer_kwargs == [{"lr": 0.5}]
    assert torch.equal(copied[1].weight, module[1].weight)
    assert copied[1].weight is not module[1].weight


@pytest.mark.usefixtures("group")
def test_a_module_that_cannot_be_copied_or_a_loader_without_batches_says_so() -> None:
    class Locked(nn.Module):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("locked")

    with pytest.raises(InputError, match="Locked cannot be copied"):
        copy_of(Locked(), [])
    with pytest.raises(InputError, match="no batch"):
        confirm(nn.Linear(1, 1), {}, Confirm([]))


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        confirm(nn.Linear(1, 1), {}, Confirm([1]))


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
