"""Runs the best plans and TorchRec's for real, learns from them, and plans again.

Each session builds the plans that are left in another order, as a plan's place in a process changes
its time, and plans take turns. Its ranks are started for it, or they are those of torchrun. The
first session of a plan also records a trace of it. With what the traces teach the search runs
again; plans that it finds now are measured too, until the best one is known already.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from predictor.errors import InputError, ShardoptError
from predictor.hardware.learned import Learned
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Workload
from search.problem import RankedPlan, Result
from search.stop import Stop
from shardopt.api.answer import Answer, answer_of, find_answer
from shardopt.api.given_plans import fit_plan
from shardopt.api.inputs import Inputs
from shardopt.api.request import MADE
from shardopt.api.setting import Setting
from shardopt.bench.job import Job, check_job, check_memory
from shardopt.bench.learn import lesson_of, overlay_text
from shardopt.bench.planners import ask_torchrec
from shardopt.bench.run import SILENCE_S
from shardopt.files import atomic_write_text
from shardopt.measure.machine import available_bytes
from shardopt.race import (
    SHORTEST_S,
    THEIRS,
    TORCHREC,
    Confirmation,
    Confirmed,
    Entrant,
    Race,
    Sessions,
    deadlines,
    run_final,
    run_race,
    run_session,
)
from shardopt.ranks.calls import CallError, CallServer
from shardopt.ranks.hosts import Link
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import Rank, RankDiedError, Report, Talk, errors_of, joined_ranks
from shardopt.ranks.realtime import Runtime
from shardopt.ranks.scratch import scratch_folder

IN_USE = "in use"
FIRST_SHARE = 0.6
"""Share of the time for the plans of the first search."""
TURNS = 3
"""Searches at most, the first included."""
SEARCH_S = 10.0
"""Limit in s on a search between measurements."""

Say = Callable[[str], None]


def _silent(text: str) -> None:
    pass


def entrants(
    setting: Setting, best: Sequence[RankedPlan], in_use: ShardingPlan | None
) -> dict[str, Entrant]:
    """The plans to run by name: the best, that in use and that of TorchRec's planner."""
    problem = setting.problem()
    try:
        server = CallServer(["shardopt.training.torchrec_planner"])
        inputs = problem.workload, problem.topology, problem.hardware.device
        theirs, _, _ = server.call(None, ask_torchrec, *inputs)
    except CallError as error:
        raise InputError(f"TorchRec's planner failed: {error}") from None
    by_name = {
        f"plan {i + 1}": Entrant(ranked_plan.plan, ranked_plan.found_by, ranked_plan.plan.tables)
        for i, ranked_plan in enumerate(best)
    }
    if in_use is not None:
        by_name[IN_USE] = Entrant(in_use, IN_USE, in_use.tables)
    if theirs is not None:
        by_name[TORCHREC] = Entrant(theirs, THEIRS, theirs.tables)
    return by_name


def confirm(
    setting: Setting,
    plans: Mapping[str, Entrant],
    sessions: Sessions,
    folder: Path,
    minutes: float,
    *,
    plan_again: Callable[[Setting, float], Result] | None = None,
    say: Say = _silent,
) -> tuple[Confirmation, Learned | None]:
    """Run plans for real until the best is told apart or the minutes are over.

    Args:
        folder: where the sessions leave the traces of each plan.
        plan_again: searches with what was learned for so many seconds; None to stay with these.

    Returns:
        The measurements, and what was learned from them.

    Raises:
        InputError: this machine cannot run the plans, or none could be timed.
        KeyboardInterrupt: before any was.
    """
    race = Race()
    deadline, end = deadlines(time.time(), minutes)
    race.enter(plans)
    learned: Learned | None = None
    notes: list[str] = []
    for turn in range(TURNS):
        last = plan_again is None or turn == TURNS - 1
        now = time.time()
        run_race(race, sessions, deadline if last else now + FIRST_SHARE * (deadline - now), say)
        learned, notes = learned_from(setting, race, folder)
        left_s = deadline - time.time()
        if last or race.interrupted or learned is None or left_s < SHORTEST_S + SEARCH_S:
            break
        assert plan_again is not None
        here = with_learned(setting, learned)
        say("planning again with what was learned")
        try:
            fresh = _fresh(plan_again(here, min(SEARCH_S, left_s - SHORTEST_S)), race, here)
        except KeyboardInterrupt:
            race.interrupted = True
            break
        if not fresh:
            say("the best plan stays the same")
            plan_again = None
        race.enter(fresh)
    run_final(race, sessions, end, say)
    race.notes += notes
    return race.confirmation(), learned


def with_learned(setting: Setting, learned: Learned) -> Setting:
    """The same with a profile that has learned."""
    return replace(setting, hardware=setting.hardware.model_copy(update={"learned": learned}))


def _fresh(result: Result, race: Race, setting: Setting) -> dict[str, Entrant]:
    """Plans that were not measured yet and promise more than the fastest that was; none where the
    best of the search was."""
    measured = [e.plan.tables for e in race.entrants.values()]
    leader = race.leader
    if leader is None or result.best.plan.tables in measured:
        return {}
    bar_ms = setting.predict(race.entrants[leader].plan).iteration_ms
    new = [r for r in result.plans if r.plan.tables not in measured and r.iteration_ms < bar_ms]
    count = sum(name.startswith("plan ") for name in race.entrants)
    return {
        f"plan {count + i}": Entrant(e.plan, f"{e.found_by}, learned", e.plan.tables)
        for i, e in enumerate(new, 1)
    }


@dataclass
class StartedSessions:
    """`shardopt.race.Sessions` on ranks that are started for each.

    Args:
        folder: for the traces of each plan, recorded the first time that it runs.
        link: between the ranks, each a host.
        traced: whether they are recorded.
    """

    setting: Setting
    folder: Path
    link: Link | None = None
    traced: bool = True

    def now(self) -> float:
        """Return the time of this process."""
        return time.time()

    def run(
        self, race: Race, session: int, order: Sequence[str], until: float
    ) -> Mapping[str, str]:
        """See `shardopt.race.Sessions`."""
        plans = {name: race.entrants[name].plan for name in order}
        job = Job(self.setting.workload, plans, backend_of(self.setting), link=self.link)
        check_job(job)
        at, out = order[0], {}

        def hear(_: int, message: Mapping[str, Any]) -> None:
            nonlocal at
            if message["kind"] == "plan":
                at = message["name"]
            elif message["kind"] == "round":
                race.add(message["key"], message["ms"])
            else:
                out.update(message["out"])

        traced = [name for name in order if not self.traced or race.times[name]]
        try:
            run_ranks(
                take_part,
                job.world_size,
                job,
                self.folder,
                traced,
                session,
                until,
                local_world_size=job.local_world_size,
                link=job.link,
                on_report=hear,
                silence_s=SILENCE_S,
            )
        except RankDiedError as error:
            return {**out, at: str(error).splitlines()[0]}
        return out


def take_part(
    rank: Rank,
    report: Report,
    job: Job,
    folder: Path,
    traced: Sequence[str],
    session: int,
    until: float,
) -> None:
    """Take part in one session; the first rank reports its rounds, what it is at, and what failed.

    Args:
        traced: plans that need no further trace.
    """
    with joined_ranks(rank, job.backend, Runtime.PLAIN) as (device, talk):
        led = LedSessions(job.workload, folder, rank, device, talk)
        led.joined.traced |= {*traced}
        if rank.index == 0:
            led.joined.report = report
        out = led.take_part(job.plans, session, [*job.plans], until)
        led.joined.report({"kind": "out", "out": out})


def traces_of(folder: Path, name: str) -> Path:
    """Return the folder for the traces of a plan."""
    return folder / name.replace(" ", "-")


def backend_of(setting: Setting) -> str:
    """Return the backend of a profile's ranks."""
    return "gloo" if setting.hardware.inline else "nccl"


class LedSessions:
    """`shardopt.race.Sessions` on ranks that are there; the first leads, the others follow.

    Args:
        folder: for the traces of each plan.
    """

    def __init__(
        self, workload: Workload, folder: Path, rank: Rank, device: Any, talk: Talk
    ) -> None:
        from shardopt.ranks.sessions import JoinedSessions
        from shardopt.training.batch import batch_ring
        from shardopt.training.loop import Training, set_matmul_precision

        self.workload, self.rank, self.on_gpus = workload, rank, device.type == "cuda"
        set_matmul_precision(workload)
        ring = batch_ring(workload, seed=0, rank=rank.index, pin=self.on_gpus)

        def make(plan: ShardingPlan, group: Any) -> Callable[[], object]:
            return Training(workload, plan, device, ring, group=group).step

        self.joined = JoinedSessions(make, device, talk, folder)

    def now(self) -> float:
        """Return the time of the first rank."""
        return time.time()

    def run(
        self, race: Race, session: int, order: Sequence[str], until: float
    ) -> Mapping[str, str]:
        """See `shardopt.race.Sessions`."""
        plans = {name: race.entrants[name].plan for name in order}
        if not self.on_gpus:
            check_memory(Job(self.workload, plans), available_bytes(), self.rank.local_size)
        self.joined.talk.share((plans, session, order, until))
        return run_session(self.joined, race, session, order, until)

    def take_part(
        self, plans: Mapping[str, ShardingPlan], session: int, order: Sequence[str], until: float
    ) -> Mapping[str, str]:
        """Run a session that all ranks know of."""
        race = Race()
        race.enter({name: Entrant(plan, "", name) for name, plan in plans.items()})
        return run_session(self.joined, race, session, order, until)


def follow(setting: Setting, rank: Rank) -> None:
    """Be a rank of torchrun other than the first."""
    backend = backend_of(setting)
    with errors_of(rank), joined_ranks(rank, backend, Runtime.PLAIN) as (device, talk):
        led = LedSessions(setting.workload, Path(), rank, device, talk)
        talk.follow(lambda session: led.take_part(*session))


@contextmanager
def sessions_of(
    setting: Setting, plans: Mapping[str, Entrant], folder: Path, rank: Rank | None
) -> Iterator[Sessions]:
    """Yield sessions on ranks that are started, or on those of torchrun.

    Raises:
        InputError, PlanError: the ranks are not those of the plans, or cannot run here.
    """
    if rank is None:
        yield StartedSessions(setting, folder)
        return
    job = Job(
        setting.workload,
        {name: entrant.plan for name, entrant in plans.items()},
        backend_of(setting),
    )
    check_job(job, given_ranks=rank.world_size, joined=True)
    with joined_ranks(rank, job.backend, Runtime.PLAIN) as (device, talk):
        try:
            yield LedSessions(setting.workload, folder, rank, device, talk)
        except ShardoptError:  # the other ranks wait for the next session
            talk.share(None)
            raise
        talk.share(None)


def learned_from(setting: Setting, race: Race, folder: Path) -> tuple[Learned | None, list[str]]:
    """Learn from the traces of every plan and its steps without a profiler; return notes too."""
    learned, notes = None, []
    for name, entrant in race.entrants.items():
        traces = sorted(traces_of(folder, name).glob("*.json"))
        step_ms = race.median_ms(name)
        if not traces or step_ms is None:
            continue
        here = setting if learned is None else with_learned(setting, learned)
        try:
            learned = lesson_of(here, entrant.plan, name, traces, step_ms).learned
        except ShardoptError as error:
            notes.append(f"nothing was learned from {name}: {error}")
    return learned, notes


def confirm_answer(
    answer: Answer,
    inputs: Inputs,
    count: int,
    minutes: float,
    output: Path | None,
    rank: Rank | None,
    say: Say,
) -> Answer:
    """Measure the plans of an answer; return it with its fastest measured plan first.

    Args:
        count: how many of the best plans are measured.
        output: of the plan; what was learned is written beside it, with suffix ``.learned.yaml``.
        rank: the first rank of torchrun.

    Raises:
        InputError: see `confirm`.
    """
    setting, result = answer.setting, answer.result
    in_use = inputs.in_use
    fitting = None if in_use is None else fit_plan(in_use, setting, where="the plan in use")
    plans = entrants(setting, result.plans[:count], fitting)

    def plan_again(here: Setting, seconds: float) -> Result:
        stop = Stop(inputs.request.effort, seconds, interruptible=True)
        again = find_answer(inputs.with_setting(here), stop, None).result
        return replace(again, plans=again.plans[:count])

    with scratch_folder() as folder, sessions_of(setting, plans, folder, rank) as sessions:
        measured, learned = confirm(
            setting, plans, sessions, folder, minutes, plan_again=plan_again, say=say
        )
    first = measured.best
    predicted = setting.predict(first.plan).iteration_ms
    ranked = RankedPlan(first.plan, predicted, f"{first.found_by}, measured")
    rest = [r for r in result.plans if r.plan.tables != first.plan.tables]
    result = replace(result, plans=(ranked, *rest))
    if learned is not None and output is not None:
        path = output.with_suffix(".learned.yaml")
        text = overlay_text(learned, setting.hardware_name, path.resolve().parent)
        atomic_write_text(path, text)
        say(f"wrote {path}, a profile that has learned from these steps")
    # measurements cannot be made again
    head = {key: value for key, value in answer.head.items() if key != MADE}
    final = answer_of(setting, result, head)
    measured = renumbered(_with_predictions(measured, setting), final, say)
    return replace(final, confirmation=measured)


def _with_predictions(measured: Confirmation, setting: Setting) -> Confirmation:
    """Add the profile's prediction to each measured plan."""

    def predicted(plan: Confirmed) -> Confirmed:
        prediction = setting.predict(plan.plan)
        low, high = prediction.interval_ms
        return replace(
            plan, predicted_ms=prediction.iteration_ms, predicted_interval_ms=(low, high)
        )

    plans = {plan.name: predicted(plan) for plan in measured.plans}
    return replace(measured, plans=tuple(plans.values()), best=plans[measured.best.name])


def renumbered(result: Confirmation, answer: Answer, say: Say) -> Confirmation:
    """Give measured plans the numbers that they have in the answer: the fastest is plan 1 now.
    Plans that are not in the ranking get the numbers after it."""
    ranking = [ranked.plan.tables for ranked in answer.result.plans]
    names: dict[str, str] = {}
    after = len(ranking)
    for plan in result.plans:
        if not plan.name.startswith("plan "):
            continue
        place = next((i for i, tables in enumerate(ranking, 1) if tables == plan.plan.tables), None)
        after += place is None
        names[plan.name] = f"plan {place or after}"
    changed = [f"{old} is now {new}" for old, new in names.items() if old != new]
    if changed:
        say(f"plans are numbered by measured time from here on: {', '.join(changed)}")

    def named(text: str) -> str:
        return re.sub(r"\bplan \d+", lambda match: names.get(match[0], match[0]), text)

    plans = {plan.name: replace(plan, name=named(plan.name)) for plan in result.plans}
    notes = tuple(map(named, result.notes))
    return replace(result, plans=tuple(plans.values()), best=plans[result.best.name], notes=notes)


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
