"""The generated parts of README.md: first scores, accuracy, and gains, between their markers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab.first_scores import read_scores
from lab.pages.accuracy import SUMMARY
from lab.pages.gains import gain_rows, gain_table, optimism
from lab.pages.tables import percent, read_csv, table_head
from lab.suites import SUITES, Suite
from predictor.errors import InputError

START, END = "<!-- generated: {} -->", "<!-- end of {} -->"
APART = " / "
"""Separator of several parts or machines in one cell."""


def readme_text(readme: str, folder: Path, where: str = "README.md") -> str:
    """Return the README with the figures of the committed rows.

    Args:
        folder: docs/accuracy.
        where: names the README in errors.

    Raises:
        InputError: a file or part is missing in the folder, or a marker in the README.
    """
    blocks = {
        "first scores": [*_first_scores()],
        "accuracy": [*_accuracy(folder)],
        "gain": [*gain_table([*gain_rows(folder)]), "", optimism(folder)],
    }
    for name, lines in blocks.items():
        readme = replace_block(readme, name, "\n".join(lines), where)
    return readme


def replace_block(page: str, name: str, text: str, where: str) -> str:
    """Replace the text between two markers of a page.

    Raises:
        InputError: the page lacks them.
    """
    start, end = START.format(name), END.format(name)
    before, opened, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise InputError(f"{where}: lacks '{start}' and '{end}', between which a table goes")
    return f"{before}{start}\n{text}\n{end}{after}"


def _scores_of(suite: Suite, names: Sequence[str]) -> list[Mapping[str, str]]:
    by_name = {row["what"]: row for row in read_scores() if row["suite"] == suite.name}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise InputError(f"lab/first_scores.csv: {suite.name} has no first score '{missing[0]}'")
    return [by_name[name] for name in names]


def _joined(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """Join the figures of a column in one cell; ``-`` where no row has one."""
    cells = [percent(row[column]) for row in rows]
    if all(cell == "-" for cell in cells):
        return "-"
    return APART.join(cell.removesuffix(" %") for cell in cells) + " %"


def _first_scores() -> Iterator[str]:
    """Yield the suites' scores on machines that the model had never seen."""
    columns = ("n", "mean error", "geometric mean", "covered")
    quoted = [
        _scores_of(suite, shown["first"]) for suite in SUITES.values() for shown in suite.lead
    ]
    commits = dict.fromkeys(f"{row['date']}, {row['commit']}" for rows in quoted for row in rows)
    yield from table_head(f"first scores ({'; '.join(commits)})", *columns)
    for suite in SUITES.values():
        for shown in suite.lead:
            rows = _scores_of(suite, shown["first"])
            n = APART.join(row["n"] or "-" for row in rows)
            if rows[0]["pairs_right"]:
                right = APART.join(f"{row['pairs_right']} of {row['n']} right" for row in rows)
                yield f"| {shown['what']} | {n} | {right} | - | - |"
                continue
            errors = (_joined(rows, column) for column in ("mean", "geomean", "covered"))
            yield f"| {shown['what']} | {n} | {' | '.join(errors)} |"


def _accuracy(folder: Path) -> Iterator[str]:
    by_part = {(row["suite"], row["part"]): row for row in read_csv(folder / SUMMARY)}
    columns = ("suite", "what is predicted", "n", "mean", "geometric mean", "covered")
    yield from table_head(*columns, "these figures are", "first score, mean")
    for suite in SUITES.values():
        for shown in suite.readme:
            missing = [part for part in shown["parts"] if (suite.name, part) not in by_part]
            if missing:
                raise InputError(f"{folder / SUMMARY}: no part '{missing[0]}' of {suite.name}")
            rows = [by_part[suite.name, part] for part in shown["parts"]]
            errors = (_joined(rows, column) for column in ("mean", "geomean", "covered"))
            first = _scores_of(suite, shown["first"])
            firsts = f"{_joined(first, 'mean')} (n {APART.join(row['n'] for row in first)})"
            n = APART.join(row["n"] for row in rows)
            yield (
                f"| `{suite.name}` | {shown['what']} | {n} | {' | '.join(errors)} "
                f"| {shown['called']} | {firsts} |"
            )
