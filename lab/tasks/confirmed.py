"""Tasks drawn by seed: expected gains of learning and confirming, against measured ones.

Each task starts from the shipped profile. It learns from one trace of TorchRec's plan, the search
plans with the result, and `plan --confirm` runs. Then twelve plans run in turn: TorchRec's, the
learned one, the confirmed one, and random ones. TorchRec's plan also runs under a second name; the
difference is the noise. Every session builds the plans in another order, and all rounds count. One
of four tasks has hosts joined by a slow emulated link (which needs root and iproute2), and one has
memory 80 % full: both have room for a better plan.

A task is a file in the folder, written when complete; the same command continues with the rest.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.statistics import within_noise
from lab.tasks.models import draw_model
from lab.tasks.plans import random_plans
from predictor.errors import InfeasibleError, InputError
from predictor.model.memory.ranks import plan_memory
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from search.problem import RankedPlan
from search.solve import solve
from search.stop import Stop
from shardopt.api.request import Machine
from shardopt.api.setting import Setting, resolve
from shardopt.bench.confirm import StartedSessions, confirm, entrants, learned_from, with_learned
from shardopt.config.write import write_model
from shardopt.files import atomic_write_text
from shardopt.race import TORCHREC, Entrant, Race, run_session
from shardopt.ranks.hosts import Link
from shardopt.ranks.scratch import scratch_folder

AGAIN, OURS, CONFIRMED = "torchrec again", "learned", "confirmed"
ROOM: Mapping[int, str] = {1: "slow link", 3: "memory 80 % full"}
"""Number of a task modulo four -> reason for the room for a better plan."""
LINK_GBIT_S, FULL = 2.0, 0.8
PLANS, RANKS = 12, 2
TRACE_S, SEARCH_S, SESSIONS = 20.0, 30.0, 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class ConfirmedTasks:
    """Settings of the tasks.

    Args:
        minutes: minutes of `confirm` in each task.
        measure_minutes: minutes of measuring the twelve plans afterwards.
    """

    folder: Path
    tasks: Sequence[int]
    models: str
    minutes: float = 3.0
    measure_minutes: float = 3.0


def run_tasks(settings: ConfirmedTasks, say: Say) -> list[dict[str, Any]]:
    """Measure the tasks that the folder lacks; return all, as read from their files."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    tasks = []
    for seed in settings.tasks:
        path = settings.folder / f"task_{seed:06d}.json"
        if not path.exists():
            started = time.time()
            try:
                task = _run(settings, seed, lambda text, seed=seed: say(f"task {seed}: {text}"))  # type: ignore[misc]
            except (InputError, InfeasibleError) as error:
                task = {"seed": seed, "left_out": str(error)}
            task["seconds"] = round(time.time() - started, 1)
            atomic_write_text(path, json.dumps(task, indent=1) + "\n")
        tasks.append(json.loads(path.read_text(encoding="utf-8")))
    return tasks


def _run(settings: ConfirmedTasks, seed: int, say: Say) -> dict[str, Any]:
    room = ROOM.get(seed % 4)
    setting = _setting(settings, seed, room)
    link = Link(LINK_GBIT_S) if room == ROOM[1] else None
    with scratch_folder() as folder:
        sessions = StartedSessions(setting, folder, link=link)
        theirs = entrants(setting, [], None)
        if TORCHREC not in theirs:
            raise InputError("TorchRec's planner finds no plan that fits")
        say("a trace of TorchRec's plan")
        race = Race()
        race.enter(theirs)
        run_session(sessions, race, 1, [TORCHREC], time.time() + TRACE_S)
        learned, notes = learned_from(setting, race, folder)
        if learned is None:
            raise InputError(f"nothing was learned; {'; '.join(notes)}")
        taught = with_learned(setting, learned)
        ours, expected = _plan_with(taught, theirs[TORCHREC].plan)
    with scratch_folder() as folder:
        sessions = StartedSessions(setting, folder, link=link)
        plans = entrants(setting, _search(setting), None)
        began = time.time()
        confirmation, _ = confirm(
            setting, plans, sessions, folder, settings.minutes, plan_again=_result, say=say
        )
        spent = time.time() - began
        if confirmation.interrupted:
            raise KeyboardInterrupt
    every = {
        TORCHREC: theirs[TORCHREC].plan,
        # another name makes it another plan, which is built again
        AGAIN: replace(theirs[TORCHREC].plan, meta={"name": AGAIN}),
        OURS: ours,
        CONFIRMED: confirmation.best.plan,
    }
    measured = [theirs[TORCHREC].plan, ours, confirmation.best.plan]
    every |= random_plans(seed, setting.workload, setting.topology, PLANS - 3, measured)
    race = _measure(settings, setting, every, link, say)
    return {
        "seed": seed,
        "model": setting.workload.name,
        "room": room,
        "expected": expected,
        "confirmed_gain": confirmation.gain,
        "confirm_seconds": round(spent, 1),
        "rounds": len(race.times[TORCHREC]),
        "plans": {
            name: {
                "median_ms": race.median_ms(name),
                "interval_ms": race.interval_ms(name),
                "predicted_ms": taught.predict(plan).iteration_ms,
                "types": sorted({t.sharding_type.short for t in plan.tables.values()}),
            }
            for name, plan in every.items()
        },
        "gain": {name: _gain(race, name) for name in (AGAIN, OURS, CONFIRMED)},
    }


def _setting(settings: ConfirmedTasks, seed: int, room: str | None) -> Setting:
    path = settings.folder / f"task_{seed:06d}.yaml"
    write_model(path, draw_model(settings.models, seed))
    one_a_host = room == ROOM[1]
    machine = Machine(gpus=RANKS, gpus_per_node=1 if one_a_host else RANKS, hardware="cpu-gloo")
    setting = resolve(path, machine)
    if room != ROOM[3]:
        return setting
    device = setting.hardware.device
    wide = Topology.uniform(RANKS, RANKS, hbm_bytes=2**50, ddr_bytes=2**50)
    [best, *_] = _search(replace(setting, topology=wide))
    needs = sum(m.hbm_bytes for m in plan_memory(setting.workload, wide, best.plan, device))
    cap = math.ceil(needs / FULL / RANKS)
    tight = Topology.uniform(RANKS, RANKS, hbm_bytes=cap, ddr_bytes=setting.hardware.ddr_bytes)
    return replace(setting, topology=tight)


def _result(setting: Setting, seconds: float = SEARCH_S) -> Any:
    return solve(setting.problem(), Stop(time_limit_s=seconds), 0, top_k=4)


def _search(setting: Setting) -> Sequence[RankedPlan]:
    plans: Sequence[RankedPlan] = _result(setting).plans
    return plans


def _plan_with(setting: Setting, theirs: ShardingPlan) -> tuple[ShardingPlan, dict[str, float]]:
    """Return the plan on the learned profile, and its expected gain."""
    from search.expected_gain import expected_gain

    best = _search(setting)[0].plan
    gain = expected_gain(setting.problem(), best, theirs, TORCHREC)
    low, high = gain.interval
    return best, {"value": gain.mean, "low": low, "high": high}


def _measure(
    settings: ConfirmedTasks,
    setting: Setting,
    every: Mapping[str, ShardingPlan],
    link: Link | None,
    say: Say,
) -> Race:
    """Time all plans in sessions, each of which begins with another plan."""
    race, names = Race(), list(every)
    # a plan under two names runs twice, which gives the noise
    race.enter({n: Entrant(plan, n, content=n) for n, plan in every.items()})
    began, seconds = time.time(), 60 * settings.measure_minutes
    with scratch_folder() as folder:
        sessions = StartedSessions(setting, folder, link=link, traced=False)
        for session in range(SESSIONS):
            turn = session * len(names) // SESSIONS
            say(f"session {session + 1} of {SESSIONS}")
            until = began + seconds * (session + 1) / SESSIONS
            order = [*names[turn:], *names[:turn]]
            for name, why in run_session(sessions, race, session, order, until).items():
                race.drop(name, why)
                names.remove(name)
                say(race.notes[-1])
    return race


def _gain(race: Race, name: str) -> dict[str, float | None] | None:
    """Return the gain over TorchRec's plan, with the noise of the measurement."""
    ratio = race.ratio(name, TORCHREC)
    if ratio is None:
        return None
    low, high = (None, None) if ratio.interval is None else (1 - r for r in ratio.interval[::-1])
    return {"value": 1 - ratio.value, "low": low, "high": high}


def table(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures beside their targets, as text."""
    done = [task for task in tasks if "left_out" not in task and task["gain"][OURS] is not None]
    lines = [f"{len(done)} tasks, {sum(t['room'] is not None for t in done)} with room"]
    lines += [f"left out: task {t['seed']}: {t['left_out']}" for t in tasks if "left_out" in t]
    if not done:
        return "\n".join(lines)
    gains = [task["gain"][OURS]["value"] for task in done]
    expected = [task["expected"] for task in done]
    apart = [t["value"] - gain for t, gain in zip(expected, gains, strict=True)]
    noise = statistics.fmean(abs(task["gain"][AGAIN]["value"]) for task in done)
    inside = [t["low"] <= gain <= t["high"] for t, gain in zip(expected, gains, strict=True)]
    with_noise = [
        within_noise(t["value"], g["value"], (t["low"], t["high"]), (g["low"], g["high"]))
        for t, g in zip(expected, (task["gain"][OURS] for task in done), strict=True)
    ]
    slower = [task["seed"] for task in done if (task["gain"][OURS]["high"] or 0.0) < 0]
    confirmed = [task["gain"][CONFIRMED]["value"] for task in done]
    room = [task["gain"][CONFIRMED]["value"] for task in done if task["room"] is not None]
    errors, by_type = _shape_errors(done)
    lines += [
        f"TorchRec's plan against itself: {noise:.1%} in the mean",
        "from the shipped profile and one trace of TorchRec's plan:",
        f"  gain {statistics.fmean(gains):+.1%} ({min(gains):+.1%} to {max(gains):+.1%})",
        f"  expected minus measured {100 * statistics.fmean(apart):+.1f} points (1.5)",
        f"  slower beyond noise: {slower or 'none'}",
        f"  gains inside their 90 % interval: {statistics.fmean(inside):.0%} (85 to 97 %); "
        f"with the noise of the measurement in it {statistics.fmean(with_noise):.0%}",
        "with --confirm:",
        f"  gain {statistics.fmean(confirmed):+.1%} over all (2 %), worst {min(confirmed):+.1%}",
        f"  where there is room {statistics.fmean(room):+.1%} (5 %)" if room else "  no room",
        f"  behind the best of twelve {statistics.fmean(map(_behind, done)):.1%} (1 %)",
        f"  minutes {statistics.fmean(t['confirm_seconds'] for t in done) / 60:.1f} (3)",
        "learned from one plan, the other eleven predicted:",
        f"  shape error {statistics.fmean(errors):.1%} (3 %)",
        *(f"  {kind}: {statistics.fmean(e):+.1%} (4 %)" for kind, e in sorted(by_type.items())),
    ]
    return "\n".join(lines)


def _behind(task: Mapping[str, Any]) -> float:
    """Return the confirmed plan's relative loss to the fastest plan."""
    times = {name: plan["median_ms"] for name, plan in task["plans"].items() if plan["median_ms"]}
    return float(times[CONFIRMED] / min(times.values()) - 1)


def _shape_errors(tasks: Sequence[Mapping[str, Any]]) -> tuple[list[float], dict[str, list[float]]]:
    """Return absolute errors of predicted times relative to TorchRec's plan, and signed errors by
    the sharding types of the plans."""
    errors, by_type = [], defaultdict(list)
    for task in tasks:
        plans = {n: plan for n, plan in task["plans"].items() if plan["median_ms"] and n != AGAIN}
        base = plans[TORCHREC]["predicted_ms"] / plans[TORCHREC]["median_ms"]
        for name, plan in plans.items():
            if name == TORCHREC:
                continue
            error = plan["predicted_ms"] / plan["median_ms"] / base - 1
            errors.append(abs(error))
            for kind in plan["types"]:
                by_type[kind].append(error)
    return errors, dict(by_type)
