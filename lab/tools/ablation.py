"""What each searcher is worth: ``python -m lab ablation rows.csv docs/ablation.md``.

Instances of `python -m lab search` are planned with all searchers of `search.propose`, and
again without one of them. Rows are written as they are known; the same command goes on with what is
left, and runs again what came from other code.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.planners.instances import Instance, problem_of
from lab.planners.rows import SHARDOPT, sources_of
from lab.planners.suite import load_suite
from lab.programs import make_parser
from predictor.csv_rows import Row as Cells
from predictor.csv_rows import number
from predictor.errors import ShardoptError
from search.propose.searchers import SEARCHERS
from search.solve import solve
from search.stop import Stop
from shardopt.files import atomic_write_text
from shardopt.measure.store import RowKind, RowsFile

SUITE = Path("configs/bench/search/instances.yaml")
ALL = "all"
EQUAL = 1e-3
"""Relative difference of times below which plans count as equally fast."""


@dataclass(frozen=True)
class AblationRow:
    """One search of one instance.

    Args:
        without: the searcher that was left out; ``all`` where none was.
        seconds: of the search.
        iteration_ms: of its fastest plan.
        sources: digest of the code that it comes from.
    """

    instance: str
    without: str
    seconds: float
    iteration_ms: float
    sources: str


def _row(cells: Cells) -> AblationRow:
    ms, seconds = number(cells, "iteration_ms"), number(cells, "seconds")
    return AblationRow(cells["instance"], cells["without"], seconds, ms, cells["sources"])


ROWS = RowKind(
    what="ablation row",
    keys=("instance", "without", "seconds", "iteration_ms", "sources"),
    parse=_row,
    fields=asdict,
    comment="# rows of `python -m lab ablation`; see docs/ablation.md\n",
    remedy="delete the file to run all searches again",
)


def run(instances: Sequence[Instance], rows: RowsFile[AblationRow]) -> Iterator[AblationRow]:
    """Every row of the instances: those that there are, and others once they are known."""
    code = sources_of(SHARDOPT)
    known = {(row.instance, row.without): row for row in rows.rows if row.sources == code}
    for instance in instances:
        for without in (ALL, *SEARCHERS):
            row = known.get((instance.name, without))
            if row is None:
                row = _search(instance, without, code)
                rows.append(row)
            yield row


def _search(instance: Instance, without: str, code: str) -> AblationRow:
    """One search. It begins with TorchRec's plan and others whatever is left out."""
    searchers = [name for name in SEARCHERS if name != without]
    result = solve(problem_of(instance), Stop(), 0, searchers=searchers)
    fastest = result.fastest or result.best
    ms, seconds = fastest.iteration_ms, result.search_seconds
    return AblationRow(instance.name, without, round(seconds, 2), ms, code)


def page(rows: Sequence[AblationRow]) -> str:
    """The page of docs, from rows of whole instances."""
    names = list(dict.fromkeys(row.instance for row in rows))
    known = {(row.instance, row.without): row for row in rows}
    lines = [_HEAD, _line("instance", "all: ms", "s", *_twice("without {}: slower", "s"))]
    lines.append("|---" * (3 + 2 * len(SEARCHERS)) + "|\n")
    slower: dict[str, list[float]] = {name: [] for name in SEARCHERS}
    for name in names:
        whole = known[name, ALL]
        cells = [f"{whole.iteration_ms:.3f}", f"{whole.seconds:.1f}"]
        for without in SEARCHERS:
            row = known[name, without]
            slower[without].append(row.iteration_ms / whole.iteration_ms - 1)
            cells += [f"{slower[without][-1]:+.1%}", f"{row.seconds:.1f}"]
        lines.append(_line(name, *cells))
    lines.append("\n| left out | better | equal | worse | median | mean | most |\n")
    lines.append("|---" * 7 + "|\n")
    lines += [_summary(without, losses) for without, losses in slower.items()]
    return "".join(lines)


def _summary(without: str, losses: Sequence[float]) -> str:
    better, worse = (sum(sign * x > EQUAL for x in losses) for sign in (-1, 1))
    equal = len(losses) - better - worse
    shares = (statistics.median(losses), statistics.fmean(losses), max(losses))
    return _line(without, better, equal, worse, *(f"{x:+.1%}" for x in shares))


def _twice(one: str, two: str) -> list[str]:
    return [text for name in SEARCHERS for text in (one.format(name), two)]


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


_HEAD = """# What each searcher is worth

Written by `python -m lab ablation configs/bench/search/ablation.csv docs/ablation.md`; do not
edit this page. Every search has effort 1 and seed 0, starts with the plans of other methods and
ends with local search; of the searchers that propose plans one is left out. Times are predicted, of
the fastest plan found. `rounding` makes plans of the lower bound's programs and packs them.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left, and write the page."""
    parser = make_parser("ablation", __doc__)
    parser.add_argument("rows", type=Path, help="CSV file of rows; an existing one is continued")
    parser.add_argument("docs", type=Path, help="page to write")
    parser.add_argument("--suite", type=Path, default=SUITE, help=f"{SUITE} by default")
    parser.add_argument("--only", default="*", help="pattern of instances, such as '20x8-*'")
    asked = parser.parse_args(argv)
    try:
        suite = load_suite(asked.suite).instances
        instances = [i for i in suite if fnmatch.fnmatch(i.name, asked.only)]
        found = []
        for row in run(instances, RowsFile(asked.rows, ROWS)):
            found.append(row)
            print(f"{row.instance} without {row.without}: {row.iteration_ms:.3f} ms", flush=True)
        if not found:
            parser.error(f"--only: {asked.only!r} matches no instance of {asked.suite}")
        atomic_write_text(asked.docs, page(found))
    except ShardoptError as error:
        parser.exit(2, f"{error}\n")
    return 0
