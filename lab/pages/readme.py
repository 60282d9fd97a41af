"""The README's tables of accuracy and gain, taken from docs/accuracy, so that both say the same.

python -m lab readme README.md docs/accuracy
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab.pages.accuracy import SUMMARY, scores_file
from lab.programs import existing_folder, make_parser
from lab.suites import SUITES
from predictor.errors import InputError, ShardoptError
from shardopt.files import atomic_write_text, decode, read_bytes

START, END = "<!-- generated: {} -->", "<!-- end of {} -->"
GAIN, FORETOLD = "against TorchRec's planner", "foretold gains"
OURS = "shardopt, machine calibrated"
INDEPENDENT = (
    "| another harness, eight models of another generator | 8 | -1.6 % (-8.1 to +3.4) | +3.8 % "
    "| TorchRec's plan differs from itself by 3.0 % |"
)
"""Made with another harness, so its rows are not in this repository."""


def updated(readme: str, folder: Path, where: str = "README.md") -> str:
    """The README with the figures of the CSV files in a folder.

    Raises:
        InputError: a file or part is missing in the folder, or a marker in the README.
    """
    for name, lines in (("accuracy", _errors(folder)), ("gain", _gain(folder))):
        start, end = START.format(name), END.format(name)
        before, found, rest = readme.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise InputError(f"{where}: lacks '{start}' and '{end}', between which a table goes")
        readme = "\n".join((before + start, "", *lines, "", end + after))
    return readme


def _errors(folder: Path) -> Iterator[str]:
    found = {(row["suite"], row["part"]): row for row in _read(folder / SUMMARY)}
    yield "| suite | what is predicted | n | mean | geometric mean | covered | first score |"
    yield "|---|---|---|---|---|---|---|"
    for suite in SUITES:
        for shown in suite.readme:
            row = found.get((suite.name, shown["part"]))
            if row is None:
                raise InputError(f"{folder / SUMMARY}: no part '{shown['part']}' of {suite.name}")
            errors = " | ".join(map(_percent, (row["mean"], row["geomean"], row["covered"])))
            yield f"| `{suite.name}` | {shown['what']} | {row['n']} | {errors} | {shown['first']} |"


def _gain(folder: Path) -> Iterator[str]:
    measured, foretold = (
        {
            (row["runtime"], row["models"], row["task set"]): row
            for row in _read(folder / scores_file("against-torchrec", name))
            if row["plans of"] == OURS
        }
        for name in (GAIN, FORETOLD)
    )
    yield "| measured by | models | mean gain | foretold | |"
    yield "|---|---|---|---|---|"
    for key, row in measured.items():
        runtime, models, task_set = key
        if task_set != "all":
            continue
        gain, low, high = (_percent(row[column], "+") for column in ("mean gain", "from", "to"))
        yield (
            f"| `python -m lab against`: {runtime} runtime, {models} models | {row['tasks']} "
            f"| {gain} ({low} to {high}) | {_percent(foretold[key]['mean foretold'], '+')} "
            f"| {row['faster']} faster, {row['equal']} equal, {row['slower']} slower |"
        )
    yield INDEPENDENT


def _percent(share: str, sign: str = "") -> str:
    return f"{100 * float(share):{sign}.1f} %" if share else "-"


def _read(path: Path) -> list[Mapping[str, str]]:
    return [*csv.DictReader(decode(read_bytes(path, "CSV file"), path).splitlines())]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures into the README."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("readme", type=Path, help="README.md, whose tables are replaced")
    parser.add_argument("accuracy", type=existing_folder, help="docs/accuracy, with the figures")
    given = parser.parse_args(argv)
    try:
        readme = given.readme.read_text(encoding="utf-8")  # not an input that must be kept
        atomic_write_text(given.readme, updated(readme, given.accuracy, str(given.readme)))
    except (ShardoptError, OSError) as error:
        parser.error(str(error))
    return 0
