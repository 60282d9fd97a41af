"""Writes made-up rows in the format of Criteo's click logs.

A row is a label, 13 integers and 26 categories of eight hexadecimal digits, with tabs between; an
integer or a category may be missing. Categories are skewed, as clicks are: the k-th most frequent
of a column has a probability proportional to 1/k, and some columns have a few values, some
millions. The label depends on some of them, so that there is something to learn.

    python examples/make_criteo_sample.py sample.tsv --rows 8000
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
from pathlib import Path

CARDINALITIES = (
    *(1_460, 583, 5_000_000, 1_200_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 4_000_000, 3_194),
    *(27, 14_992, 3_000_000, 10, 5_652, 2_173, 4, 4_000_000, 18, 15, 286_181, 105, 142_572),
)
"""Distinct values a column: of the size that Criteo's columns have."""
MISSING_INTEGER, MISSING_CATEGORY = 0.2, 0.1
LARGEST_LOG = 7.0
"""Integers are spread evenly over logarithms up to this one, as counts of events are."""


def category(column: int, value: int) -> str:
    """Eight hexadecimal digits that stand for a value: Criteo's are hashes, too."""
    return hashlib.md5(f"{column} {value}".encode()).hexdigest()[:8]


def rows(count: int, seed: int) -> list[str]:
    """Lines without their ends."""
    rng = random.Random(seed)
    return [_row(rng) for _ in range(count)]


def _row(rng: random.Random) -> str:
    integers = [int(math.expm1(LARGEST_LOG * rng.random())) for _ in range(13)]
    # ranks with probability about 1/k: the logarithm of the rank is uniform
    values = [int(cardinality ** rng.random()) for cardinality in CARDINALITIES]
    leaning = math.log1p(integers[0]) / LARGEST_LOG + (values[5] % 2) + (values[8] == 1)
    label = int(rng.random() < 1 / (1 + math.exp(3.0 - 1.5 * leaning)))
    shown = [
        *("" if rng.random() < MISSING_INTEGER else str(integer) for integer in integers),
        *(
            "" if rng.random() < MISSING_CATEGORY else category(column, value)
            for column, value in enumerate(values)
        ),
    ]
    return "\t".join((str(label), *shown))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.file.write_text("\n".join(rows(given.rows, given.seed)) + "\n")


if __name__ == "__main__":
    main()
