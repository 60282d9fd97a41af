"""Reading of committed CSV files, and Markdown tables."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardopt.files import decode, read_bytes


def read_csv(path: Path) -> list[Mapping[str, str]]:
    """Return every row of a CSV file, without comments.

    Raises:
        InputError: the file cannot be read.
    """
    lines = decode(read_bytes(path, "CSV file"), path).splitlines()
    return [*csv.DictReader(line for line in lines if not line.startswith("#"))]


def scores_file(suite: str, name: str) -> str:
    """Return the name of the CSV file with a further table of a suite."""
    return f"{suite}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.csv"


def percent(share: object, sign: str = "") -> str:
    """Return a fraction as people read it; ``-`` where there is none."""
    return "-" if share == "" else f"{100 * float(str(share)):{sign}.1f} %"


def table_head(*columns: str) -> Iterator[str]:
    """Yield the first two lines of a table."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
