"""Confirmation of plans on simulated ranks: who wins, who is out, and the report."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from predictor.errors import InfeasibleError, InputError
from predictor.hardware.learned import Learned
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from search.problem import RankedPlan
from shardopt.api.document import confirmation_keys
from shardopt.api.request import Machine
from shardopt.api.setting import Setting, resolve
from shardopt.bench import confirm as room
from shardopt.bench.confirm import StartedSessions, check_minutes, confirm
from shardopt.bench.job import Job
from shardopt.race import Confirmation, Entrant
from shardopt.ranks.rank import Rank, RankDiedError

MODEL = """
schema: 1
name: small
batch_size: 64
tables:
  - {name: a, num_embeddings: 400, embedding_dim: 32, features: [{name: fa, pooling_factor: 8}]}
dense: {in_features: 4, bottom_mlp: [32], interaction: dot, top_mlp: [16, 1]}
"""
ROUNDS = 20


def plan(place: int) -> ShardingPlan:
    """A table on one of two ranks, or cut after some rows."""
    cut = place // 2 * 100
    shards = [Shard(place % 2, (0, 0), (cut or 400, 32))]
    if cut:
        shards.append(Shard(1 - place % 2, (cut, 0), (400 - cut, 32)))
    kind = ShardingType.ROW_WISE if cut else ShardingType.TABLE_WISE
    return ShardingPlan({"a": TablePlan(kind, ComputeKernel.FUSED, tuple(shards))}, 2, 2)


PLANS = {name: Entrant(plan(i), name) for i, name in enumerate(("plan 1", "plan 2", "torchrec"))}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    (tmp_path / "model.yaml").write_text(MODEL)
    return resolve(str(tmp_path / "model.yaml"), Machine(gpus=2, hardware="cpu-gloo"))


@dataclass
class Play:
    """Confirms with ranks whose steps take given times; None: a rank dies of the plan."""

    setting: Setting
    folder: Path
    patch: pytest.MonkeyPatch
    sessions: list[list[str]] = field(default_factory=list)

    def __call__(
        self,
        times: Mapping[str, float | None],
        fits: int = 9,
        ends: int = 99,
        again: Any = None,
        learned: Any = None,
    ) -> Confirmation:
        def ranks(_: object, __: int, job: Job, *rest: Any, on_report: Any, **___: object) -> None:
            self.sessions.append(list(job.plans))
            if not ends:
                raise KeyboardInterrupt
            for name in job.plans:
                on_report(0, {"kind": "plan", "name": name})
                if times[name] is None:
                    raise RankDiedError("rank 1 died of MemoryError")
            for index in range(ROUNDS):
                measured = {name: times[name] for name in job.plans}
                on_report(0, {"kind": "round", "key": (rest[2], index), "ms": measured})
            if len(self.sessions) >= ends:
                raise KeyboardInterrupt

        def check(job: Job) -> None:
            if len(job.plans) > fits:
                raise InfeasibleError("too large")

        self.patch.setattr(room, "run_ranks", ranks)
        self.patch.setattr(room, "check_job", check)
        self.patch.setattr(room, "learned_from", lambda *_: (learned, []))
        sessions = StartedSessions(self.setting, self.folder)
        confirmation, _ = confirm(self.setting, PLANS, sessions, self.folder, 1.0, plan_again=again)
        return confirmation


@pytest.fixture
def play(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(setting, tmp_path, monkeypatch)


def test_the_fastest_measured_plan_wins(play: Play) -> None:
    confirmation = play({"plan 1": 11.0, "plan 2": 9.0, "torchrec": 10.0})
    assert confirmation.best.name == "plan 2"
    assert confirmation.gain == pytest.approx((0.1, 0.1, 0.1))
    assert confirmation_keys(confirmation)["measured_gain"] == pytest.approx(
        {"value": 0.1, "low": 0.1, "high": 0.1}
    )
    dropped = {plan.name: plan.dropped_after for plan in confirmation.plans}
    assert dropped == {"plan 1": ROUNDS, "plan 2": None, "torchrec": None}


def test_a_plan_of_which_a_rank_dies_is_out_and_the_others_go_on(
    play: Play,
) -> None:
    confirmation = play({"plan 1": None, "plan 2": 9.0, "torchrec": 10.0})
    assert confirmation.best.name == "plan 2"
    dead = confirmation.plans[0]
    assert (dead.name, dead.dropped_after, dead.median_ms) == ("plan 1", 0, None)
    assert confirmation.notes == ("plan 1 is out: rank 1 died of MemoryError",)


def test_an_interrupt_leaves_the_best_so_far(play: Play) -> None:
    confirmation = play({"plan 1": 10.0, "plan 2": 9.9, "torchrec": 10.0}, ends=1)
    assert confirmation.interrupted
    assert confirmation.best.name == "plan 2"


def test_an_interrupt_before_any_plan_was_timed_ends_the_command(play: Play) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(dict.fromkeys(PLANS, 10.0), ends=0)


def test_plans_that_do_not_fit_together_run_in_halves(play: Play) -> None:
    confirmation = play({"plan 1": 11.0, "plan 2": 9.0, "torchrec": 10.0}, fits=1)
    assert confirmation.best.name == "plan 2"
    sizes = {len(order) for order in play.sessions}
    assert sizes == {1}


def test_a_plan_that_does_not_fit_alone_is_out(play: Play) -> None:
    with pytest.raises(InputError, match="too large"):
        play(dict.fromkeys(PLANS, 10.0), fits=0)


def result_of(*plans: ShardingPlan) -> Any:
    ranked = tuple(RankedPlan(plan, 0.001 * (i + 1), "search") for i, plan in enumerate(plans))
    return SimpleNamespace(plans=ranked, best=ranked[0])


def test_plans_found_with_what_was_learned_are_measured_until_the_best_stays(play: Play) -> None:
    """plan -> confirm -> learn -> plan."""
    factors = []

    def again(setting: Setting, seconds: float) -> Any:
        factors.append(setting.hardware.learned)
        return result_of(plan(3), plan(0))

    times = {"plan 1": 11.0, "plan 2": 9.0, "torchrec": 10.0, "plan 3": 8.0}
    learned = Learned(
        model="small", plans=("a",), machine="m", steps=1, date="d", factors=(), errors={},
        evidence=(),
    )  # fmt: skip
    confirmation = play(times, again=again, learned=learned)
    assert factors == [learned, learned]
    assert confirmation.best.name == "plan 3"
    assert confirmation.gain is not None
    assert confirmation.gain[0] == pytest.approx(0.2)
    assert play.sessions[-1] != play.sessions[0]


def test_the_ranks_of_torchrun_are_told_to_end_where_nothing_could_be_timed(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[object] = []
    joined = nullcontext((None, SimpleNamespace(share=shared.append)))
    monkeypatch.setattr(room, "check_job", lambda *_, **__: None)
    monkeypatch.setattr(room, "joined_ranks", lambda *_: joined)
    monkeypatch.setattr(room, "LedSessions", lambda *_: None)
    with pytest.raises(InputError), room.sessions_of(setting, PLANS, tmp_path, Rank(0, 2, 0, 2)):
        raise InputError("no plan could be timed")
    assert shared == [None]


@pytest.mark.parametrize(("minutes", "count"), [(0.0, 4), (float("nan"), 4), (3.0, 0), (1e9, 4)])
def test_numbers_out_of_range_are_refused(minutes: float, count: int) -> None:
    with pytest.raises(InputError) as caught:
        check_minutes(minutes, count)
    assert caught.value.inputs == (("confirm",) if count == 0 else ("minutes",))


def test_a_plan_has_one_number_and_the_fastest_is_plan_1(play: Play) -> None:
    measured = play({"plan 1": 11.0, "plan 2": 9.0, "torchrec": 10.0})
    ranking = [SimpleNamespace(plan=plan(1)), SimpleNamespace(plan=plan(0))]
    notes: list[str] = []
    answer = SimpleNamespace(result=SimpleNamespace(plans=ranking))
    confirmation = room.renumbered(measured, answer, notes.append)  # type: ignore[arg-type]
    assert confirmation.best.name == "plan 1"
    assert {rival.name: rival.median_ms for rival in confirmation.plans} == {
        "plan 1": 9.0,
        "plan 2": 11.0,
        "torchrec": 10.0,
    }
    assert notes
