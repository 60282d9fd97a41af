"""Which setting to try next: Optuna's TPE, and never one that was tried before."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from search.tune.case import Setting, Value
from search.tune.grid import Grid

STARTUP = 6
"""Settings tried at random before TPE has something to learn from."""
ENUMERATED = 1 << 12
"""Grids of up to this many settings are listed to find an untried one."""


def distributions(grid: Grid) -> dict[str, BaseDistribution]:
    """What Optuna knows of a grid: the place in the list where near values act alike, and the value
    itself where not."""
    return {
        name: IntDistribution(0, len(values) - 1)
        if grid.ordered(name)
        else CategoricalDistribution(values)
        for name, values in grid.values.items()
    }


def setting_of(grid: Grid, params: Mapping[str, Any]) -> dict[str, Value]:
    """Optuna's parameters as a setting, in the grid's order."""
    return {
        name: values[params[name]] if grid.ordered(name) else params[name]
        for name, values in grid.values.items()
    }


def params_of(grid: Grid, setting: Setting) -> dict[str, Any]:
    """The inverse of `setting_of`."""
    return {
        name: values.index(setting[name]) if grid.ordered(name) else setting[name]
        for name, values in grid.values.items()
    }


def is_complete(grid: Grid, trial: FrozenTrial) -> bool:
    """All of its parameters are drawn."""
    return all(name in trial.params for name in grid.values)


class SettingSampler(BaseSampler):
    """The case as given first, then what TPE proposes, or one at random where that was tried.

    What is drawn depends on the seed, the trial's number and the study so far alone, so a study
    that was interrupted goes on as it would have.
    """

    def __init__(self, grid: Grid, first: Setting, seed: int) -> None:
        self.grid = grid
        self.first = params_of(grid, first)
        self.seed = seed

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All of the parameters are drawn together."""
        return distributions(self.grid)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """One setting."""
        if trial.number == 0:
            return self.first
        seed = int(np.random.SeedSequence([self.seed, trial.number]).generate_state(1)[0])
        tpe = TPESampler(
            seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=False
        )
        drawn = tpe.sample_relative(study, trial, search_space)
        others = study.get_trials(deepcopy=False)
        tried = {
            self._key(t.params)
            for t in others
            if t.number != trial.number and is_complete(self.grid, t)
        }
        if drawn and self._key(drawn) not in tried:
            return drawn
        return self._any(tried, np.random.default_rng(seed))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Nothing is drawn on its own."""
        raise NotImplementedError

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Nothing is learnt beyond what the study holds."""

    def _key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(params[name] for name in self.grid.values)

    def _any(self, tried: set[tuple[Any, ...]], random: np.random.Generator) -> dict[str, Any]:
        """A setting that was not tried; any where all were."""
        names = list(self.grid.values)
        places: list[Sequence[Any]] = [
            range(len(values)) if self.grid.ordered(name) else values
            for name, values in self.grid.values.items()
        ]
        if self.grid.size <= ENUMERATED:
            left = [key for key in itertools.product(*places) if key not in tried]
            if left:
                return dict(zip(names, left[int(random.integers(len(left)))], strict=True))
        while True:
            key = tuple(place[int(random.integers(len(place)))] for place in places)
            if key not in tried or self.grid.size <= ENUMERATED:
                return dict(zip(names, key, strict=True))
