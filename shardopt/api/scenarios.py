"""Which scenarios a plan is to be good in, from what a user gives: a number, a file, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated

from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InputError, did_you_mean
from predictor.hardware.schema import HardwareProfile
from predictor.model.workload import Workload
from predictor.section import Name, Section, check, real
from search.problem import Problem, Scenario
from search.scenarios.scenario import (
    DRAWS,
    MOST,
    GivenFactors,
    draw_scenarios,
    given_scenarios,
    join_scenarios,
    window_scenarios,
)
from shardopt.config import read_model
from shardopt.config.distributions import move_pooling
from shardopt.files import decode, read_bytes

NONE = "none"
ROUNDING = 1e-6
"""Tolerance of the sum of the weights, which is one."""


@dataclass(frozen=True)
class ScenarioSource:
    """Sources of scenarios.

    Args:
        draws: of the errors that the profile states.
        from_file: given by a file, in place of draws.
        windows: of data, besides; name -> workload.
    """

    draws: int = DRAWS
    from_file: tuple[GivenFactors, ...] = ()
    windows: Mapping[str, Workload] = field(default_factory=dict)

    def of(self, problem: Problem) -> tuple[Scenario, ...]:
        """The scenarios of a problem: windows, then draws or given ones."""
        return join_scenarios(
            window_scenarios(problem, self.windows) if self.windows else [],
            draw_scenarios(problem, self.draws) if self.draws else [],
            given_scenarios(problem, self.from_file),
        )

    def read_windows(self, read: Callable[[Workload], Workload]) -> dict[str, Workload]:
        """The windows as somebody reads them, with pooling factors that move alike."""
        if not self.windows:
            return {}
        first = next(iter(self.windows.values()))
        base = read(first)
        return {n: move_pooling(read(w), base, first, w) for n, w in self.windows.items()}


def read_scenarios(
    choice: str | int | PathLike[str] | None,
    hardware: HardwareProfile,
    windows: Mapping[str, Workload],
) -> ScenarioSource:
    """Read a choice of scenarios.

    Args:
        choice: a number of draws, ``none``, or a file; None for the default number.
        hardware: whose groups a file names.
        windows: of data, which are scenarios too.

    Raises:
        InputError: the number is out of range, or the file cannot be used.
    """
    text = str(choice).strip() if choice is not None else str(DRAWS)
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


@dataclass(frozen=True)
class ScenarioSection(Section):
    """A scenario of a file; left out, its weight is that of every other."""

    name: Name | None = None
    weight: Annotated[float, real(ROUNDING, 1)] | None = None
    factors: Mapping[str, Annotated[float, real(0.01, 100)]] = field(default_factory=dict)


def load_scenarios(path: str | Path, groups: Iterable[str]) -> list[GivenFactors]:
    """The scenarios that a file describes.

    Args:
        path: a YAML or JSON file with ``schema: 1`` and ``scenarios``, a list of two or more, each
            with ``name``, ``factors`` (profile group -> what its times are multiplied by) and
            ``weight``; weights sum to one, and are equal where no scenario has one.
        groups: of the profile.

    Raises:
        InputError: the file cannot be read or used; has a line for every problem.
    """
    problems = Problems(str(path))
    raw = parse_yaml(decode(read_bytes(path, "scenario file"), path), problems)
    listed = raw.get("scenarios") if isinstance(raw, dict) else None
    if not isinstance(listed, list) or raw.get("schema") != 1:
        raise InputError(
            f"{path}:1: got {shown(raw)}; a scenario file has 'schema: 1' and 'scenarios', a list",
            inputs=("scenarios",),
        )
    if not 2 <= len(listed) <= MOST:
        problems.fail(("scenarios",), f"has {len(listed)}; give at least 2 and at most {MOST}")
    allowed = sorted({*groups, "collectives"})
    sections: dict[str, ScenarioSection] = {}
    for i, item in enumerate(listed):
        section = check(ScenarioSection, item, ("scenarios", i), problems)
        if section is None:
            continue
        name = section.name or f"scenario {i + 1}"
        if name in sections:
            problems.add(("scenarios", i, "name"), f"'{name}' is the name of two; rename one")
        sections[name] = section
        for group in section.factors:
            if group not in allowed:
                problems.add(
                    ("scenarios", i, "factors", group),
                    f"is not a group of the profile{did_you_mean(group, allowed)}; "
                    f"it has {', '.join(allowed)}",
                )
    problems.raise_if_any()
    weights = [section.weight for section in sections.values()]
    if weights.count(None) == len(weights):
        return [GivenFactors(n, 1 / len(sections), entry.factors) for n, entry in sections.items()]
    total = sum(weight or 0.0 for weight in weights)
    if None in weights or abs(total - 1) > ROUNDING:
        lacking = "; give every scenario a weight" if None in weights else ""
        problems.fail(("scenarios",), f"the weights sum to {total:.6g}; must sum to 1{lacking}")
    return [GivenFactors(n, entry.weight or 0.0, entry.factors) for n, entry in sections.items()]
