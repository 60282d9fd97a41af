"""Finds which tables of a summary each recorded lookup reads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.tables import LookupTables, TableSummary

WEIGHTS = ("dev_weights", "uvm_weights", "host_weights")
"""Of a lookup, by the memory that they lie in; a cache holds copies."""


class UnmatchedError(InputError):
    """A table summary does not have the tables of a recorded lookup."""


class MatchedTables:
    """The tables of one rank's lookups, each given to the first lookup that fits it.

    Args:
        summary: of all ranks.
    """

    def __init__(self, summary: TableSummary, rank: int) -> None:
        self.rank, self.sources = rank, summary.sources
        self.groups = summary.of_rank(rank)
        self._left = list(self.groups)
        self._of: dict[Hashable, LookupTables] = {}

    def of(self, op: str, weights: Hashable, arguments: Mapping[str, Any]) -> LookupTables:
        """The tables of a lookup or of its backward op.

        Args:
            weights: names the tensor of the weights, which only one lookup has.
            arguments: shapes of tensors and plain values by FBGEMM's names.

        Raises:
            UnmatchedError: no tables of the rank agree with what the trace has.
        """
        if weights not in self._of:
            found = next((group for group in self._left if fits(group, arguments)), None)
            if found is None:
                raise UnmatchedError(self._problem(op, arguments))
            self._left.remove(found)
            self._of[weights] = found
        return self._of[weights]

    def _problem(self, op: str, arguments: Mapping[str, Any]) -> str:
        given = "; ".join(map(str, self._left)) or "no more lookups"
        return (
            f"rank {self.rank}: {op}: the trace has {_recorded(arguments)}; {self.sources} gives "
            f"for lookups of this rank: {given}. Give the model file and the plan (--plan) that "
            "the trace was recorded with, or leave out --tables"
        )


def features_of(arguments: Mapping[str, Any]) -> int:
    """Features that a lookup reads, one or more."""
    marks = arguments.get("D_offsets") or arguments["hash_size_cumsum"]
    return max(marks[0] - 1, 1)


def elements_of(arguments: Mapping[str, Any]) -> int:
    """Weights that a lookup has; 0 where the trace does not say."""
    shapes = [shape for name in WEIGHTS for shape in _shapes(arguments.get(name))]
    if not shapes:
        shapes = _shapes(arguments.get("weights"))[:1]
    return sum(prod(shape) for shape in shapes)


def fits(group: LookupTables, arguments: Mapping[str, Any]) -> bool:
    """Whether a lookup can be that of these tables."""
    widths = group.widths
    total, largest = arguments.get("total_D"), arguments.get("max_D")
    return (
        len(widths) == features_of(arguments)
        and (total is None or sum(widths) == total)
        and (largest is None or max(widths) == largest)
        and elements_of(arguments) in (0, group.elements)
    )


def _recorded(arguments: Mapping[str, Any]) -> str:
    total, elements = arguments.get("total_D"), elements_of(arguments)
    told = [f"features: {features_of(arguments)}"]
    told += [] if total is None else [f"sum of their widths: {total}"]
    told += [f"weights: {elements:,}"] if elements else []
    return ", ".join(told)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    if value is None:
        return []
    if isinstance(value, list):
        return [shape for shape in value if shape]
    return [value] if value else []
