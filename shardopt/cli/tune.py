"""``shardopt plan --tune``: choose what a plan cannot express, with a plan for the best choice."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predictor.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from search.tune.goals import Goal
    from search.tune.knobs import Case, Knob, Value
    from search.tune.study import Trial
    from search.tune.tune import Budget, Member, TuneResult, Tuning
    from shardopt.api.setting import Setting

MAX_VALUES = 64
MAX_TRIALS = 1_000_000
TRIALS = 24
STUDY_DIGITS = 10
"""Of the digest in the name of a study."""
SYNTAX = "A:B doubles from A to B, A:B:STEP goes in steps, A/B/C are these"


def _option(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(
        flag, metavar=metavar, help=text, rich_help_panel="Tuning", show_default=False
    )


Tune = Annotated[
    str | None,
    _option(
        "--tune",
        "KNOBS",
        "Settings to choose as well, separated by commas: batch_size, pipeline, qcomm, bucket, "
        "cw_min, cache_ratio, hosts, groups, sync_interval, hbm. Values can be given: "
        "batch_size=2048:16384 doubles, batch_size=4096:16384:4096 goes in steps, qcomm=fp32/bf16 "
        "is a list. See docs/tuning.md.",
    ),
]
Objectives = Annotated[
    str | None,
    _option(
        "--objectives",
        "NAMES",
        "What --tune minimises: time (per sample), memory (of the fullest rank) or gpu_hours (per "
        "sample). Several, separated by commas, give a Pareto front. The default is time, or "
        "gpu_hours if hosts are tuned.",
    ),
]
Trials = Annotated[
    int | None,
    _option(
        "--trials",
        "N",
        "Number of settings to try, over all machines that share the study; 24 by default.",
    ),
]
Storage = Annotated[
    str | None,
    _option(
        "--storage",
        "URL",
        "Keep the study in a database (postgresql://user@host/name, sqlite:///tune.db) or a "
        "journal file (journal:PATH, or a path that ends in .journal or .log), to continue it "
        "later or to share it between machines.",
    ),
]
Study = Annotated[
    str | None,
    _option(
        "--study",
        "NAME",
        "Name of the study in --storage; by default it is made from the model and the flags.",
    ),
]


@dataclass(frozen=True)
class TuneFlags:
    """The flags of tuning as given; None where a flag was left out."""

    tune: str | None = None
    objectives: str | None = None
    trials: int | None = None
    storage: str | None = None
    study: str | None = None
    from_: Path | None = None

    def check(self) -> None:
        """Refuse flags that say nothing without ``--tune``, and values out of range.

        Raises:
            InputError: says which flag, and what is allowed.
        """
        if self.tune is None:
            for name in ("objectives", "trials", "storage", "study"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"--{name} is for tuning; give it with --tune, such as --tune batch_size"
                    )
        elif self.from_ is not None:
            raise InputError(
                "--tune and --from cannot be used together: another setting has another best plan"
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


@dataclass(frozen=True)
class OutputChoice:
    """Where the outcome goes."""

    json: bool
    output: Path | None
    quiet: bool
    strict: bool


def run_tuning(
    model: Path,
    setting: Setting,
    flags: TuneFlags,
    limits: tuple[float, float | None, int, Sequence[str], int],
    show: OutputChoice,
) -> None:
    """Tune, search the best setting with full effort, write and report.

    Args:
        limits: effort, time limit in seconds, seed, searchers and plans to show.

    Raises:
        InputError: a knob, objective or storage that cannot be used.
        InfeasibleError: no setting has a plan that fits.
    """
    from search.expected_gain import gain_over_baseline
    from search.tune.tune import Budget
    from shardopt.api.plan_file import plan_meta, write_best
    from shardopt.cli.interrupts import EXIT_INTERRUPTED
    from shardopt.cli.output import note, print_json
    from shardopt.cli.setting import refuse_outside
    from shardopt.report.console import make_console
    from shardopt.report.objects import plan_object
    from shardopt.report.plan import PlanReport
    from shardopt.report.tune import TuneReport, show_tuned, show_tuned_headline, tune_object

    tuning, study = _begin(setting, flags, Budget(flags.trials or TRIALS, *limits))
    if tuning.shared is not None:
        note([f"study '{study}' in {tuning.shared.name}"], quiet=show.quiet)
    tuned, members, interrupted = _search(tuning, on=not (show.json or show.quiet))

    result = members[0].result
    case = tuning.grid.apply_setting(tuning.case, members[0].trial.setting)
    topology = case.problem().topology
    best = replace(setting, workload=case.workload, installed=case.installed, topology=topology)
    predictions = [best.predict(ranked.plan) for ranked in result.plans]
    if show.strict:
        refuse_outside(predictions[0].out_of_range)
    meta = plan_meta(best, tuning.budget.seed)
    if show.output is not None:
        values = {"tuned": dict(members[0].trial.setting)}
        write_best(show.output, result, predictions[0], {**meta, **values})
    undone = [tuning.undone(member) for member in members]
    report = TuneReport(tuning, tuned, members, study, undone)
    gain = gain_over_baseline(best.problem(), result)
    if show.json:
        note(setting.notes, quiet=show.quiet)
        made = plan_object(result, predictions, meta, setting.notes, gain)
        print_json({**made, "tune": tune_object(report)})
    else:
        written = None if show.output is None else str(show.output)
        following = (
            f"shardopt explain {model} {written}, once {model} has the best setting"
            if written
            else "the same command with -o plan.json"
        )
        plan_report = PlanReport(best, result, predictions, written, following, gain=gain)
        (show_tuned_headline if show.quiet else show_tuned)(make_console(), report, plan_report)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _begin(setting: Setting, flags: TuneFlags, budget: Budget) -> tuple[Tuning, str | None]:
    """A study that is ready to run, and its name if it is stored: one that the same model and flags
    give on every machine, unless the user chose another."""
    from search.tune.knobs import Case, grid_of
    from search.tune.storage import open_storage
    from search.tune.study import new_study
    from search.tune.tune import Tuning

    assert flags.tune is not None
    knobs = read_knobs(flags.tune)
    goals = read_goals(flags.objectives, knobs)
    case = Case(setting.workload, setting.installed, setting.hardware, setting.reserve)
    grid = grid_of(case, knobs)
    facts = _study_facts(setting, case, budget)
    study, shared = flags.study, None
    if flags.storage is not None:
        shared = open_storage(flags.storage)
        values = {name: list(of) for name, of in grid.values.items()}
        what = json.dumps([facts, values, [goal.name for goal in goals], budget.seed])
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
