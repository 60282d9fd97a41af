"""``shardopt plan --tune``: choose what a plan cannot express, with a plan for the best choice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from predictor.errors import InputError, did_you_mean
from shardopt.api.request import PlanRequest, check_number
from shardopt.cli.interrupts import EXIT_INTERRUPTED
from shardopt.cli.output import next_lines
from shardopt.files import atomic_write_text
from shardopt.report.blocks import View

if TYPE_CHECKING:
    from search.problem import Progress
    from search.tune.goals import Goal
    from search.tune.knobs import Knob, Value
    from search.tune.trial import Trial
    from search.tune.tune import Budget, Member, TuneResult, Tuning
    from shardopt.api.inputs import Inputs
    from shardopt.api.setting import Setting

MAX_VALUES = 64
MAX_TRIALS = 1_000_000
TRIALS = 24
STUDY_DIGITS = 10
"""Digits of the digest in the name of a study."""
SYNTAX = "A:B doubles from A to B, A:B:STEP goes in steps, A/B/C are these"


@dataclass(frozen=True)
class TuneFlags:
    """The flags of tuning as given; None where a flag was left out."""

    tune: str | None = None
    objectives: str | None = None
    trials: int | None = None
    storage: str | None = None
    study: str | None = None

    def check(self, request: PlanRequest) -> None:
        """Refuse flags that say nothing without ``--tune`` or with it, and values out of range.

        Raises:
            InputError: says which flag, and what is allowed.
        """
        if self.tune is None:
            for name in ("objectives", "trials", "storage", "study"):
                if getattr(self, name) is not None:
                    raise InputError(f"--{name} is for tuning; give it with --tune batch_size")
            return
        for name in ("from_", "objective", "scenarios", "stats", "tie", "prove"):
            if getattr(request, name) not in (None, False, "nominal"):
                raise InputError(
                    f"--{name.rstrip('_')} is about one setting, and --tune tries many; tune "
                    "first, then plan for the chosen setting with it"
                )
        check_number("trials", self.trials, 1, MAX_TRIALS)
        if self.study is not None and self.storage is None:
            raise InputError("--study names a study in a storage; give --storage tune.journal")
        if self.study == "":
            raise InputError("--study is empty; give a name")


def run_tuning(
    inputs: Inputs,
    flags: TuneFlags,
    output: Path | None,
    progress: Progress,
    say: Callable[[str], None],
) -> View:
    """Tune, search the best setting with full effort, write.

    Raises:
        InputError: a knob, objective or storage that cannot be used.
        InfeasibleError: no setting has a plan that fits.
    """
    from search.tune.knobs import turned
    from search.tune.tune import Budget
    from shardopt.api.answer import answer_of
    from shardopt.api.setting import refuse_outside
    from shardopt.api.tuned import tune_answer
    from shardopt.report.tune import tune_view

    request, setting = inputs.request, inputs.setting
    budget = Budget(
        flags.trials or TRIALS,
        request.effort,
        request.time_limit,
        request.seed,
        request.searchers,
        request.top_k,
    )
    tuning, study = _begin(setting, flags, budget)
    if tuning.shared is not None:
        say(f"study '{study}' in {tuning.shared.name}")
    tuned, members, interrupted = _search(tuning, progress)
    case = turned(tuning.case, members[0].trial.setting)
    topology = case.problem().topology
    best = replace(setting, workload=case.workload, installed=case.installed, topology=topology)
    head = {**best.head(request.seed), "tuned": dict(members[0].trial.setting)}
    answer = answer_of(best, members[0].result, head)
    if request.strict:
        refuse_outside(answer.best.out_of_range)
    if output is not None:
        atomic_write_text(output, answer.plan_text())
    condition = f", once {request.model} has the best setting"
    tuned_answer = tune_answer(answer, tuning, tuned, members, study)
    view = tune_view(tuned_answer, next_lines(request, output, condition))
    return replace(view, code=EXIT_INTERRUPTED if interrupted else 0)


def _begin(setting: Setting, flags: TuneFlags, budget: Budget) -> tuple[Tuning, str | None]:
    """A study that is ready to run, and its name if it is stored: one that the same model and flags
    give on every machine, unless the user chose another."""
    from search.tune.knobs import grid_of
    from search.tune.storage import open_storage
    from search.tune.study import new_study
    from search.tune.tune import Tuning
    from shardopt.api.cache import digest
    from shardopt.version import __version__

    assert flags.tune is not None
    knobs = read_knobs(flags.tune)
    goals = read_goals(flags.objectives, knobs)
    case = setting.case()
    grid = grid_of(case, knobs)
    # facts behind the trials; workers must agree on all of them
    facts = {
        "shardopt": __version__,
        **{key: value for key, value in setting.facts().items() if key != "model"},
        "digest of the model": digest(case.workload),
        "digest of the hardware": digest(case.hardware),
        "digest of the ranks": digest(case.installed),
        "reserve": case.reserve,
        "effort": budget.effort,
        "searchers": list(budget.searchers),
    }
    study, shared = flags.study, None
    if flags.storage is not None:
        shared = open_storage(flags.storage)
        inputs = digest(facts, grid.values, [goal.name for goal in goals], budget.seed)
        study = study or f"shardopt-{setting.workload.name}-{inputs[:STUDY_DIGITS]}"
    new = new_study(grid, goals, budget.seed, facts, name=study, shared=shared)
    return Tuning(case, grid, goals, budget, new, shared), study


def _search(tuning: Tuning, progress: Progress) -> tuple[TuneResult, list[Member], bool]:
    """The trials, the plans of the settings that no other beats, and whether Ctrl-C ended it."""
    begun: list[tuple[float, int]] = []

    def watch(done: int, total: int, best: Trial | None) -> None:
        begun.append((time.monotonic(), done))
        remaining = time_left(begun[0], begun[-1], total)
        best_ms = None if best is None else best.iteration_ms
        progress(f"trial {min(done + 1, total)} of {total}{remaining}", done / total, best_ms, None)

    def last(stage: str, fraction: float, best_ms: float | None, bound_ms: float | None) -> None:
        progress(f"best setting: {stage}", fraction, best_ms, bound_ms)

    tuning.watch = watch
    tuned = tuning.run()
    return tuned, *tuning.finish(tuned, last)


def time_left(first: tuple[float, int], last: tuple[float, int], total: int) -> str:
    """``, about 40 s left`` by the pace of the trials so far; empty before the first has ended.

    Args:
        first, last: when the study was looked at, in s, and how many trials had ended by then.
    """
    passed, done = last[0] - first[0], last[1] - first[1]
    return f", about {passed / done * (total - last[1]):.0f} s left" if done else ""


def read_knobs(text: str) -> dict[str, tuple[Value, ...] | None]:
    """Knob -> values, None where none are given.

    Raises:
        InputError: an unknown knob, values that cannot be read, a knob given twice.
    """
    from search.tune.knobs import KNOBS

    chosen: dict[str, tuple[Value, ...] | None] = {}
    for part in text.split(","):
        name, equals, values = (piece.strip() for piece in part.strip().partition("="))
        _check_known("tune", "knob", name, KNOBS)
        if name in chosen:
            raise InputError(f"--tune: {name} is given twice; give all of its values at once")
        chosen[name] = _values(KNOBS[name][0], name, values) if equals else None
    return chosen


def _check_known(flag: str, kind: str, name: str, allowed: Collection[str]) -> None:
    if name not in allowed:
        raise InputError(
            f"--{flag}: unknown {kind} '{name}'{did_you_mean(name, allowed)}; there are "
            f"{', '.join(allowed)}"
        )


def _values(knob: Knob, name: str, text: str) -> tuple[Value, ...]:
    """``A:B``, ``A:B:STEP`` or ``A/B/C``, ascending where the knob has an order."""

    def refuse(why: str) -> InputError:
        return InputError(f"--tune: {name}={text}{why}")

    def value(piece: str) -> Value:
        try:
            converted = knob.kind(piece.strip())
            fine = converted != "" if isinstance(converted, str) else math.isfinite(converted)
        except (ValueError, OverflowError):
            fine = False
        if not fine:
            raise refuse(f": '{piece}' is not allowed ({knob.allowed}); {SYNTAX}")
        return converted

    def check_count(count: float) -> None:
        if count > MAX_VALUES:
            raise refuse(f" has {count:.0f} values, at most {MAX_VALUES} are tried")

    if not (":" in text and knob.ordered):
        values = [value(piece) for piece in text.split("/")]
    else:
        low, high, *steps = (float(value(piece)) for piece in text.split(":"))
        if len(steps) > 1:
            raise refuse(f": {SYNTAX}")
        if not 0 < low <= high:
            raise refuse(" must begin above 0 and not end before it begins")
        if steps and steps[0] <= 0:
            raise refuse(" needs a step above 0")
        count = (high - low) / steps[0] if steps else math.log2(high / low)
        check_count(count + 1)
        # 1e-9: 0.1:0.3:0.1 has three values
        places = range(int(count + 1e-9) + 1)
        reached = [low + i * steps[0] if steps else low * 2**i for i in places]
        if reached[-1] < high * (1 - 1e-9):
            reached.append(high)
        values = [int(x) if knob.kind is int else round(x, 9) for x in reached]
    if len(set(values)) < len(values):
        raise refuse(" has a value twice")
    check_count(len(values))
    return tuple(sorted(values, key=float) if knob.ordered else values)


def read_goals(text: str | None, knobs: dict[str, tuple[Value, ...] | None]) -> list[Goal]:
    """Read the objectives to minimise.

    Raises:
        InputError: an unknown objective, or one twice.
    """
    from search.tune.goals import GOALS

    if text is None:
        return [GOALS["gpu_hours" if "hosts" in knobs else "time"]]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        _check_known("objectives", "objective", name, GOALS)
    if len(set(names)) < len(names):
        raise InputError(f"--objectives {text} names an objective twice")
    return [GOALS[name] for name in names]
