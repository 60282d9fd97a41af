"""The families by name. Predictions size `random` and `crossed`, which are drawn elsewhere, as
`architectures` and `drifting` are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from lab.tasks.models.published import draw_published
from lab.tasks.models.shapes import draw_shape
from predictor.errors import InputError, did_you_mean
from predictor.model.workload import Workload
from shardopt.config.write import with_digest

RANDOM = "random"
"""The family that is drawn in `lab.tasks.draw`."""
CROSSED = "crossed"
"""The family that is drawn, with plans of its own, in `lab.tasks.crossed`."""
ARCHITECTURES = "architectures"
"""The family that is drawn, with plans of its own, in `lab.tasks.architectures`."""
DRIFTING = "drifting"
"""The family with windows of data, whose plans are drawn in `lab.tasks.drifting`."""

COUNTED: Mapping[str, Callable[[int, random.Random], Workload]] = {
    "published": draw_published,
    "shapes": draw_shape,
}
"""Families whose models are sized by counting: name -> the model of a seed."""

FAMILIES = (RANDOM, *COUNTED, CROSSED, ARCHITECTURES, DRIFTING)


def check_family(name: str) -> None:
    """Refuse a name that is no family.

    Raises:
        InputError: it is none.
    """
    if name not in FAMILIES:
        raise InputError(
            f"there are no models '{name}'{did_you_mean(name, FAMILIES)}; "
            f"choose {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]}",
            inputs=("models",),
        )


def draw_model(family: str, seed: int) -> Workload:
    """The model of a seed, as a reader of its file finds it: the same on any machine.

    Args:
        family: one of `COUNTED`.
        seed: at least 0.

    Raises:
        InputError: a seed below 0.
    """
    if seed < 0:
        raise InputError(f"a task's seed is {seed}; it must be at least 0")
    rng = random.Random(f"shardopt {family} {seed}")
    return with_digest(COUNTED[family](seed, rng))
