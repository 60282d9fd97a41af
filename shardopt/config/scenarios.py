"""A scenario file -> scenarios with their weights and factors on the times of profile groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from predictor.document import KeyPath, Problems, parse_yaml, shown
from predictor.errors import InputError, did_you_mean
from search.scenarios.scenario import MOST, GivenFactors
from shardopt.files import decode, read_bytes

KEYS = ("name", "weight", "factors")
LEAST_FACTOR, MOST_FACTOR = 0.01, 100.0
ROUNDING = 1e-6
"""By how much the sum of the weights may miss one."""


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
        problems.add(("scenarios",), f"has {len(listed)}; give at least 2 and at most {MOST}")
    names = {*groups, "collectives"}
    weighted = any(isinstance(one, dict) and "weight" in one for one in listed)
    found = [_scenario(one, i, names, weighted, problems) for i, one in enumerate(listed)]
    total = sum(weight for _, weight, _ in found)
    if weighted and not problems.found and abs(total - 1) > ROUNDING:
        problems.add(("scenarios",), f"the weights sum to {total:.6g}; they must sum to 1")
    for i, (name, _, _) in enumerate(found):
        if name in [other for other, _, _ in found[:i]]:
            problems.add(("scenarios", i, "name"), f"'{name}' is the name of two; rename one")
    problems.raise_if_any()
    return [
        GivenFactors(name, weight if weighted else 1 / len(found), factors)
        for name, weight, factors in found
    ]


def _scenario(
    raw: Any, index: int, groups: set[str], weighted: bool, problems: Problems
) -> tuple[str, float, dict[str, float]]:
    path: KeyPath = ("scenarios", index)
    if not isinstance(raw, dict):
        problems.add(path, f"got {shown(raw)}; give name, factors and weight")
        return "", 0.0, {}
    for key in raw:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS)
            problems.add((*path, key), f"is no key of a scenario; it has {', '.join(KEYS)}{hint}")
    name = raw.get("name", f"scenario {index + 1}")
    if not isinstance(name, str) or not name:
        problems.add((*path, "name"), f"got {shown(name)}; give a name")
    weight = 0.0
    if weighted:
        weight = _number(raw.get("weight"), (*path, "weight"), ROUNDING, 1.0, problems)
    factors = raw.get("factors", {})
    if not isinstance(factors, dict):
        problems.add((*path, "factors"), f"got {shown(factors)}; give {{group: factor}}")
        factors = {}
    for group in factors:
        if group not in groups:
            known = sorted(groups)
            problems.add(
                (*path, "factors", group),
                f"is no group of the profile{did_you_mean(group, known)}; "
                f"it has {', '.join(known)}",
            )
    return (
        str(name),
        weight,
        {
            group: _number(value, (*path, "factors", group), LEAST_FACTOR, MOST_FACTOR, problems)
            for group, value in factors.items()
        },
    )


def _number(raw: object, path: KeyPath, low: float, high: float, problems: Problems) -> float:
    given = raw if isinstance(raw, int | float) and not isinstance(raw, bool) else math.nan
    if not low <= given <= high:
        problems.add(path, f"got {shown(raw)}; give a number from {low:g} to {high:g}")
        return low
    return float(given)
