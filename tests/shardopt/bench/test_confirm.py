"""How plans are confirmed, on ranks that are played: who wins, who is out, and what is told."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from predictor.errors import InfeasibleError, InputError
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from shardopt.api.request import Machine
from shardopt.api.setting import Setting, resolve
from shardopt.bench import confirm as room
from shardopt.bench.confirm import Confirmation, Entrant, check_minutes, confirm
from shardopt.bench.job import Job
from shardopt.ranks.rank import RankDiedError

MODEL = """
schema: 1
name: small
batch_size: 64
tables:
  - {name: a, num_embeddings: 400, embedding_dim: 32, features: [{name: fa, pooling_factor: 8}]}
dense: {in_features: 4, bottom_mlp: [32], interaction: dot, top_mlp: [16, 1]}
"""
ROUNDS = 20


def plan(rank: int) -> ShardingPlan:
    shard = Shard(rank, (0, 0), (400, 32))
    table = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))
    return ShardingPlan({"a": table}, 2, 2)


PLANS = {name: Entrant(plan(0), name) for name in ("plan 1", "plan 2", "torchrec")}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    (tmp_path / "model.yaml").write_text(MODEL)
    return resolve(str(tmp_path / "model.yaml"), Machine(gpus=2, hardware="cpu-gloo"))


@pytest.fixture
def play(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Confirmation]:
    """Confirm with ranks whose steps take given times; None: a rank dies of the plan."""

    def run(times: Mapping[str, float | None], fits: int = 9, ends: int = 99) -> Confirmation:
        sessions: list[list[str]] = []

        def ranks(body: object, count: int, job: Job, *, on_report: Any, **given: object) -> None:
            sessions.append(list(job.plans))
            for name in job.plans:
                on_report(0, {"kind": "plan", "name": name})
                if times[name] is None:
                    raise RankDiedError("rank 1 died of MemoryError")
            for _ in range(ROUNDS):
                measured = {n: [[times[n]] * 6, [times[n]] * 6] for n in job.plans}
                on_report(0, {"kind": "round", "ranks_ms": measured})
            if len(sessions) >= ends:
                raise KeyboardInterrupt

        def check(job: Job) -> None:
            if len(job.plans) > fits:
                raise InfeasibleError("too large")

        monkeypatch.setattr(room, "run_ranks", ranks)
        monkeypatch.setattr(room, "check_job", check)
        found = confirm(setting, PLANS, "torchrec", 1.0)
        run.sessions = sessions  # type: ignore[attr-defined]
        return found

    return run


def test_the_fastest_measured_plan_wins(play: Callable[..., Confirmation]) -> None:
    found = play({"plan 1": 11.0, "plan 2": 9.0, "torchrec": 10.0})
    assert found.best.name == "plan 2"
    assert found.gain == pytest.approx((0.1, 0.1, 0.1))
    data = found.as_object()
    assert data["measured_gain"] == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
    dropped = {one["plan"]: one["dropped_after"] for one in data["confirmed"]}
    assert dropped == {"plan 1": ROUNDS, "plan 2": None, "torchrec": ROUNDS}


def test_no_plan_slower_than_that_of_torchrec_is_chosen(play: Callable[..., Confirmation]) -> None:
    found = play({"plan 1": 11.0, "plan 2": 12.0, "torchrec": 10.0})
    assert found.best.name == "torchrec"
    assert found.gain == (0.0, 0.0, 0.0)


def test_plans_are_built_in_every_order(play: Callable[..., Confirmation]) -> None:
    play(dict.fromkeys(PLANS, 10.0))
    firsts = {order[0] for order in play.sessions}  # type: ignore[attr-defined]
    assert firsts == set(PLANS)


def test_a_plan_of_which_a_rank_dies_is_out_and_the_others_go_on(
    play: Callable[..., Confirmation],
) -> None:
    found = play({"plan 1": None, "plan 2": 9.0, "torchrec": 10.0})
    assert found.best.name == "plan 2"
    dead = found.plans[0]
    assert (dead.name, dead.dropped_after, dead.median_ms) == ("plan 1", 0, None)
    assert found.notes == ("plan 1 is out: rank 1 died of MemoryError",)


def test_nothing_timed_says_why(play: Callable[..., Confirmation]) -> None:
    with pytest.raises(InputError, match="torchrec is out: rank 1 died of MemoryError"):
        play(dict.fromkeys(PLANS))


def test_an_interrupt_leaves_the_best_so_far(play: Callable[..., Confirmation]) -> None:
    found = play({"plan 1": 10.0, "plan 2": 9.9, "torchrec": 10.0}, ends=1)
    assert found.interrupted
    assert found.best.name == "plan 2"


def test_plans_that_do_not_fit_together_run_in_halves(play: Callable[..., Confirmation]) -> None:
    found = play({"plan 1": 11.0, "plan 2": 9.0, "torchrec": 10.0}, fits=1)
    assert found.best.name == "plan 2"
    sizes = {len(order) for order in play.sessions}  # type: ignore[attr-defined]
    assert sizes == {1}


@pytest.mark.parametrize(("minutes", "count"), [(0.0, 4), (float("nan"), 4), (3.0, 0), (1e9, 4)])
def test_numbers_out_of_range_are_refused(minutes: float, count: int) -> None:
    with pytest.raises(InputError) as caught:
        check_minutes(minutes, count)
    assert caught.value.inputs == (("confirm",) if count == 0 else ("minutes",))
