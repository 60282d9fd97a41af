"""Which transformers are run: those that kernel models are fitted on, and those that are predicted.

Calibration shapes are drawn; targets were chosen before any of them was run, as layers, width,
heads, inner width, vocabulary, tokens of a sample and samples of a rank.
"""

from __future__ import annotations

import random
from dataclasses import replace

from lab.transformer import FAMILIES, TransformerShape

SEED = 2024
CALIBRATIONS = {1: 24, 2: 15}
"""Shapes that are captured, by the number of ranks."""
_TARGETS = {
    "bert": (
        (6, 192, 6, 768, 3000, 64, 16),
        (3, 384, 6, 1536, 1500, 200, 3),
        (8, 128, 4, 512, 1000, 128, 4),
        (4, 320, 5, 1280, 2500, 96, 6),
        (2, 448, 7, 1792, 3500, 112, 5),
    ),
    "gpt2": (
        (3, 448, 7, 1792, 2500, 64, 8),
        (8, 128, 2, 512, 2000, 128, 4),
        (5, 256, 4, 1024, 3000, 96, 6),
        (2, 512, 8, 2048, 4500, 128, 3),
        (4, 320, 10, 960, 1500, 160, 3),
    ),
    "xlnet": (
        (4, 256, 8, 1024, 2000, 96, 4),
        (2, 384, 6, 1152, 3000, 128, 3),
        (5, 192, 3, 384, 1000, 48, 16),
        (3, 448, 7, 896, 2500, 64, 6),
        (2, 320, 5, 1280, 1500, 160, 3),
    ),
}
_OF_TWO_RANKS = {"bert": (0, 3, 4), "gpt2": (0, 2, 3), "xlnet": (0, 1, 3)}
MOST_FLOP = 3.5e10
TOKENS = (192, 1600)
MOST_BYTES = 24e6
"""Of one tensor: glibc takes larger ones from the system each time, page by page."""


def targets(ranks: int) -> list[TransformerShape]:
    """Shapes that are predicted, for one rank or two."""
    chosen = {
        family: [row for at, row in enumerate(rows) if ranks == 1 or at in _OF_TWO_RANKS[family]]
        for family, rows in _TARGETS.items()
    }
    return [TransformerShape(family, *row) for family, rows in chosen.items() for row in rows]


def calibrations(ranks: int) -> list[TransformerShape]:
    """Shapes that are captured, drawn from a seed; none is a target."""
    rng = random.Random(f"{SEED} {ranks}")
    taken = {shape.name for shape in targets(1)}
    found: list[TransformerShape] = []
    while len(found) < CALIBRATIONS[ranks]:
        shape = _draw(rng, FAMILIES[len(found) % len(FAMILIES)])
        if _fits(shape) and shape.name not in taken:
            taken.add(shape.name)
            found.append(shape)
    return found


def _draw(rng: random.Random, family: str) -> TransformerShape:
    width = 64 * rng.randint(2, 8)
    sequence = rng.choice((8 * rng.randint(3, 32), rng.choice((32, 64, 128, 256))))
    shape = TransformerShape(family, rng.randint(1, 6), width, 1, 0, 0, sequence, 1)
    return replace(
        shape,
        heads=width // rng.choice((32, 64)),
        inner=width * rng.choice((2, 3, 4)),
        vocabulary=rng.randrange(500, 5000),
        batch=rng.randint(1, 16),
    )


def _fits(shape: TransformerShape) -> bool:
    logits = 4 * shape.tokens * shape.vocabulary
    scores = 8 * shape.batch * shape.heads * shape.sequence**2
    return (
        TOKENS[0] <= shape.tokens <= TOKENS[1]
        and shape.flop <= MOST_FLOP
        and max(logits, scores) <= MOST_BYTES
    )
