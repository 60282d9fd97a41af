"""An Optuna study over what shapes a plan: type mix, column widths, data-parallel size, weights.

Each trial turns its parameters into one option per table; they are placed greedily and balanced
(`search.improve.balance`), and scored on the full timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from predictor.model.plan import ShardingType
from search.improve.balance import Balancer
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.space.option import Option
from search.surrogate import Surrogate, Weights

RESTARTS = 2
"""Of the balancing, per trial."""


@dataclass(frozen=True)
class Shape:
    """What a trial proposes.

    Args:
        penalty: sharding type -> factor on the cost of its options.
        min_width: columns of a column shard, at least.
        max_replica_bytes: largest table that may be data-parallel.
        peak: weight of the largest shard of an option against its mean load, in [0, 1].
        weights: of the phases.
    """

    penalty: dict[ShardingType, float]
    min_width: int
    max_replica_bytes: float
    peak: float
    weights: Weights


class Study:
    """Proposes plans; `run` returns them with their predicted times, best first."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.balancer = Balancer(objective, surrogate)
        self.seed = seed
        self.world = objective.problem.topology.world_size

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
        study.enqueue_trial(self._neutral())
        found: dict[int, tuple[Assignment, float]] = {}

        def objective(trial: optuna.Trial) -> float:
            plan = self._plan(self._suggest(trial))
            if plan is None:
                raise optuna.TrialPruned
            found[trial.number] = (plan, float(self.objective.score([plan])[0]))
            return found[trial.number][1]

        def check(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            if stop():
                study.stop()

        study.optimize(objective, n_trials=trials, callbacks=[check])
        return sorted(found.values(), key=lambda pair: pair[1])

    def _types(self) -> list[ShardingType]:
        return sorted(
            {o.sharding_type for options in self.objective.space.options for o in options}
        )

    def _neutral(self) -> dict[str, float]:
        """The first trial: every type at its own cost."""
        costs: dict[str, float] = {f"penalty_{t.short}": 0.0 for t in self._types()}
        return {**costs, "min_width": 32, "replica": 24.0, "peak": 0.2} | {
            f"weight_{p}": 0.0 for p in ("forward", "backward", "ids", "outputs")
        }

    def _suggest(self, trial: object) -> Shape:
        import optuna

        assert isinstance(trial, optuna.Trial)
        weights = {
            p: math.exp(trial.suggest_float(f"weight_{p}", -1.0, 1.0))
            for p in ("forward", "backward", "ids", "outputs")
        }
        return Shape(
            {t: 2 ** trial.suggest_float(f"penalty_{t.short}", -2.0, 2.0) for t in self._types()},
            trial.suggest_categorical("min_width", [32, 64, 128, 256]),
            2 ** trial.suggest_float("replica", 10.0, 32.0),
            trial.suggest_float("peak", 0.0, 1.0),
            Weights(**weights),
        )

    def _plan(self, shape: Shape) -> Assignment | None:
        options = [self._choose(o, shape) for o in self.objective.space.options]
        hint = GreedyPartitioner(self.objective, self.surrogate, shape.weights).place_all(options)
        if hint is None:
            return None
        return self.balancer.balance(hint, self.seed, RESTARTS).assignment

    def _choose(self, options: Sequence[Option], shape: Shape) -> Option:
        allowed = [o for o in options if self._allowed(o, shape)] or list(options)
        return min(allowed, key=lambda o: self._cost(o, shape))

    def _allowed(self, option: Option, shape: Shape) -> bool:
        if option.sharding_type is ShardingType.DATA_PARALLEL:
            return sum(m.hbm_bytes for m in option.memory) / self.world <= shape.max_replica_bytes
        return option.num_shards == 1 or option.column_width >= shape.min_width

    def _cost(self, option: Option, shape: Shape) -> float:
        phases = self.surrogate.phases(option)
        mean, largest = phases.sum(axis=0) / self.world, phases.max(axis=0)
        mixed = (1 - shape.peak) * mean + shape.peak * largest
        cost = float(mixed @ shape.weights.array)
        return shape.penalty[option.sharding_type] * (cost + self.surrogate.constant_ms(option))
