"""An Optuna study over what shapes a plan: type mix, column widths, data-parallel size, weights.

Each trial turns its parameters into one option per table; they are placed greedily and scored on
the full timeline. The best plan is annealed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from predictor.model.plan import ShardingType
from search.candidate import Candidate
from search.improve.annealing import Annealer, AnnealingTask
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.space.option import Option
from search.state import State
from search.surrogate import Surrogate

if TYPE_CHECKING:
    import optuna

PHASES = ("forward", "backward", "ids", "outputs")
"""In the order of the surrogate's."""
NEUTRAL = {"min_width": 32, "replica": 24.0, "peak": 0.2} | {f"weight_{p}": 0.0 for p in PHASES}
"""The first trial, in which every type has its own cost."""
FOUND_BY = "optuna"


def propose_by_study(state: State) -> Iterator[Candidate]:
    """Run a study; yield its plans and those that annealing its best one goes through."""
    tools = state.tools
    objective, params = tools.objective, tools.params
    study = Study(objective, tools.surrogate, tools.seed)
    plans = study.run(params.trials, tools.stop.reached)
    yield from (Candidate(plan, ms, FOUND_BY) for plan, ms in plans)
    if plans:
        moves, options = params.moves_of(len(plans[0][0])), objective.space.options
        task = AnnealingTask(plans[0][0], options, moves, params.rounds, tools.seed)
        annealer = Annealer(objective, tools.surrogate, params)
        for plan, ms in annealer.improve(task, lambda ms: tools.stop.reached(ms, state.proven_ms)):
            yield Candidate(plan, ms, FOUND_BY)


class Study:
    """Proposes plans; `run` returns them with their predicted times, best first."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.seed = seed
        self.world = objective.problem.topology.world_size
        self.types = sorted({o.sharding_type for o in objective.space.every_option})

    def run(
        self, trials: int, stop: Callable[[], bool] = lambda: False
    ) -> list[tuple[Assignment, float]]:
        """Run this many trials.

        Args:
            stop: asked after every trial.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=8)
        study = optuna.create_study(sampler=sampler, direction="minimize")
        study.enqueue_trial({**NEUTRAL, **{f"penalty_{t.short}": 0.0 for t in self.types}})
        plans: dict[int, tuple[Assignment, float]] = {}

        def objective(trial: optuna.Trial) -> float:
            plan = self._plan(trial)
            if plan is None or not self.objective.fits(plan):
                raise optuna.TrialPruned
            plans[trial.number] = (plan, float(self.objective.score([plan])[0]))
            return plans[trial.number][1]

        def check(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            if stop():
                study.stop()

        study.optimize(objective, n_trials=trials, callbacks=[check])
        return sorted(plans.values(), key=lambda pair: pair[1])

    def _plan(self, trial: optuna.Trial) -> Assignment | None:
        """The plan that a trial's parameters make; None if its options do not fit.

        ``weight`` of the phases, ``penalty`` on the cost of a type, ``min_width`` of column shards,
        ``replica``: bytes of the largest table that may be data-parallel, ``peak``: weight of the
        largest shard of an option against its mean load.
        """
        weights = np.exp([trial.suggest_float(f"weight_{p}", -1.0, 1.0) for p in PHASES])
        penalty = {t: 2 ** trial.suggest_float(f"penalty_{t.short}", -2.0, 2.0) for t in self.types}
        width = trial.suggest_categorical("min_width", [32, 64, 128, 256])
        replica_bytes = 2 ** trial.suggest_float("replica", 10.0, 32.0)
        peak = trial.suggest_float("peak", 0.0, 1.0)

        def is_allowed(option: Option) -> bool:
            if option.sharding_type is ShardingType.DATA_PARALLEL:
                return sum(option.bytes_of[0]) / self.world <= replica_bytes
            return option.num_shards == 1 or option.column_width >= width

        def cost(option: Option) -> float:
            phases = self.surrogate.phases(option)
            mean, largest = phases.sum(axis=0) / self.world, phases.max(axis=0)
            mixed = float(((1 - peak) * mean + peak * largest) @ weights)
            return penalty[option.sharding_type] * mixed

        def choose(options: Sequence[Option]) -> Option:
            return min(filter(is_allowed, options), key=cost, default=min(options, key=cost))

        options = [choose(some) for some in self.objective.space.options]
        return GreedyPartitioner(self.objective, self.surrogate, weights).place_all(options)
