"""The settings that a study chooses from: all combinations of the knobs' values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from predictor.errors import InputError
from search.tune.case import Case, Knob, Setting, Value
from search.tune.knobs import (
    BatchSize,
    Bucket,
    CacheRatio,
    ColumnMinimum,
    DeviceMemory,
    Groups,
    Hosts,
    Pipeline,
    QComm,
    SyncInterval,
)

KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        BatchSize(),
        Pipeline(),
        QComm(),
        Bucket(),
        ColumnMinimum(),
        CacheRatio(),
        Hosts(),
        Groups(),
        SyncInterval(),
        DeviceMemory(),
    )
}
PARAMETERS = {p: knob for knob in KNOBS.values() for p in knob.parameters}


@dataclass(frozen=True)
class Grid:
    """The values that every parameter may take: a setting is one of each."""

    values: Mapping[str, tuple[Value, ...]]

    @property
    def size(self) -> int:
        """Number of settings."""
        size = 1
        for values in self.values.values():
            size *= len(values)
        return size

    def ordered(self, parameter: str) -> bool:
        """Near values act alike."""
        return PARAMETERS[parameter].ordered

    def apply_setting(self, case: Case, setting: Setting) -> Case:
        """The case with every parameter of a setting at its value."""
        turned = case
        for name, knob in PARAMETERS.items():  # in their order: hosts are set on equal ranks
            if name in setting and setting[name] != knob.current(turned, name):
                turned = knob.turn(turned, name, setting[name])
        return turned

    def loads_of(self, setting: Setting) -> tuple[Value, ...]:
        """Values that the loads of shards depend on: settings with the same ones share them."""
        return tuple(v for name, v in setting.items() if PARAMETERS[name].changes_loads)

    def effects_of(self, setting: Setting) -> tuple[Value, ...]:
        """What of a setting the prediction sees."""
        return tuple(PARAMETERS[name].effect(value) for name, value in setting.items())

    def nearest(self, case: Case) -> dict[str, Value]:
        """The setting that is nearest to the case as given."""
        return {
            name: _nearest(values, PARAMETERS[name].current(case, name))
            for name, values in self.values.items()
        }

    def changes(self, case: Case, setting: Setting) -> dict[str, Value]:
        """The parameters of a setting that differ from the case as given."""
        return {
            name: value
            for name, value in setting.items()
            if value != PARAMETERS[name].current(case, name)
        }


def _nearest(values: tuple[Value, ...], wanted: Value) -> Value:
    if wanted in values or isinstance(wanted, str):
        return wanted if wanted in values else values[0]
    return min(values, key=lambda value: abs(float(value) - float(wanted)))


def grid_of(case: Case, chosen: Mapping[str, tuple[Value, ...] | None]) -> Grid:
    """The grid of the knobs that are tuned.

    Args:
        chosen: knob -> values, or None for those it has by default.

    Raises:
        InputError: a knob cannot be tuned here, or not to one of the values.
    """
    values: dict[str, tuple[Value, ...]] = {}
    for name in [name for name in KNOBS if name in chosen]:
        knob, given = KNOBS[name], chosen[name]
        refused = knob.refusal(case)
        if refused:
            raise InputError(f"{name} cannot be tuned here: {refused}")
        wanted = knob.defaults(case) if given is None else given
        for value in wanted:
            fault = knob.fault(case, value)
            if fault:
                raise InputError(f"{name} cannot be {value}: {fault}")
        values |= dict.fromkeys(knob.parameters, wanted)
    return Grid(values)
