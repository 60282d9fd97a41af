"""The texts of ``--tune`` and ``--objectives`` as knobs with their values, and goals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from predictor.errors import InputError, did_you_mean
from search.tune.goals import GOALS, Goal
from search.tune.knobs import KNOBS, Knob, Value

MAX_VALUES = 64
MAX_TRIALS = 1_000_000
TRIALS = 24
SYNTAX = "A:B doubles from A to B, A:B:STEP goes in steps, A/B/C are these"


@dataclass(frozen=True)
class TuneFlags:
    """The flags of tuning as given; None where a flag was left out."""

    tune: str | None = None
    objectives: str | None = None
    trials: int | None = None
    storage: str | None = None
    study: str | None = None
    from_: Path | None = None

    def check(self) -> None:
        """Refuse flags that say nothing without ``--tune``, and values out of range.

        Raises:
            InputError: says which flag, and what is allowed.
        """
        if self.tune is None:
            for name in ("objectives", "trials", "storage", "study"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"--{name} is for tuning; give it with --tune, such as --tune batch_size"
                    )
        elif self.from_ is not None:
            raise InputError(
                "--tune and --from cannot be used together: another setting has another best plan"
            )
        if self.trials is not None and not 1 <= self.trials <= MAX_TRIALS:
            raise InputError(
                f"--trials is {self.trials}; it must be at least 1 and at most {MAX_TRIALS}"
            )
        if self.study is not None and self.storage is None:
            raise InputError(
                "--study names a study in a storage; give --storage too, such as "
                "--storage tune.journal"
            )
        if self.study == "":
            raise InputError("--study is empty; give a name")


def read_knobs(text: str) -> dict[str, tuple[Value, ...] | None]:
    """Knob -> values, None where none are given.

    Raises:
        InputError: an unknown knob, values that cannot be read, a knob given twice.
    """
    chosen: dict[str, tuple[Value, ...] | None] = {}
    for part in text.split(","):
        name, equals, values = (piece.strip() for piece in part.strip().partition("="))
        if name not in KNOBS:
            raise InputError(
                f"--tune: unknown knob '{name}'{did_you_mean(name, KNOBS)}; "
                f"there are {', '.join(KNOBS)}"
            )
        if name in chosen:
            raise InputError(f"--tune: {name} is given twice; give all of its values at once")
        chosen[name] = read_values(KNOBS[name], values) if equals else None
    return chosen


def read_values(knob: Knob, text: str) -> tuple[Value, ...]:
    """``A:B``, ``A:B:STEP`` or ``A/B/C``, ascending where the knob has an order."""
    if ":" in text and knob.ordered:
        found = _range(knob, text)
    else:
        found = [_value(knob, piece, text) for piece in text.split("/")]
    if len(set(found)) < len(found):
        raise InputError(f"--tune: {knob.name}={text} has a value twice")
    if len(found) > MAX_VALUES:
        raise InputError(
            f"--tune: {knob.name}={text} has {len(found)} values, at most {MAX_VALUES} are tried; "
            "give larger steps"
        )
    if not knob.ordered:
        return tuple(found)
    return tuple(sorted(found, key=float))


def _range(knob: Knob, text: str) -> list[Value]:
    pieces = [_number(knob, piece, text) for piece in text.split(":")]
    if len(pieces) > 3:
        raise InputError(f"--tune: {knob.name}={text}: {SYNTAX}")
    low, high, *steps = pieces
    if not 0 < low <= high:
        raise InputError(
            f"--tune: {knob.name}={text} must begin above 0 and not end before it begins"
        )
    step = steps[0] if steps else None
    if step is not None and step <= 0:
        raise InputError(f"--tune: {knob.name}={text} needs a step above 0")
    count = math.log2(high / low) if step is None else (high - low) / step
    if count >= MAX_VALUES:
        raise InputError(
            f"--tune: {knob.name}={text} has {int(count) + 1} values, at most {MAX_VALUES} are "
            "tried; give larger steps"
        )
    # 1e-9: 0.1:0.3:0.1 has three values
    places = range(int(count + 1e-9) + 1)
    found = [low * 2**i if step is None else low + i * step for i in places]
    if found[-1] < high * (1 - 1e-9):
        found.append(high)
    return [int(x) if knob.kind is int else round(float(x), 9) for x in found]


def _number(knob: Knob, piece: str, text: str) -> float:
    value = _value(knob, piece, text)
    assert not isinstance(value, str)
    return value


def _value(knob: Knob, piece: str, text: str) -> Value:
    try:
        value = knob.kind(piece.strip())
    except ValueError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(
            f"--tune: {knob.name}={text}: '{piece}' is not allowed ({knob.allowed}); {SYNTAX}"
        )
    if value == "":
        raise InputError(f"--tune: {knob.name}= names no values; give {knob.allowed}")
    return value


def read_goals(text: str | None, knobs: dict[str, tuple[Value, ...] | None]) -> list[Goal]:
    """What is minimised.

    Raises:
        InputError: an unknown objective, or one twice.
    """
    if text is None:
        return [GOALS["gpu_hours" if "hosts" in knobs else "time"]]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in GOALS:
            raise InputError(
                f"--objectives: unknown objective '{name}'{did_you_mean(name, GOALS)}; "
                f"there are {', '.join(GOALS)}"
            )
    if len(set(names)) < len(names):
        raise InputError(f"--objectives {text} names an objective twice")
    return [GOALS[name] for name in names]
