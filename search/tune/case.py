"""What is tuned: the model and the machine, and what a knob is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from predictor.errors import InfeasibleError, InputError
from predictor.hardware.loader import HardwareProfile, context_bytes
from predictor.model.memory.peak import DEFAULT_RESERVE, leave_for_shards
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.problem import Problem

Value = str | int | float
Setting = Mapping[str, Value]
"""A value for every parameter that is tuned."""


@dataclass(frozen=True)
class Case:
    """The model and the machine before anything is reserved or placed.

    Args:
        installed: the ranks with all of their memory.
        reserve: share of device memory that stays free of tables, in [0, 1).
    """

    workload: Workload
    installed: Topology
    hardware: HardwareProfile
    reserve: float = DEFAULT_RESERVE

    def problem(self) -> Problem:
        """What the plan search takes.

        Raises:
            InfeasibleError: nothing is left for tables, or replica groups do not suit the ranks.
        """
        try:
            group = self.workload.sharding_group(self.installed)
        except InputError as error:
            raise InfeasibleError(str(error)) from error
        device, context = self.hardware.device, context_bytes(self.hardware)
        topology = leave_for_shards(self.workload, group, self.reserve, device, context)
        return Problem(self.workload, topology, self.hardware)

    def constrained(self, name: str, value: Any) -> Case:
        """The case with a constraint for all tables that do not have it."""
        change: dict[str, Any] = {name: value}
        tables = tuple(
            t
            if getattr(t.constraints, name) is not None
            else replace(t, constraints=replace(t.constraints, **change))
            for t in self.workload.tables
        )
        return self.with_model(tables=tables)

    def with_model(self, **changes: Any) -> Case:
        """The case with other fields of its workload."""
        return replace(self, workload=replace(self.workload, **changes))


class Knob(ABC):
    """One thing to tune.

    Attributes:
        name: what a user calls it.
        kind: type of its values.
        allowed: what values there are, in words.
        ordered: near values act alike.
        changes_loads: it changes what a shard costs its rank.
    """

    name: str
    kind: type[str] | type[int] | type[float] = int
    allowed: str
    ordered = True
    changes_loads = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return (self.name,)

    def refusal(self, case: Case) -> str:
        """Why it cannot be tuned here; empty if it can."""
        return ""

    def effect(self, value: Any) -> Value:
        """What of a value the prediction sees: settings with the same effects have one outcome."""
        found: Value = value
        return found

    @abstractmethod
    def defaults(self, case: Case) -> tuple[Value, ...]:
        """Values to try where none are given."""

    @abstractmethod
    def current(self, case: Case, parameter: str) -> Value:
        """The value of the case as given."""

    @abstractmethod
    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        """The case with a parameter at a value."""

    @abstractmethod
    def fault(self, case: Case, value: Any) -> str:
        """What is wrong with a value; empty if nothing is."""
