"""The report of ``shardopt plan --tune``: trials, the best setting in words, its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from predictor.units import GIB
from search.tune.goals import Goal, Values
from search.tune.knobs import Value, change_lines, changes
from search.tune.trial import TRIED, WORTH, Trial
from search.tune.tune import Member, TuneResult, Tuning
from shardopt.api.answer import Answer
from shardopt.api.document import TuneAnswer, TuneKeys
from shardopt.formatting import number, percent, plural
from shardopt.report.blocks import Block, Heading, TextTable, View
from shardopt.report.plan import plan_view

MAX_SHOWN = 8
"""Most trials in the table, not counting the one as given."""
NOTHING = 5e-4
"""Changes of a smaller fraction count as nothing."""
HEADERS = {"time": "ms per 1000", "memory": "GiB on a rank", "gpu_hours": "GPU-h per 10^9"}
WORDS = {
    "time": "time per sample",
    "memory": "memory of the fullest rank",
    "gpu_hours": "GPU-hours per sample",
}
ENDED = {
    "trials": "the number of trials asked for",
    "exhausted": "all of them",
    "time": "stopped by the time limit",
    "interrupted": "interrupted",
}


@dataclass(frozen=True)
class TuneReport:
    """Everything the report shows.

    Args:
        members: settings that no other beats, best by the first goal first.
        study: its name in the storage; None without one.
        answer: the plans under the best setting.
    """

    tuning: Tuning
    tuned: TuneResult
    members: Sequence[Member]
    study: str | None
    answer: Answer

    @property
    def goals(self) -> Sequence[Goal]:
        """Minimised quantities."""
        return self.tuning.goals

    @property
    def tried(self) -> int:
        """Settings that were searched, ruled out or found to have no plan."""
        return sum(trial.state in TRIED for trial in self.tuned.trials)

    @property
    def tuned_names(self) -> list[str]:
        """The parameters that had a choice."""
        return [name for name, values in self.tuning.grid.values.items() if len(values) > 1]

    def as_given(self) -> Trial | None:
        """The trial of the case as given, if it was searched."""
        for trial in self.tuned.trials:
            if trial.values is not None and not changes(self.tuning.case, trial.setting):
                return trial
        return None


def tune_view(report: TuneReport, end: Sequence[str]) -> View:
    """Show the trials, the best setting and its plan.

    Args:
        end: as of `plan_view`.
    """
    answer = report.answer.document()
    plan = plan_view(answer, end)
    name = "only setting tried" if report.tried == 1 else "best setting"
    words = _words(report.members[0].trial.setting)
    return View(
        TuneAnswer(
            **{name: getattr(answer, name) for name in answer.model_fields_set},
            tune=tune_keys(report),
        ),
        [
            *_trials(report),
            *(_front(report) if len(report.members) > 1 else ()),
            *_best(report),
            Heading("The plan", f"under the {name}"),
            *plan.full,
        ],
        [f"{name}: {words}{_gain(report)}", *plan.brief],
        plan.notes,
    )


def _trials(report: TuneReport) -> list[Block]:
    """The best trials searched and the one as given, then how many there were."""
    as_given = report.as_given()
    searched = [t for t in report.tuned.trials if t.values is not None]
    shown = sorted(searched, key=lambda t: (t.values, t.number))[:MAX_SHOWN]
    if as_given is not None and as_given not in shown:
        shown.append(as_given)
    rows = []
    members = {m.trial.number: m for m in reversed(report.members)}
    for trial in shown:
        values, ms = trial.values, trial.iteration_ms
        member = members.get(trial.number)
        if member is not None:  # the figures of the best setting below
            values, ms = member.values, member.result.best.iteration_ms
        marks = ["as given"] * (trial is as_given) + ["searched again"] * (member is not None)
        name = f"{trial.number}{' (' + ', '.join(marks) + ')' if marks else ''}"
        rows.append([name, *_cells(report, trial.setting, values or (), ms or 0.0)])
    best = f"a quick search of each setting, best {WORDS[report.goals[0].name]} first"
    return [Heading("Trials", best), _grid(report, ["<trial"], rows), "", _counted(report)]


def _counted(report: TuneReport) -> str:
    states = Counter(t.state for t in report.tuned.trials)
    parts = [f"{states['searched']} searched"]
    if states["ruled out"]:
        parts.append(
            f"{states['ruled out']} not searched, as their lower bound leaves no gain above "
            f"{percent(WORTH)}"
        )
    if states["infeasible"]:
        parts.append(f"{states['infeasible']} without a plan that fits")
    if states["failed"]:
        parts.append(f"{plural(states['failed'], 'trial')} broken off")
    if states["open"]:
        parts.append(f"{plural(states['open'], 'trial')} unfinished")
    return (
        f"{report.tried} of {plural(report.tuning.grid.size, 'setting')} tried "
        f"({ENDED[report.tuned.stopped_by]}): {', '.join(parts)}."
    )


def _grid(report: TuneReport, first: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    names = (f"~{name.replace('_', ' ')}" for name in report.tuned_names)
    goals = (f">{HEADERS[goal.name]}" for goal in report.goals)
    return TextTable([*first, *names, *goals, ">ms"], rows)


def _cells(
    report: TuneReport, setting: Mapping[str, Value], values: Values, ms: float
) -> list[str]:
    def shown(goal: Goal, value: float) -> str:
        if goal.name == "memory":
            return f"{value / GIB:.2f}"
        return f"{value:.4g}" if value < 1 else number(value)

    return [
        *(str(setting[name]) for name in report.tuned_names),
        *(shown(goal, value) for goal, value in zip(report.goals, values, strict=True)),
        number(ms),
    ]


def _front(report: TuneReport) -> list[Block]:
    """Settings that no other beats, after the last search."""
    names = ", ".join(WORDS[goal.name] for goal in report.goals)
    rows = [
        [
            str(place),
            str(member.trial.number),
            *_cells(report, member.trial.setting, member.values, member.result.best.iteration_ms),
        ]
        for place, member in enumerate(report.members, start=1)
    ]
    title = Heading("Pareto front", f"no setting found is better than these in {names}")
    return [title, _grid(report, ["<", "<trial"], rows)]


def _best(report: TuneReport) -> list[Block]:
    best = report.members[0]
    by = f" by {WORDS[report.goals[0].name]}" if len(report.members) > 1 else ""
    name = "Only setting tried" if report.tried == 1 else f"Best setting{by}"
    lines = change_lines(report.tuning.case, best.trial.setting)
    blocks: list[Block] = [
        Heading(name, _words(best.trial.setting)),
        *(f"  - {text}" for text in lines),
    ]
    not_tried = _not_tried(report)
    if not lines and not not_tried:
        blocks.append("Nothing to change: the model and the machine as given are best.")
    elif not lines:
        blocks.append(
            "No setting that was tried is better than the model and the machine as given."
        )
    blocks += not_tried
    if lines:
        blocks += filter(None, [_undone(report.tuning.undone(best))])
    gain = _gain(report)
    return [*blocks, *([f"This takes {gain.removeprefix(', ')}."] if gain else [])]


def _not_tried(report: TuneReport) -> list[str]:
    """The number of settings that no trial was for, and the values that none had."""
    untried = report.tuning.grid.size - report.tried
    if untried <= 0:
        return []
    tried = [trial.setting for trial in report.tuned.trials if trial.state in TRIED]
    values = {
        name: [str(value) for value in values if all(setting[name] != value for setting in tried)]
        for name, values in report.tuning.grid.values.items()
    }
    missing = [
        f"{n.replace('_', ' ')} {', '.join(unused)}" for n, unused in values.items() if unused
    ]
    words = f"{untried:,} of {plural(report.tuning.grid.size, 'setting')} were not tried"
    return [words + (f"; no trial had {'; '.join(missing)}." if missing else ".")]


def _undone(undone: Mapping[str, float]) -> str:
    """Say what each change is worth by itself: one that gains nothing is not worth making."""
    if not undone:
        return ""
    parts = [
        f"{name.replace('_', ' ')} {'+' if more > 0 else '-'}{percent(abs(more))}"
        if abs(more) >= NOTHING
        else f"{name.replace('_', ' ')} nothing"
        for name, more in undone.items()
    ]
    return f"Undoing just one of them, with the same plan, costs: {', '.join(parts)}."


def _gain(report: TuneReport) -> str:
    """Say how much better the best setting is than the given one, by the first goal."""
    as_given, goal = report.as_given(), report.goals[0]
    if (
        as_given is None
        or as_given.values is None
        or as_given.number == report.members[0].trial.number
    ):
        return ""
    less = 1 - report.members[0].values[0] / as_given.values[0]
    return (
        f", {percent(less)} less {WORDS[goal.name]} than the setting as given" if less > 0 else ""
    )


def _words(setting: Mapping[str, Value]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items())


def tune_keys(report: TuneReport) -> TuneKeys:
    """``tune`` of ``shardopt plan --tune --json``."""
    tuning = report.tuning
    front = [
        {
            **vars(member.trial),
            "changes": change_lines(tuning.case, member.trial.setting),
            "objectives": _named(report, member.values),
            "iteration_ms": member.result.best.iteration_ms,
            "lower_bound_ms": member.result.lower_bound_ms,
            "undone": tuning.undone(member),
            "tables": member.result.best.plan,
        }
        for member in report.members
    ]
    trials = [
        {
            **vars(trial),
            "objectives": _named(report, trial.values),
            "bound": _named(report, trial.bound),
        }
        for trial in report.tuned.trials
    ]
    return TuneKeys.model_validate(
        {
            "objectives": {goal.name: goal.unit for goal in report.goals},
            "values": tuning.grid.values,
            "settings": tuning.grid.size,
            "trials": trials,
            "best": front[0],
            "front": front,
            "stopped_by": report.tuned.stopped_by,
            "study": report.study,
        }
    )


def _named(report: TuneReport, values: Values | None) -> dict[str, float] | None:
    if values is None:
        return None
    return {goal.name: value for goal, value in zip(report.goals, values, strict=True)}
