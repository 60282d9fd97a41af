"""What is computed of a shipped profile, and its place in the file: ranges, rows and errors.

The rest of a file is written by hand, with reasons beside it, or by `lab.tools.derive`; a command
writes these (`lab.tools.known_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from predictor.hardware.schema import HardwareProfile, KnownError

Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Facts:
    """Figures of one profile.

    Args:
        ranges: group -> quantity -> [low, high] of the rows behind it.
        rows: group -> how many those are.
        errors: group -> its error on rows held out.
        iterations: errors of whole iterations.
    """

    ranges: Mapping[str, Ranges] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, KnownError] = field(default_factory=dict)
    iterations: tuple[KnownError, ...] = ()

    @classmethod
    def stated(cls, profile: HardwareProfile) -> Facts:
        """Those that a profile states."""
        said = {name: group.provenance for name, group in profile.groups.items()}
        return cls(
            {name: found.range for name, found in said.items() if found.range},
            {name: found.n for name, found in said.items() if found.n is not None},
            {name: found.error for name, found in said.items() if found.error is not None},
            profile.known_error,
        )

    def of_group(self, name: str) -> dict[str, Any]:
        """Keys of a group's ``provenance``, as plain data; None for a key that it has not."""
        error = self.errors.get(name)
        ranges = {
            what: [_whole(v) for v in span] for what, span in self.ranges.get(name, {}).items()
        }
        return {
            "n": self.rows.get(name),
            "range": ranges or None,
            "error": None if error is None else error.model_dump(exclude_none=True),
        }

    def of_profile(self) -> list[dict[str, Any]]:
        """``known_error`` of the profile, as plain data."""
        return [error.model_dump(exclude_none=True) for error in self.iterations]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def with_facts(text: str, groups: Sequence[str], facts: Facts) -> str:
    """The text of a profile with these figures in place of those that it states.

    Args:
        groups: whose provenance is changed; others keep what they state, and so do those that the
            text takes from a base.
    """
    data = yaml.safe_load(text)
    if facts.iterations or "known_error" in data:
        text = set_key(text, ["known_error"], facts.of_profile(), after="sms")
    for name in groups:
        stated = data
        path = [*name.split("."), "provenance"]
        for key in path:
            stated = stated.get(key, {})
        if not stated:
            continue
        for key, value in facts.of_group(name).items():
            if stated.get(key) != value:
                text = set_key(text, [*path, key], value)
    return text


def set_key(text: str, path: Sequence[str], value: Any, after: str | None = None) -> str:
    """``text`` with one key of a block mapping set to ``value``; comments and layout stay.

    Args:
        path: keys from the outermost mapping to the one to set; the mapping must be there.
        value: plain data; None or an empty list takes the key out.
        after: key behind which a new one goes; at the end of the mapping without it.
    """
    lines = text.splitlines()
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in path[:-1]:
        node = next(v for k, v in node.value if k.value == key)
    keys = {k.value: k.start_mark.line for k, _ in node.value}
    name, column = path[-1], node.start_mark.column
    first = keys.get(name, keys[after or list(keys)[-1]])
    end = _end(lines, first, column)
    new = [] if value in (None, []) else _written(name, value, column)
    lines[first if name in keys else end : end] = new
    return "\n".join(lines) + "\n"


def _end(lines: Sequence[str], first: int, column: int) -> int:
    """Line after the value of a key; items of a list may stand in the key's own column."""
    for index in range(first + 1, len(lines)):
        stripped = lines[index].lstrip()
        indent = len(lines[index]) - len(stripped)
        if not stripped or indent < column or (indent == column and not stripped.startswith("- ")):
            return index
    return len(lines)


def _written(name: str, value: Any, column: int) -> list[str]:
    """Lines of ``name: value``; mappings of lists stand on one line, as people write them."""
    flat = isinstance(value, dict) and all(isinstance(v, list) for v in value.values())
    if flat:
        inner = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=1000)
        made = f"{name}: {inner}"
    else:
        made = yaml.safe_dump({name: value}, sort_keys=False, width=96 - column)
    return [" " * column + line for line in made.splitlines()]
