"""The spine of tuning: a study of settings, each scored by a search of its plans.

knobs     the model and the machine, the settings to choose from
goals     what is minimised
study     which setting comes next, and what is kept of a trial for any worker to read
storage   where the study lives
trial     a setting is ruled out by its bound, or searched

Why: docs/decisions/0032-tuning.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import optuna
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from predictor.cost.loads import ShardLoads
from predictor.errors import InfeasibleError, InputError
from predictor.model.plan import ShardingPlan
from predictor.predict import predict
from search.problem import Problem, Progress, RankedPlan, Result, silent
from search.propose.searchers import SEARCHERS
from search.stop import Stop
from search.tune.goals import Goal, Values, covers, pareto_front, shard_bytes, values_of
from search.tune.knobs import Case, Grid, Setting, Value
from search.tune.storage import SharedStorage, storage_errors
from search.tune.study import (
    FINISHED,
    Trial,
    decode_plan,
    draw_setting,
    encode_plan,
    notes_of_twin,
    read_trial,
)
from search.tune.trial import RuledOutError, search_from, try_setting

TRIAL_EFFORT = 0.1
"""Of a trial's search, as a share of the effort given."""
FRONT_EFFORT = 0.5
"""Of the last search of a member of the front, as a share of the effort given."""
TRIALS_TIME = 0.7
"""Share of a time limit that trials may take; the rest is for the last search."""
WARM_PLANS = 2
"""Best plans so far that a trial's search starts from, too."""
ALIKE = 0.01
"""Of two plans of a setting that differ by no more than this fraction, a front shows one."""
LOADS_KEPT = 4
"""Loads of shards that are kept for trials that have the same."""


@dataclass(frozen=True)
class Budget:
    """How much work tuning does.

    Args:
        trials: finished trials of the study over all workers, >= 1. A worker does not wait for the
            trials of others, so each may run one more.
        effort: of the last search; trials take `TRIAL_EFFORT` of it.
        time_limit_s: ceiling on wall time in seconds; None for no ceiling.
    """

    trials: int = 24
    effort: float = 1.0
    time_limit_s: float | None = None
    seed: int = 0
    searchers: Sequence[str] = SEARCHERS
    top_k: int = 3


@dataclass(frozen=True)
class TuneResult:
    """Outcome of the trials.

    Args:
        trials: all of the study, by number.
        front: those searched that no other beats, by the first goal; the first of it is the best.
        stopped_by: ``trials``, ``exhausted`` (every setting was tried), ``time`` or
            ``interrupted``.
    """

    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    stopped_by: str

    @property
    def best(self) -> Trial:
        """The best setting by the first goal."""
        return self.front[0]


@dataclass(frozen=True)
class Member:
    """A setting that no other beats, with its plans and the values of the best of them."""

    trial: Trial
    values: Values
    result: Result


class Watch(Protocol):
    """Told how far the study is, whenever a worker looks at it."""

    def __call__(self, done: int, total: int, best: Trial | None) -> None:
        """``done`` of ``total`` trials are finished; ``best`` by the first goal, if any."""
        ...


def watch_nothing(done: int, total: int, best: Trial | None) -> None:
    """A `Watch` that shows nothing."""


@dataclass
class Tuning:
    """One worker on one study.

    Args:
        shared: the storage; None to tune in this process alone.
    """

    case: Case
    grid: Grid
    goals: Sequence[Goal]
    budget: Budget
    study: optuna.Study
    shared: SharedStorage | None = None
    watch: Watch = watch_nothing
    _start: float = field(default_factory=time.monotonic)
    _loads: dict[tuple[Value, ...], ShardLoads] = field(default_factory=dict)
    _checked: set[int] = field(default_factory=set)

    def run(self) -> TuneResult:
        """Run trials until the study has as many as it should.

        Raises:
            InfeasibleError: no setting that was tried has a plan that fits.
            InputError: the storage cannot be used any more.
        KeyboardInterrupt: before any trial was finished.
        """
        with nullcontext() if self.shared is None else storage_errors(self.shared.name):
            try:
                stopped_by = self._work()
            except KeyboardInterrupt:
                stopped_by = "interrupted"
            trials = tuple(map(self._read, self._trials()))
        searched = [t for t in trials if t.values is not None]
        if not searched and stopped_by == "interrupted":
            raise KeyboardInterrupt
        if not searched:
            raise _nothing_found(trials, stopped_by)
        points = [t.values for t in searched if t.values is not None]
        members = sorted((searched[i] for i in pareto_front(points)), key=lambda t: t.values or ())
        return TuneResult(trials, tuple(members), stopped_by)

    def finish(self, tuned: TuneResult, progress: Progress = silent) -> tuple[list[Member], bool]:
        """The plans of the front, searched with more effort, best by the first goal first.

        A plan of the last search may be faster and take more memory than that of the trial; both
        are kept where neither beats the other and they differ by more than `ALIKE`.

        Returns:
            The members, and whether the user ended the search before all were searched.
        """
        found: list[Member] = []
        interrupted = tuned.stopped_by == "interrupted"
        for done, trial in enumerate(tuned.front):
            last = None
            if not interrupted:
                try:
                    last = self._search(trial, len(tuned.front) - done, tuned, progress)
                    found.append(last)
                except KeyboardInterrupt:
                    interrupted = True
            scored = sum(t.evaluations for t in tuned.trials)
            tried = self._as_tried(trial, "interrupted" if interrupted else "work", scored)
            if last is None or len(self.goals) == 1 or not _alike(last.values, tried.values):
                found.append(tried)
        best = [found[i] for i in pareto_front([member.values for member in found])]
        return sorted(best, key=lambda member: member.values), interrupted

    def undone(self, member: Member) -> dict[str, float]:
        """What each change of a setting is worth alone: parameter -> by what fraction the first
        goal grows when that parameter is as given and the plan stays.

        Changes that the plan does not survive (the number of hosts) are left out.
        """
        plan, found = member.result.best.plan, {}
        for name in self.grid.changes(self.case, member.trial.setting):
            setting = {k: v for k, v in member.trial.setting.items() if k != name}
            problem = self.grid.apply_setting(self.case, setting).problem()
            if problem.topology.world_size == plan.world_size:
                ms = predict(
                    problem.workload, problem.topology, problem.hardware, plan
                ).iteration_ms
                goal = self.goals[0].of(problem, ms, shard_bytes(problem, plan))
                found[name] = goal / member.values[0] - 1
        return found

    def _search(self, trial: Trial, ahead: int, tuned: TuneResult, progress: Progress) -> Member:
        """The last search of a setting; ``ahead`` searches share the time that is left."""
        assert trial.plan is not None
        share = 1.0 if len(tuned.front) == 1 else FRONT_EFFORT
        limit = self.budget.time_limit_s
        left = None if limit is None else max(1.0, limit - (time.monotonic() - self._start)) / ahead
        problem = self._problem(trial.setting)
        result = search_from(
            problem,
            [trial.plan],
            Stop(self.budget.effort * share, left),
            self.budget.seed,
            searchers=self.budget.searchers,
            top_k=self.budget.top_k,
            progress=progress,
        )
        taken = shard_bytes(problem, result.best.plan)
        return Member(
            trial, values_of(self.goals, problem, result.best.iteration_ms, taken), result
        )

    def _as_tried(self, trial: Trial, stopped_by: str, evaluations: int) -> Member:
        """What the trial found; ``evaluations`` are those of all trials, as the time is."""
        assert trial.plan is not None
        assert trial.values is not None
        assert trial.iteration_ms is not None
        result = Result(
            plans=(RankedPlan(trial.plan, trial.iteration_ms, f"trial {trial.number}"),),
            lower_bound_ms=trial.lower_bound_ms,
            stopped_by=stopped_by,
            baselines={},
            baseline_plans={},
            search_seconds=time.monotonic() - self._start,
            evaluations=evaluations,
            seed=self.budget.seed,
        )
        return Member(trial, trial.values, result)

    def _problem(self, setting: Setting) -> Problem:
        """The problem of a setting, with the loads of an earlier one where they are the same.

        Raises:
            InfeasibleError: nothing is left for tables.
        """
        problem = self.grid.apply_setting(self.case, setting).problem()
        same = self.grid.loads_of(setting)
        loads = self._loads.pop(same, None) or problem.scorer.shards
        self._loads[same] = loads
        if len(self._loads) > LOADS_KEPT:
            del self._loads[next(iter(self._loads))]
        return replace(problem, loads=loads)

    def _work(self) -> str:
        while True:
            done = [t for t in self._trials() if t.state in FINISHED]
            self.watch(len(done), self.budget.trials, self._best())
            if len(done) >= self.budget.trials:
                return "trials"
            if self._left_s() <= 0:
                return "time"
            if len({tuple(t.params.items()) for t in done}) == self.grid.size:
                return "exhausted"
            with _let_go_of_taken_trials():
                self.study.optimize(self._try, n_trials=1)

    def _left_s(self) -> float:
        limit = self.budget.time_limit_s
        if limit is None:
            return float("inf")
        return TRIALS_TIME * limit - (time.monotonic() - self._start)

    def _try(self, trial: optuna.Trial) -> Values:
        """The values of a setting's best plan.

        Raises:
            TrialPruned: it has none, or none that matters.
        """
        setting = draw_setting(self.grid, trial)
        twin = notes_of_twin(self.grid, setting, self._trials())
        notes, values = twin or self._find(setting)
        for name, note in {"setting": setting, **notes}.items():
            trial.set_user_attr(name, note)
        if values is None:
            raise TrialPruned
        return values

    def _find(self, setting: Setting) -> tuple[dict[str, Any], Values | None]:
        """What becomes of a setting, and the values of its best plan if it is searched."""
        left = self._left_s()
        limit = None if left == float("inf") else max(left, 1e-3)
        stop = Stop(effort=self.budget.effort * TRIAL_EFFORT, time_limit_s=limit)
        try:
            problem = self._problem(setting)
            warm, seed = self._warm(), self.budget.seed
            searchers = self.budget.searchers
            found = try_setting(problem, self.goals, self._known, warm, stop, seed, searchers)
        except RuledOutError as out:
            return {"state": "ruled out", "bound": out.bound}, None
        except InfeasibleError as error:
            return {"state": "infeasible", "reason": str(error)}, None
        notes = {"state": "searched", "bound": found.bound, "evaluations": found.evaluations}
        notes |= {"iteration_ms": found.best.iteration_ms, "plan": encode_plan(found.best.plan)}
        return {**notes, "lower_bound_ms": found.lower_bound_ms}, found.values

    def _trials(self) -> list[FrozenTrial]:
        """All of the study.

        Raises:
            InputError: one that is finished is not as a worker leaves it.
        """
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state in FINISHED and trial.number not in self._checked:
                self._read(trial)
                self._checked.add(trial.number)
        return trials

    def _read(self, trial: FrozenTrial) -> Trial:
        return read_trial(self.grid, len(self.goals), trial)

    def _complete(self) -> list[FrozenTrial]:
        """Trials that found a plan, best first."""
        done = [t for t in self._trials() if t.state is TrialState.COMPLETE]
        return sorted(done, key=lambda t: (t.values, t.number))

    def _known(self) -> list[Values]:
        return [tuple(t.values) for t in self._complete()]

    def _warm(self) -> list[ShardingPlan]:
        """Plans of the best trials so far."""
        return [decode_plan(t.user_attrs["plan"]) for t in self._complete()[:WARM_PLANS]]

    def _best(self) -> Trial | None:
        done = self._complete()
        return self._read(done[0]) if done else None


@contextmanager
def _let_go_of_taken_trials() -> Iterator[None]:
    """Ends quietly where a worker was so slow that another one counted it as dead."""
    try:
        yield
    except UpdateFinishedTrialError:
        pass
    except ValueError as error:
        if not str(error).startswith("Cannot tell a"):  # of `Study.tell`, which has no type for it
            raise


def _alike(last: Values, tried: Values) -> bool:
    """The last search lost next to nothing in any goal."""
    return covers(last, tuple(value * (1 + ALIKE) for value in tried))


def _nothing_found(trials: Sequence[Trial], stopped_by: str) -> InfeasibleError | InputError:
    none = [t for t in trials if t.state == "infeasible"]
    if not none:
        return InputError(f"no trial was finished (stopped by {stopped_by}); allow more time")
    return InfeasibleError(
        f"none of the {len(none)} settings that were tried has a plan that fits; "
        f"trial {none[0].number}: {none[0].reason}"
    )
