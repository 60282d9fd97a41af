"""A scenario file -> scenarios with their weights and factors on the times of profile groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InputError, did_you_mean
from search.scenarios.scenario import MOST, GivenFactors
from shardopt.config.schema import Name, Section, check, real
from shardopt.files import decode, read_bytes

ROUNDING = 1e-6
"""By how much the sum of the weights may miss one."""


class ScenarioSection(Section):
    name: Name | None = None
    weight: Annotated[float, real(ROUNDING, 1)] | None = None
    factors: dict[str, Annotated[float, real(0.01, 100)]] = Field(default_factory=dict)


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
    known = sorted({*groups, "collectives"})
    found: dict[str, ScenarioSection] = {}
    for i, item in enumerate(listed):
        section = check(ScenarioSection, item, ("scenarios", i), problems)
        if section is None:
            continue
        name = section.name or f"scenario {i + 1}"
        if name in found:
            problems.add(("scenarios", i, "name"), f"'{name}' is the name of two; rename one")
        found[name] = section
        for group in section.factors:
            if group not in known:
                problems.add(
                    ("scenarios", i, "factors", group),
                    f"is no group of the profile{did_you_mean(group, known)}; "
                    f"it has {', '.join(known)}",
                )
    problems.raise_if_any()
    weights = [section.weight for section in found.values()]
    if weights.count(None) == len(weights):
        return [GivenFactors(n, 1 / len(found), one.factors) for n, one in found.items()]
    total = sum(weight or 0.0 for weight in weights)
    if None in weights or abs(total - 1) > ROUNDING:
        lacking = "; give every scenario a weight" if None in weights else ""
        problems.fail(("scenarios",), f"the weights sum to {total:.6g}; must sum to 1{lacking}")
    return [GivenFactors(n, one.weight or 0.0, one.factors) for n, one in found.items()]
