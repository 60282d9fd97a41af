"""The report of ``shardopt plan --tune``: trials, the best setting in words, its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from predictor.units import GIB
from search.tune.knobs import Value
from search.tune.trial import TRIED, WORTH
from shardopt.api.document import TuneAnswer, TuneKeys, TuneMember, TuneTrial
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


def tune_view(answer: TuneAnswer, end: Sequence[str]) -> View:
    """Show the trials, the best setting and its plan.

    Args:
        end: as of `plan_view`.
    """
    tune, plan = answer.tune, plan_view(answer, end)
    name = "only setting tried" if tune.tried == 1 else "best setting"
    return View(
        answer,
        [
            *_trials(tune),
            *(_front(tune) if len(tune.front) > 1 else ()),
            *_best(tune),
            Heading("The plan", f"under the {name}"),
            *plan.full,
        ],
        [f"{name}: {_words(tune.best.setting)}{_gain(tune)}", *plan.brief],
        plan.notes,
    )


def _trials(tune: TuneKeys) -> list[Block]:
    """The best trials searched and the one as given, then how many there were."""
    as_given = tune.as_given
    searched = [trial for trial in tune.trials if trial.objectives is not None]
    shown = sorted(searched, key=lambda t: (*(t.objectives or {}).values(), t.number))[:MAX_SHOWN]
    if as_given is not None and as_given not in shown:
        shown.append(as_given)
    rows = []
    members = {member.number: member for member in reversed(tune.front)}
    for trial in shown:
        member = members.get(trial.number)
        marks = ["as given"] * trial.as_given + ["searched again"] * (member is not None)
        name = f"{trial.number}{' (' + ', '.join(marks) + ')' if marks else ''}"
        rows.append([name, *_cells(tune, member or trial)])  # the figures of the best setting below
    best = f"a quick search of each setting, best {WORDS[tune.goal]} first"
    return [Heading("Trials", best), _grid(tune, ["<trial"], rows), "", _counted(tune)]


def _counted(tune: TuneKeys) -> str:
    states = Counter(trial.state for trial in tune.trials)
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
        f"{tune.tried} of {plural(tune.settings, 'setting')} tried "
        f"({ENDED[tune.stopped_by]}): {', '.join(parts)}."
    )


def _grid(tune: TuneKeys, first: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    names = (f"~{name.replace('_', ' ')}" for name in tune.choices)
    goals = (f">{HEADERS[goal]}" for goal in tune.objectives)
    return TextTable([*first, *names, *goals, ">ms"], rows)


def _cells(tune: TuneKeys, result: TuneTrial | TuneMember) -> list[str]:
    def shown(goal: str, value: float) -> str:
        if goal == "memory":
            return f"{value / GIB:.2f}"
        return f"{value:.4g}" if value < 1 else number(value)

    return [
        *(str(result.setting[name]) for name in tune.choices),
        *(shown(goal, value) for goal, value in (result.objectives or {}).items()),
        number(result.iteration_ms or 0.0),
    ]


def _front(tune: TuneKeys) -> list[Block]:
    """Settings that no other beats, after the last search."""
    names = ", ".join(WORDS[goal] for goal in tune.objectives)
    rows = [
        [str(place), str(member.number), *_cells(tune, member)]
        for place, member in enumerate(tune.front, start=1)
    ]
    title = Heading("Pareto front", f"no setting found is better than these in {names}")
    return [title, _grid(tune, ["<", "<trial"], rows)]


def _best(tune: TuneKeys) -> list[Block]:
    best, not_tried, gain = tune.best, _not_tried(tune), _gain(tune)
    by = f" by {WORDS[tune.goal]}" if len(tune.front) > 1 else ""
    blocks: list[Block] = [
        Heading(
            "Only setting tried" if tune.tried == 1 else f"Best setting{by}", _words(best.setting)
        ),
        *(f"  - {text}" for text in best.changes),
    ]
    if not best.changes and not not_tried:
        blocks.append("Nothing to change: the model and the machine as given are best.")
    elif not best.changes:
        blocks.append(
            "No setting that was tried is better than the model and the machine as given."
        )
    blocks += not_tried
    if best.changes:
        blocks += filter(None, [_undone(best.undone)])
    return [*blocks, *([f"This takes {gain.removeprefix(', ')}."] if gain else [])]


def _not_tried(tune: TuneKeys) -> list[str]:
    """The number of settings that no trial was for, and the values that none had."""
    untried = tune.settings - tune.tried
    if untried <= 0:
        return []
    tried = [trial.setting for trial in tune.trials if trial.state in TRIED]
    values = {
        name: [str(value) for value in values if all(setting[name] != value for setting in tried)]
        for name, values in tune.values.items()
    }
    missing = [
        f"{n.replace('_', ' ')} {', '.join(unused)}" for n, unused in values.items() if unused
    ]
    words = f"{untried:,} of {plural(tune.settings, 'setting')} were not tried"
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


def _gain(tune: TuneKeys) -> str:
    """Say how much better the best setting is than the given one, by the first goal."""
    as_given, goal = tune.as_given, tune.goal
    if as_given is None or as_given.objectives is None or as_given.number == tune.best.number:
        return ""
    less = 1 - tune.best.objectives[goal] / as_given.objectives[goal]
    return f", {percent(less)} less {WORDS[goal]} than the setting as given" if less > 0 else ""


def _words(setting: Mapping[str, Value]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items())
