"""``shardopt plan --tune``: choose what a plan cannot express, with a plan for the best choice."""

from __future__ import annotations

import hashlib
import json as json_format
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from predictor.errors import InputError, did_you_mean
from shardopt.api.request import PlanRequest
from shardopt.cli.interrupts import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from search.tune.goals import Goal
    from search.tune.knobs import Case, Knob, Value
    from search.tune.study import Trial
    from search.tune.tune import Budget, Member, TuneResult, Tuning
    from shardopt.api.answer import Inputs
    from shardopt.api.setting import Setting

MAX_VALUES = 64
MAX_TRIALS = 1_000_000
TRIALS = 24
STUDY_DIGITS = 10
"""Of the digest in the name of a study."""
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
                    raise InputError(
                        f"--{name} is for tuning; give it with --tune, such as --tune batch_size"
                    )
            return
        if request.from_ is not None:
            raise InputError(
                "--tune and --from cannot be used together: another setting has another best plan"
            )
        for name in ("objective", "scenarios", "stats"):
            if getattr(request, name) not in (None, "nominal"):
                raise InputError(
                    f"--{name} is about one setting, and --tune tries many; tune first, then plan "
                    f"for the chosen setting with --{name}"
                )
        if self.trials is not None and not 1 <= self.trials <= MAX_TRIALS:
            raise InputError(
                f"--trials is {self.trials}; it must be at least 1 and at most {MAX_TRIALS}"
            )
        if self.study is not None and self.storage is None:
            raise InputError(
                "--study names a study in a storage; give --storage too, such as "
                "--storage tune.journal"
            )
        if self.study == "":
            raise InputError("--study is empty; give a name")


def run_tuning(
    inputs: Inputs, flags: TuneFlags, output: Path | None, *, json: bool, quiet: bool
) -> None:
    """Tune, search the best setting with full effort, write and report.

    Raises:
        InputError: a knob, objective or storage that cannot be used.
        InfeasibleError: no setting has a plan that fits.
    """
    from search.tune.tune import Budget
    from shardopt.api.answer import answer_of, plan_head
    from shardopt.api.setting import refuse_outside
    from shardopt.cli.output import next_lines, note, print_json
    from shardopt.files import atomic_write_text
    from shardopt.report.console import make_console
    from shardopt.report.objects import plan_object
    from shardopt.report.tune import TuneReport, show_tuned, show_tuned_headline, tune_object

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
        note([f"study '{study}' in {tuning.shared.name}"], quiet=quiet)
    tuned, members, interrupted = _search(tuning, on=not (json or quiet))
    case = tuning.grid.apply_setting(tuning.case, members[0].trial.setting)
    topology = case.problem().topology
    best = replace(setting, workload=case.workload, installed=case.installed, topology=topology)
    head = {**plan_head(best, request.seed), "tuned": dict(members[0].trial.setting)}
    answer = answer_of(best, members[0].result, head)
    if request.strict:
        refuse_outside(answer.best.out_of_range)
    if output is not None:
        atomic_write_text(output, answer.plan_text())
    undone = [tuning.undone(member) for member in members]
    report = TuneReport(tuning, tuned, members, study, undone, answer)
    if json:
        note(setting.notes, quiet=quiet)
        found = plan_object(answer)
        print_json({**found, "tune": tune_object(report)})
    elif quiet:
        show_tuned_headline(make_console(), report)
    else:
        condition = f", once {request.model} has the best setting"
        show_tuned(make_console(), report, next_lines(request.model, output, condition))
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _begin(setting: Setting, flags: TuneFlags, budget: Budget) -> tuple[Tuning, str | None]:
    """A study that is ready to run, and its name if it is stored: one that the same model and flags
    give on every machine, unless the user chose another."""
    from search.tune.knobs import grid_of
    from search.tune.storage import open_storage
    from search.tune.study import new_study
    from search.tune.tune import Tuning

    assert flags.tune is not None
    knobs = read_knobs(flags.tune)
    goals = read_goals(flags.objectives, knobs)
    case = setting.case()
    grid = grid_of(case, knobs)
    facts = _study_facts(setting, case, budget)
    study, shared = flags.study, None
    if flags.storage is not None:
        shared = open_storage(flags.storage)
        values = {name: list(of) for name, of in grid.values.items()}
        what = json_format.dumps([facts, values, [goal.name for goal in goals], budget.seed])
        digest = hashlib.sha256(what.encode()).hexdigest()[:STUDY_DIGITS]
        study = study or f"shardopt-{setting.workload.name}-{digest}"
    made = new_study(case, grid, goals, budget.seed, facts, name=study, shared=shared)
    return Tuning(case, grid, goals, budget, made, shared), study


def _study_facts(setting: Setting, case: Case, budget: Budget) -> dict[str, Any]:
    """What the trials of a study are made for; workers must agree on all of it."""
    from shardopt.version import __version__

    def one_or_all(caps: tuple[int, ...]) -> int | list[int]:
        return caps[0] if len(set(caps)) == 1 else list(caps)

    machine = case.installed
    profile = hashlib.sha256(case.hardware.model_dump_json().encode()).hexdigest()
    return {
        "shardopt": __version__,
        "model": case.workload.name,
        "digest of the model": case.workload.sha256,
        "batch size": case.workload.batch_size,
        "hardware": setting.hardware_name,
        "digest of the hardware": profile,
        "ranks": machine.world_size,
        "ranks per host": machine.local_world_size,
        "NVLink domain": machine.nvlink_domain,
        "network": [asdict(level) for level in machine.network],
        "HBM bytes": one_or_all(machine.hbm_cap_bytes),
        "DDR bytes": one_or_all(machine.ddr_cap_bytes),
        "reserve": case.reserve,
        "effort": budget.effort,
        "searchers": list(budget.searchers),
    }


def _search(tuning: Tuning, *, on: bool) -> tuple[TuneResult, list[Member], bool]:
    """The trials, the plans of the settings that no other beats, and whether Ctrl-C ended it."""
    from shardopt.report.progress import SearchProgress

    with SearchProgress(on=on) as progress:
        begun: list[tuple[float, int]] = []

        def watch(done: int, total: int, best: Trial | None) -> None:
            best_ms = None if best is None else best.iteration_ms
            begun.append((time.monotonic(), done))
            left = time_left(begun[0], begun[-1], total)
            text = f"trial {min(done + 1, total)} of {total}{left}"
            progress(text, done / total, best_ms, None)

        tuning.watch = watch
        tuned = tuning.run()

        def last(
            stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
        ) -> None:
            progress(f"best setting: {stage}", fraction, best_ms, bound_ms)

        members, interrupted = tuning.finish(tuned, last)
    return tuned, members, interrupted


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
        if name not in KNOBS:
            raise InputError(
                f"--tune: unknown knob '{name}'{did_you_mean(name, KNOBS)}; "
                f"there are {', '.join(KNOBS)}"
            )
        if name in chosen:
            raise InputError(f"--tune: {name} is given twice; give all of its values at once")
        chosen[name] = _values(KNOBS[name], values) if equals else None
    return chosen


def _values(knob: Knob, text: str) -> tuple[Value, ...]:
    """``A:B``, ``A:B:STEP`` or ``A/B/C``, ascending where the knob has an order."""
    if ":" in text and knob.ordered:
        found = _range(knob, text)
    else:
        found = [_value(knob, piece, text) for piece in text.split("/")]
    if len(set(found)) < len(found):
        raise InputError(f"--tune: {knob.name}={text} has a value twice")
    _check_count(knob, text, len(found))
    return tuple(sorted(found, key=float) if knob.ordered else found)


def _range(knob: Knob, text: str) -> list[Value]:
    low, high, *steps = (float(_value(knob, piece, text)) for piece in text.split(":"))
    if len(steps) > 1:
        raise InputError(f"--tune: {knob.name}={text}: {SYNTAX}")
    if not 0 < low <= high:
        raise InputError(
            f"--tune: {knob.name}={text} must begin above 0 and not end before it begins"
        )
    if steps and steps[0] <= 0:
        raise InputError(f"--tune: {knob.name}={text} needs a step above 0")
    count = (high - low) / steps[0] if steps else math.log2(high / low)
    _check_count(knob, text, int(min(count, 1e15)) + 1)
    # 1e-9: 0.1:0.3:0.1 has three values
    places = range(int(count + 1e-9) + 1)
    found = [low + i * steps[0] if steps else low * 2**i for i in places]
    if found[-1] < high * (1 - 1e-9):
        found.append(high)
    return [int(x) if knob.kind is int else round(x, 9) for x in found]


def _check_count(knob: Knob, text: str, count: int) -> None:
    if count > MAX_VALUES:
        raise InputError(
            f"--tune: {knob.name}={text} has {count} values, at most {MAX_VALUES} are tried; "
            "give larger steps"
        )


def _value(knob: Knob, piece: str, text: str) -> Value:
    try:
        value = knob.kind(piece.strip())
        fine = value != "" if isinstance(value, str) else math.isfinite(value)
    except (ValueError, OverflowError):
        fine = False
    if not fine:
        raise InputError(
            f"--tune: {knob.name}={text}: '{piece}' is not allowed ({knob.allowed}); {SYNTAX}"
        )
    return value


def read_goals(text: str | None, knobs: dict[str, tuple[Value, ...] | None]) -> list[Goal]:
    """What is minimised.

    Raises:
        InputError: an unknown objective, or one twice.
    """
    from search.tune.goals import GOALS

    if text is None:
        return [GOALS["gpu_hours" if "hosts" in knobs else "time"]]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in GOALS:
            raise InputError(
                f"--objectives: unknown objective '{name}'{did_you_mean(name, GOALS)}; "
                f"there are {', '.join(GOALS)}"
            )
    if len(set(names)) < len(names):
        raise InputError(f"--objectives {text} names an objective twice")
    return [GOALS[name] for name in names]
