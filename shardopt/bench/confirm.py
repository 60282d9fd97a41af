"""Runs the best plans and TorchRec's for real, and keeps the fastest measured one.

Plans run in sessions. Each session starts the ranks anew and builds the plans that are left in
another order, as a plan's place in a process changes its time. In a session plans take turns. A
plan under which a rank dies is out, and the others go on. The first session of a plan also records
a trace of it, from which the profile learns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from predictor.errors import InfeasibleError, InputError, ShardoptError
from predictor.hardware.learned import Learned
from predictor.model.plan import ShardingPlan
from search.problem import RankedPlan
from shardopt.api.answer import Answer, answer_of
from shardopt.api.given_plans import fit_plan
from shardopt.api.request import MADE
from shardopt.api.setting import Setting
from shardopt.bench.job import Job, check_job
from shardopt.bench.learn import lesson_of, overlay_text
from shardopt.bench.planners import ask_torchrec
from shardopt.bench.race import Race
from shardopt.bench.run import SILENCE_S
from shardopt.bench.summary import median_interval
from shardopt.bench.worker import run_rank
from shardopt.files import atomic_write_text
from shardopt.ranks.calls import CallError, CallServer
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import RankDiedError, rank_of_torchrun
from shardopt.ranks.scratch import scratch_folder

MINUTES = 3.0
TORCHREC = "torchrec"
IN_USE = "in use"
SHORTEST_S = 15.0
"""A session is not worth its start below this time."""
MOST_ROUNDS = 10_000


@dataclass(frozen=True)
class Entrant:
    """A plan that is to be measured, and who found it."""

    plan: ShardingPlan
    found_by: str


@dataclass(frozen=True)
class Confirmed:
    """A plan as measured.

    Args:
        median_ms, interval_ms: over rounds; None where it was never timed, or too briefly.
        dropped_after: rounds after which it was out; None if it stayed.
        why: it was out, where a rank died of it.
    """

    name: str
    plan: ShardingPlan
    found_by: str
    median_ms: float | None
    interval_ms: tuple[float, float] | None
    dropped_after: int | None
    why: str | None = None


@dataclass(frozen=True)
class Confirmation:
    """What was measured.

    Args:
        best: the fastest measured plan; never one that was slower than TorchRec's.
        gain: of it over TorchRec's plan, a share of the iteration: value, low, high; None where
            TorchRec's planner has no plan or it was not timed, bounds None after too few rounds.
        learned: from the traces of all plans; None without any.
        interrupted: the user ended it.
    """

    plans: tuple[Confirmed, ...]
    best: Confirmed
    gain: tuple[float, float | None, float | None] | None
    learned: Learned | None
    notes: tuple[str, ...]
    interrupted: bool = False

    def as_object(self) -> dict[str, Any]:
        """``confirmed`` and ``measured_gain`` of ``shardopt plan --json``."""
        gain = None
        if self.gain is not None:
            gain = dict(zip(("value", "low", "high"), self.gain, strict=True))
        return {
            "confirmed": [
                {
                    "plan": one.name,
                    "found_by": one.found_by,
                    "median_ms": one.median_ms,
                    "interval_ms": None if one.interval_ms is None else list(one.interval_ms),
                    "dropped_after": one.dropped_after,
                }
                for one in self.plans
            ],
            "measured_gain": gain,
        }


def entrants(
    setting: Setting, best: Sequence[Entrant], in_use: ShardingPlan | None, count: int
) -> tuple[dict[str, Entrant], str | None]:
    """The plans to run by name, and the name of TorchRec's; equal ones run once."""
    problem = setting.problem()
    try:
        server = CallServer(["shardopt.training.torchrec_planner"])
        asked = problem.workload, problem.topology, problem.hardware.device
        theirs = server.call(None, ask_torchrec, *asked).plan
    except CallError as error:
        raise InputError(f"TorchRec's planner failed: {error}") from None
    given = {f"plan {i + 1}": one for i, one in enumerate(best[:count])}
    if in_use is not None:
        given[IN_USE] = Entrant(in_use, IN_USE)
    if theirs is not None:
        given[TORCHREC] = Entrant(theirs, "TorchRec's planner")
    found: dict[str, Entrant] = {}
    names: dict[str, str] = {}
    for name, one in given.items():
        same = next((n for n, e in found.items() if e.plan.tables == one.plan.tables), name)
        names[name] = same
        both = found[same].found_by if same in found else ""
        by = f"{both}, {one.found_by}" if both else one.found_by
        found[same] = Entrant(one.plan, by)
    return found, names.get(TORCHREC)


def confirm(
    setting: Setting,
    plans: Mapping[str, Entrant],
    theirs: str | None,
    minutes: float = MINUTES,
    *,
    silence_s: float = SILENCE_S,
    say: Callable[[str], None] = lambda text: None,
) -> Confirmation:
    """Run plans for real until the best is told apart or the minutes are over.

    Args:
        theirs: the name of TorchRec's plan among them.

    Raises:
        InputError: this machine cannot run the plans, or none could be timed.
        InfeasibleError: not even one plan fits into memory.
    """
    started, looks = time.time(), len(plans)
    deadline = started + 60 * minutes
    race, why, notes = Race(list(plans), looks), dict[str, str](), list[str]()
    interrupted = False
    with scratch_folder() as folder:
        session = _Session(setting, plans, folder, race, silence_s)
        try:
            for look in range(looks + len(plans)):
                left = deadline - time.time()
                if len(race.left) < 2 or (look and left < SHORTEST_S):
                    break
                until = min(deadline, time.time() + max(SHORTEST_S, 60 * minutes / looks))
                turn = look % len(race.left)
                order = race.left[turn:] + race.left[:turn]
                say(f"measuring {', '.join(order)}; {max(left, 0):.0f} s left")
                for name, reason in session.run(order, until):
                    why[name] = reason
                    notes.append(f"{name} is out: {reason}")
                    say(notes[-1])
                for name in race.eliminate():
                    say(f"{name} is clearly slower after {race.dropped[name]} rounds")
        except KeyboardInterrupt:
            interrupted = True
            notes.append("interrupted: the best plan measured so far")
        measured = {name: _confirmed(name, plans[name], race, why.get(name)) for name in plans}
        leader = race.leader
        if leader is None:
            raise InputError("no plan could be timed" + "".join(f"; {note}" for note in notes))
        learned = _learned(setting, plans, race, folder, notes)
    return Confirmation(
        tuple(measured.values()),
        measured[leader],
        _gain(race, leader, theirs),
        learned,
        tuple(notes),
        interrupted,
    )


class _Session:
    """Runs plans on ranks that are started for it."""

    def __init__(
        self,
        setting: Setting,
        plans: Mapping[str, Entrant],
        folder: Path,
        race: Race,
        silence_s: float,
    ) -> None:
        if rank_of_torchrun() is not None:
            raise InputError(
                "confirm starts its ranks itself, again and again; run it without torchrun"
            )
        self.setting, self.plans, self.folder = setting, plans, folder
        self.race, self.silence_s = race, silence_s
        self.current = ""

    def run(self, order: Sequence[str], until: float) -> list[tuple[str, str]]:
        """Time plans until then; plans of which a rank died, each with why.

        Where they do not fit into memory at once, halves of them run one after the other.
        """
        job = self._job(order, until)
        try:
            check_job(job)
        except InfeasibleError:
            if len(order) == 1:
                raise
            half = len(order) // 2
            middle = time.time() + (until - time.time()) / 2
            return [*self.run(order[:half], middle), *self.run(order[half:], until)]
        self.current = order[0]
        try:
            run_ranks(
                run_rank,
                job.world_size,
                job,
                local_world_size=job.local_world_size,
                on_report=lambda _, message: self._hear(message),
                silence_s=self.silence_s,
            )
        except RankDiedError as error:
            self.race.drop(self.current)
            return [(self.current, str(error).splitlines()[0])]
        return []

    def _job(self, order: Sequence[str], until: float) -> Job:
        new = [n for n in order if not self.race.times[n]]
        return Job(
            self.setting.workload,
            {name: self.plans[name].plan for name in order},
            "gloo" if self.setting.hardware.inline else "nccl",
            rounds=MOST_ROUNDS,
            warmup=1,
            until=until,
            traces={name: str(self.folder / name.replace(" ", "-")) for name in new},
        )

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "plan":
            self.current = message["name"]
        elif message["kind"] == "round":
            self.race.add(
                {
                    name: max(statistics.median(times) for times in ranks)
                    for name, ranks in message["ranks_ms"].items()
                }
            )


def _confirmed(name: str, one: Entrant, race: Race, why: str | None) -> Confirmed:
    times = race.times[name]
    return Confirmed(
        name,
        one.plan,
        one.found_by,
        statistics.median(times) if times else None,
        median_interval(sorted(times)),
        race.dropped.get(name),
        why,
    )


def _gain(
    race: Race, best: str, theirs: str | None
) -> tuple[float, float | None, float | None] | None:
    if theirs is None or not race.times[theirs]:
        return None
    if best == theirs:
        return 0.0, 0.0, 0.0
    ratio = race.ratio(best, theirs)
    assert ratio is not None
    if ratio.interval is None:
        return 1 - ratio.value, None, None
    return 1 - ratio.value, 1 - ratio.interval[1], 1 - ratio.interval[0]


def _learned(
    setting: Setting, plans: Mapping[str, Entrant], race: Race, folder: Path, notes: list[str]
) -> Learned | None:
    """From the traces of every plan, with the steps that no profiler watched."""
    hardware, found = setting.hardware, None
    for name, one in plans.items():
        traces = sorted((folder / name.replace(" ", "-")).glob("*.json"))
        if not traces or not race.times[name]:
            continue
        here = replace(setting, hardware=hardware)
        step_ms = statistics.median(race.times[name])
        try:
            found = lesson_of(here, one.plan, name, traces, step_ms).learned
        except ShardoptError as error:
            notes.append(f"nothing was learned from {name}: {error}")
        else:
            hardware = hardware.model_copy(update={"learned": found})
    return found


def confirm_answer(
    answer: Answer,
    in_use: ShardingPlan | None,
    count: int,
    minutes: float,
    output: Path | None,
    say: Callable[[str], None],
) -> tuple[Answer, Confirmation]:
    """The answer of a search with its fastest measured plan first.

    Args:
        in_use: the plan of ``--from``.
        output: of the plan; what was learned is written beside it, with suffix ``.learned.yaml``.

    Raises:
        InputError, InfeasibleError: see `confirm`.
    """
    setting = answer.setting
    best = [Entrant(ranked.plan, ranked.found_by) for ranked in answer.result.plans]
    fitting = None if in_use is None else fit_plan(in_use, setting, where="the plan in use")
    plans, theirs = entrants(setting, best, fitting, count)
    found = confirm(setting, plans, theirs, minutes, say=say)
    first = found.best
    predicted = setting.predict(first.plan).iteration_ms
    ranked = RankedPlan(first.plan, predicted, f"{first.found_by}, measured")
    others = [r for r in answer.result.plans if r.plan.tables != first.plan.tables]
    result = replace(answer.result, plans=(ranked, *others))
    if found.learned is not None and output is not None:
        path = output.with_suffix(".learned.yaml")
        text = overlay_text(found.learned, setting.hardware_name, path.resolve().parent)
        atomic_write_text(path, text)
        say(f"wrote {path}, a profile that has learned from these steps")
    # what was measured cannot be made again
    head = {key: value for key, value in answer.head.items() if key != MADE}
    return answer_of(setting, result, head), found


def check_minutes(minutes: float, count: int) -> None:
    """Refuse numbers out of range."""
    if not (math.isfinite(minutes) and 0 < minutes <= 24 * 60):
        raise InputError(
            f"minutes is {minutes:g}; give minutes above 0 and at most 1440", inputs=("minutes",)
        )
    if not 1 <= count <= 100:
        raise InputError(
            f"plans to confirm: {count}; give how many plans to run, 1 to 100", inputs=("confirm",)
        )
