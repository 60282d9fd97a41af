"""Errors of several kinds of rows, a line a number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardopt.validate.report import Compared, Scores, Summary


def errors_by_ranks(
    name: str, first: str, kinds: Iterable[tuple[str, Sequence[Compared]]], title: str
) -> Scores:
    """A table of errors.

    Args:
        first: heads the column of the kinds.
        kinds: name and rows of each; rows are named by their `ranks`.
    """
    cells = []
    for kind, rows in kinds:
        for ranks in sorted({int(row.name["ranks"]) for row in rows}):
            found = Summary.of(row for row in rows if row.name["ranks"] == ranks)
            cells.append((kind, ranks, found.n, found.mape, found.geomean, found.worst))
    columns = (
        (first, "text"),
        ("ranks", "count"),
        ("n", "count"),
        ("MAPE", "share"),
        ("geomean", "share"),
        ("worst", "share"),
    )
    return Scores(name, columns, tuple(cells), title)
