"""Models with several windows of data: what a plan that was chosen in one week meets in the next.

A few features hold histories: many ids of what a user did lately. They are most of the lookups, and
most of them move: how many ids a sample has, and how skewed they are, walk at random from window to
window, as histories do with seasons, campaigns and logging. The others have an id or a few, and
hardly move. Some tables number their rows by frequency in the first window, as vocabularies are
when they are built; each window, new ids take the place of hot ones at a rate of the table, and
once they have taken most of them the hot rows lie anywhere. All tables are small, so that several
plans are built in seconds, and iterations are long enough for a clock (docs/decisions/0071).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from lab.tasks.models.chance import log_uniform, lognormal, pick, uniform, whole
from lab.tasks.models.size import BATCH, count
from predictor.model.distribution import Uniform, Zipf
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.config.write import with_digest

WINDOWS = (2, 3)
HISTORIES, OTHERS = (6, 10), (2, 5)
"""Tables of a model, of both kinds."""
POOLING = (15.0, 80.0), (1.0, 4.0)
ROWS = (20_000, 400_000), (2_000, 200_000)
DIMS = (32, 64), (16, 32)
ALPHA = (0.3, 1.0), (0.5, 1.3)
"""Ranges of the features and tables of both kinds."""
WIDTH = 64
"""Of the layers of the dense part."""
SAMPLES = (*BATCH, 2 * BATCH[-1])
AIM = (100.0, 140.0)
"""Between which the count of a model (`lab.tasks.models.size`) is drawn."""
MOVING = 3 / 4
"""Share of the histories that move."""
POOLING_SIGMA, STEADY_SIGMA = 0.8, 0.05
"""Of the log of a pooling factor from window to window, of features that move and of others."""
ALPHA_STEP = 0.15
ORDERED = 1 / 3
"""Share of the tables whose rows are numbered by frequency at first."""
REPLACED = (0.05, 0.6)
"""Share of the hot ids that new ones replace in a window."""
GONE = 0.5
"""Share of the hot ids from which on the order of the rows says nothing any more."""


def draw_windows(seed: int) -> tuple[Workload, ...]:
    """The model of a seed in each of its windows; they differ in their features alone.

    Each is as a reader of its model file finds it, and the same on any machine.
    """
    rng = random.Random(f"shardopt drifting histories {seed}")
    kinds = [0] * whole(rng, *HISTORIES) + [1] * whole(rng, *OTHERS)
    tables = [_table(rng, i, kind) for i, kind in enumerate(kinds)]
    dense = DenseArch(13, (WIDTH,), (WIDTH, 1), "concat")
    aim = log_uniform(rng, *AIM)
    name = f"drifting-{seed:03d}"
    models = [Workload(name, batch, tuple(tables), dense) for batch in SAMPLES]
    first = min(models, key=lambda model: abs(math.log(count(model) / aim)))
    windows = [first]
    rates = [log_uniform(rng, *REPLACED) for _ in tables]
    moving = [kind == 0 and rng.random() < MOVING for kind in kinds]
    for after in range(1, whole(rng, *WINDOWS)):
        gone = [1 - (1 - rate) ** after >= GONE for rate in rates]
        windows.append(_next(windows[-1], rng, moving, gone))
    return tuple(with_digest(window) for window in windows)


def _table(rng: random.Random, index: int, kind: int) -> Table:
    pooling = round(log_uniform(rng, *POOLING[kind]), 1)
    skewed = rng.random() < 0.8
    law = Zipf(round(uniform(rng, *ALPHA[kind]), 2)) if skewed else Uniform()
    order = "frequency" if rng.random() < ORDERED else "random"
    feature = Feature(f"f{index:02d}", pooling, distribution=law, id_order=order)
    rows, dim = int(log_uniform(rng, *ROWS[kind])), pick(rng, DIMS[kind])
    return Table(f"t{index:02d}", rows, dim, (feature,))


def _next(
    window: Workload, rng: random.Random, moving: Sequence[bool], gone: Sequence[bool]
) -> Workload:
    """The window after."""
    tables = [
        replace(table, features=tuple(_moved(f, rng, moves, lost) for f in table.features))
        for table, moves, lost in zip(window.tables, moving, gone, strict=True)
    ]
    return replace(window, tables=tuple(tables))


def _moved(feature: Feature, rng: random.Random, moves: bool, lost: bool) -> Feature:
    sigma = POOLING_SIGMA if moves else STEADY_SIGMA
    pooling = max(1.0, round(lognormal(rng, feature.pooling_factor, sigma), 1))
    law, step = feature.distribution, uniform(rng, -ALPHA_STEP, ALPHA_STEP)
    if moves and isinstance(law, Zipf):
        law = Zipf(round(min(max(law.alpha + step, ALPHA[0][0]), ALPHA[1][1]), 2))
    order = "random" if lost else feature.id_order
    return replace(feature, pooling_factor=pooling, distribution=law, id_order=order)
