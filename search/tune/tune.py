"""Spine of tuning: a study of settings, each scored by a search of its plans.

knobs     the model and the machine, the settings to choose from
goals     the values to minimise
study     the next setting, and the outcome of a trial for any worker to read
storage   the database or journal of the study
trial     a setting is ruled out by its bound, or searched

Why: docs/decisions/0032-tuning.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import optuna
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.trial import TrialState

from predictor.errors import InfeasibleError, InputError
from predictor.model.plan import ShardingPlan
from predictor.predict import predict
from search.prefer import TOLERANCE
from search.problem import Progress, RankedPlan, Result, silent
from search.solve import SEARCHERS, solve
from search.stop import Stop
from search.tune.goals import Goal, Values, covers, pareto_front, shard_bytes, values_of
from search.tune.knobs import PARAMETERS, Case, Grid, Setting, Value, changes, turned
from search.tune.storage import SharedStorage, storage_errors
from search.tune.study import (
    FINISHED,
    draw_setting,
    keep_outcome,
    params_of,
    read_trial,
    sampler_of,
    untried,
)
from search.tune.trial import TRIED, Outcome, Trial, try_setting

TRIAL_EFFORT = 0.1
"""Effort of a trial's search, as a share of the effort of tuning."""
FRONT_EFFORT = 0.5
"""Effort of the last search of a member of the front, as a share of the effort of tuning."""
TRIALS_TIME = 0.7
"""Share of a time limit that trials may take; the rest is for the last search."""
WARM_PLANS = 2
"""Number of best plans so far that also start a trial's search."""
ALIKE = 0.01
"""Fraction within which a front shows only one of two plans of a setting."""


@dataclass(frozen=True)
class Budget:
    """Amount of work for tuning.

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
        """Best setting by the first goal."""
        return self.front[0]


@dataclass(frozen=True)
class Member:
    """A setting that no other beats, with its plans and the values of the best of them."""

    trial: Trial
    values: Values
    result: Result


@dataclass
class Tuning:
    """One worker on one study.

    Args:
        shared: the storage; None to tune in this process alone.
        watch: told how many trials are finished, of how many, and the best by the first goal,
            whenever the worker looks at the study.
    """

    case: Case
    grid: Grid
    goals: Sequence[Goal]
    budget: Budget
    study: optuna.Study
    shared: SharedStorage | None = None
    watch: Callable[[int, int, Trial | None], None] = lambda done, total, best: None
    _start: float = field(default_factory=time.monotonic)
    _known: dict[int, Trial] = field(default_factory=dict)

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
            trials = self._trials()
        searched = _best_first(trials)
        if not searched and stopped_by == "interrupted":
            raise KeyboardInterrupt
        if not searched:
            raise _nothing_found(trials, stopped_by)
        front = pareto_front([values for values, _ in searched])
        return TuneResult(tuple(trials), tuple(searched[i][1] for i in front), stopped_by)

    def finish(self, tuned: TuneResult, progress: Progress = silent) -> tuple[list[Member], bool]:
        """Search the front again with more effort; the best by the first goal comes first.

        The last search may find a plan that is faster and takes more memory than the trial's. Both
        stay if neither beats the other and they differ by more than `ALIKE`.

        Returns:
            The members, and whether the user ended the search before all were searched.
        """
        members: list[Member] = []
        interrupted = tuned.stopped_by == "interrupted"
        for done, trial in enumerate(map(self._without_idle, tuned.front)):
            last = None
            if not interrupted:
                try:
                    last = self._search(trial, len(tuned.front) - done, tuned, progress)
                    members.append(last)
                except KeyboardInterrupt:
                    interrupted = True
            tried = self._as_tried(trial, tuned, "interrupted" if interrupted else "work")
            nearly = tuple(value * (1 + ALIKE) for value in tried.values)
            if last is None or not (len(self.goals) == 1 or covers(last.values, nearly)):
                members.append(tried)
        best = [members[i] for i in pareto_front([member.values for member in members])]
        return sorted(best, key=lambda member: member.values), interrupted

    def undone(self, member: Member) -> dict[str, float]:
        """Return the worth of each change alone, parameter -> growth of the first goal, a fraction.

        It is the growth if that parameter goes back to its value in the case and the plan stays.

        Changes that need another plan (the number of hosts) are left out.
        """
        plan, growth = member.result.best.plan, {}
        for name in changes(self.case, member.trial.setting):
            less = self._without(member.trial, name, plan)
            if less is not None and less.values is not None:
                growth[name] = less.values[0] / member.values[0] - 1
        return growth

    def _without(self, trial: Trial, name: str, plan: ShardingPlan) -> Trial | None:
        """Return a trial without one of its changes, for which nothing is proven; None if the plan
        is one of other ranks or does not fit."""
        setting = {**trial.setting, name: PARAMETERS[name].read(self.case)}
        problem = turned(self.case, setting).problem()
        if problem.topology.world_size != plan.world_size or not problem.fits(plan):
            return None
        inputs = problem.workload, problem.topology, problem.hardware
        ms = predict(*inputs, plan).iteration_ms
        values = values_of(self.goals, problem, ms, shard_bytes(problem, plan))
        return replace(
            trial, setting=setting, plan=plan, iteration_ms=ms, values=values, lower_bound_ms=0.0
        )

    def _without_idle(self, trial: Trial) -> Trial:
        """Return a trial without changes that, all together, gain less than plans that tie differ
        by: nobody should change numerics or a train loop for those."""
        assert trial.plan is not None
        assert trial.values is not None
        enough = tuple(value * (1 + TOLERANCE) for value in trial.values)
        for name in changes(self.case, trial.setting):
            usual = PARAMETERS[name].read(self.case)
            may_stay = usual in self.grid.values[name]
            less = self._without(trial, name, trial.plan) if may_stay else None
            if less is not None and less.values is not None and covers(less.values, enough):
                trial = less
        return trial

    def _search(self, trial: Trial, ahead: int, tuned: TuneResult, progress: Progress) -> Member:
        """Run the last search of a setting; ``ahead`` searches share the remaining time."""
        assert trial.plan is not None
        share = 1.0 if len(tuned.front) == 1 else FRONT_EFFORT
        limit = self.budget.time_limit_s
        elapsed_s = time.monotonic() - self._start
        search_limit_s = None if limit is None else max(1.0, limit - elapsed_s) / ahead
        problem = turned(self.case, trial.setting).problem()
        result = solve(
            problem,
            Stop(self.budget.effort * share, search_limit_s),
            self.budget.seed,
            top_k=self.budget.top_k,
            searchers=self.budget.searchers,
            starts=[trial.plan],
            progress=progress,
        )
        used_bytes = shard_bytes(problem, result.best.plan)
        return Member(
            trial, values_of(self.goals, problem, result.best.iteration_ms, used_bytes), result
        )

    def _as_tried(self, trial: Trial, tuned: TuneResult, stopped_by: str) -> Member:
        """Return the trial's own plan as a member; evaluations and time are those of all trials."""
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
            evaluations=sum(earlier.evaluations for earlier in tuned.trials),
            seed=self.budget.seed,
        )
        return Member(trial, trial.values, result)

    def _work(self) -> str:
        while True:
            trials = self._trials()
            done = [t for t in trials if t.state in TRIED]
            best = next((trial for _, trial in _best_first(trials)), None)
            self.watch(len(done), self.budget.trials, best)
            if len(done) >= self.budget.trials:
                return "trials"
            if self._left_s() <= 0:
                return "time"
            if len(done) == self.grid.size:
                return "exhausted"
            if all(t.state == "failed" for t in trials):
                self.study.enqueue_trial(params_of(self.grid, self.grid.nearest(self.case)))
            begun = [t for t in self.study.get_trials(deepcopy=False) if t.state != TrialState.FAIL]
            self.study.sampler = sampler_of(self.budget.seed, len(begun))
            with _let_go_of_taken_trials():
                self.study.optimize(self._try, n_trials=1)

    def _left_s(self) -> float:
        limit = self.budget.time_limit_s
        if limit is None:
            return float("inf")
        return TRIALS_TIME * limit - (time.monotonic() - self._start)

    def _try(self, trial: optuna.Trial) -> Values:
        """Return the values of a setting's best plan.

        Raises:
            TrialPruned: no plan fits, or the bound rules the setting out.
        """
        setting, trials = draw_setting(self.grid, trial), self._trials()
        outcome = self._twin(setting) or self._find(setting)
        keep_outcome(trial, setting, outcome)
        if any(t.state in TRIED and t.setting == setting for t in trials):  # so it counts no more
            another = untried(self.grid, trials, self.budget.seed)
            self.study.enqueue_trial(params_of(self.grid, another))
        if outcome.values is None:
            raise TrialPruned
        return outcome.values

    def _twin(self, setting: Setting) -> Outcome | None:
        """Return the outcome of a trial whose setting has the same effects, with no evaluations."""
        effects = self.grid.effects_of(setting)
        for trial in self._trials():
            if trial.state in TRIED and self.grid.effects_of(trial.setting) == effects:
                return replace(trial, evaluations=0)
        return None

    def _find(self, setting: Setting) -> Outcome:
        """Search a setting that no trial has, or rule it out."""
        left_s, budget = self._left_s(), self.budget
        limit = None if left_s == float("inf") else max(left_s, 1e-3)
        stop = Stop(effort=budget.effort * TRIAL_EFFORT, time_limit_s=limit)

        best = _best_first(self._trials())
        known = [values for values, _ in best]
        warm = [trial.plan for _, trial in best[:WARM_PLANS] if trial.plan is not None]
        try:
            problem = turned(self.case, setting).problem()
            return try_setting(
                problem, self.goals, known, warm, stop, budget.seed, budget.searchers
            )
        except InfeasibleError as error:
            return Outcome(state="infeasible", reason=str(error))

    def _trials(self) -> list[Trial]:
        """Return the trials of the study, by number.

        Finished trials are read once; of those with the same setting only the first counts.

        Raises:
            InputError: a finished trial is damaged.
        """
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state in FINISHED and trial.number not in self._known:
                self._known[trial.number] = read_trial(self.grid, len(self.goals), trial)
        distinct: dict[tuple[Value, ...] | int, Trial] = {}
        for trial in trials:
            read = self._known.get(trial.number) or read_trial(self.grid, len(self.goals), trial)
            tried = read.state in TRIED
            distinct.setdefault(tuple(read.setting.values()) if tried else trial.number, read)
        return list(distinct.values())


@contextmanager
def _let_go_of_taken_trials() -> Iterator[None]:
    """Ignore a trial that another worker took over because this one seemed dead."""
    try:
        yield
    except UpdateFinishedTrialError:
        pass
    except ValueError as error:
        if not str(error).startswith("Cannot tell a"):  # of `Study.tell`, which has no type for it
            raise


def _best_first(trials: Sequence[Trial]) -> list[tuple[Values, Trial]]:
    """Return the trials with a plan and its values, best by the first goal first."""
    rated = [(trial.values, trial) for trial in trials if trial.values is not None]
    return sorted(rated, key=lambda pair: (pair[0], pair[1].number))


def _nothing_found(trials: Sequence[Trial], stopped_by: str) -> InfeasibleError | InputError:
    none = [t for t in trials if t.state == "infeasible"]
    if not none:
        return InputError(f"no trial was finished (stopped by {stopped_by}); allow more time")
    return InfeasibleError(
        f"none of the {len(none)} settings that were tried has a plan that fits; "
        f"trial {none[0].number}: {none[0].reason}"
    )
