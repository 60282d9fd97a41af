"""Which scenarios a plan is to be good in, from what a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile
from predictor.model.workload import Workload
from search.problem import Problem
from search.scenarios.scenario import (
    DRAWS,
    MOST,
    GivenFactors,
    Scenario,
    draw_scenarios,
    given_scenarios,
    join_scenarios,
    window_scenarios,
)
from shardopt.config import read_model
from shardopt.config.distributions import move_pooling
from shardopt.config.scenarios import load_scenarios

NONE = "none"


@dataclass(frozen=True)
class ScenarioSource:
    """What scenarios are made of.

    Args:
        draws: of the errors that the profile states.
        given: by a file, in place of draws.
        windows: of data, besides; name -> workload.
    """

    draws: int = DRAWS
    given: tuple[GivenFactors, ...] = ()
    windows: Mapping[str, Workload] = field(default_factory=dict)

    def of(self, problem: Problem) -> tuple[Scenario, ...]:
        """The scenarios of a problem: windows, then draws or given ones."""
        return join_scenarios(
            window_scenarios(problem, self.windows) if self.windows else [],
            draw_scenarios(problem, self.draws) if self.draws else [],
            given_scenarios(problem, self.given),
        )

    def read_windows(self, read: Callable[[Workload], Workload]) -> dict[str, Workload]:
        """The windows as somebody reads them, with pooling factors that move alike."""
        if not self.windows:
            return {}
        first = next(iter(self.windows.values()))
        base = read(first)
        return {n: move_pooling(read(w), base, first, w) for n, w in self.windows.items()}


def read_scenarios(
    asked: str | int | PathLike[str] | None,
    hardware: HardwareProfile,
    windows: Mapping[str, Workload],
) -> ScenarioSource:
    """What is asked for.

    Args:
        asked: a number of draws, ``none``, or a file; None for the default number.
        hardware: whose groups a file names.
        windows: of data, which are scenarios too.

    Raises:
        InputError: the number is out of range, or the file cannot be used.
    """
    text = str(asked).strip() if asked is not None else str(DRAWS)
    if text == NONE:
        return ScenarioSource(0, (), windows)
    if text.lstrip("+-").isdigit():
        if not 2 <= int(text) <= MOST:
            raise InputError(
                f"scenarios is {text}; give a number from 2 to {MOST}, '{NONE}', or a scenario "
                "file",
                inputs=("scenarios",),
            )
        return ScenarioSource(int(text), (), windows)
    return ScenarioSource(0, tuple(load_scenarios(text, hardware.groups)), windows)


def windows_of(model: str | PathLike[str] | Workload | None) -> dict[str, Workload]:
    """The windows of data that a model file names; none where there is no file."""
    return {} if isinstance(model, Workload | None) else read_model(Path(model))[2]
