"""TorchRec's own tests of its planner, run with `ShardoptPlanner` in its planner's place.

    python -m lab torchrec-own [CHECKOUT] [--source URL] [--theirs] [--write] [-k EXPRESSION]

Without CHECKOUT, the commit of the installed torchrec is fetched. The test files run unchanged on
the checkout's own torchrec: in every process, also those that tests start, the name
`EmbeddingShardingPlanner` is our planner. docs/compatibility.md has the outcome by file, and lists
the tests that differ with the reason. The command fails if the page disagrees with the run, and
`--write` writes the outcome.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from predictor.errors import InputError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
SUITES = (
    "torchrec/distributed/planner/tests/test_planners.py",
    "torchrec/distributed/planner/tests/test_stats.py",
    "torchrec/distributed/planner/tests/test_types.py",
    "torchrec/distributed/planner/tests/test_embedding_utils.py",
    "torchrec/schema/api_tests/test_planner_schema.py",
    "torchrec/distributed/tests/test_model_parallel_gloo.py",
)
KEPT = ROOT / ".venv" / "torchrec-own"
"""Folder of fetched commits."""
IN_PLACE = """\
import functools
import sys

from shardopt.torchrec import ShardoptPlanner
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner as theirs

whole = ShardoptPlanner.__init__
ShardoptPlanner.__init__ = functools.wraps(whole)(functools.partialmethod(whole, effort=0.01))
for name, module in list(sys.modules.items()):
    if name.startswith("torchrec."):
        for key, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, key, ShardoptPlanner)
"""
"""Runs at the start of every Python process (`sitecustomize`); no test depends on the search, so
its effort is small."""


class Outcome(NamedTuple):
    """Outcome of a test: ``Class::test`` in a file, ``passed``, ``failed`` or ``skipped``."""

    file: str
    name: str
    result: str


def run_suites(checkout: Path | None, source: str, *, theirs: bool, write: bool, only: str) -> int:
    """Run the tests; return 1 if they differ from the page."""
    folder = checkout or fetch(source)
    version = _version(folder)
    outcomes = list(run_tests(folder, theirs=theirs, only=only))
    names_by_result = {kind: {o.name for o in outcomes if o.result == kind} for kind in RESULTS}
    print(", ".join(f"{len(names)} {kind}" for kind, names in names_by_result.items()))
    if theirs:
        print("\n".join(sorted(names_by_result["failed"])))
        return 0
    page = PAGE.read_text()
    expected = set(read_differences(page))
    new, repaired = (
        sorted(names_by_result["failed"] - expected),
        sorted(expected & names_by_result["passed"]),
    )
    for name in new:
        print(f"differs, and docs/compatibility.md does not say why: {name}")
    for name in repaired:
        print(f"passes, and docs/compatibility.md says it differs: {name}")
    updated = with_table(page, table(version, outcomes))
    if write:
        PAGE.write_text(updated)
    elif not only and updated != page:
        print("docs/compatibility.md has another outcome: run this with --write")
        return 1
    return 1 if new or repaired or not outcomes else 0


def _version(checkout: Path) -> str:
    """Return TorchRec's version from its checkout.

    Raises:
        InputError: the folder is no checkout.
    """
    file = checkout / "version.txt"
    try:
        return file.read_text().strip()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}; {checkout} must be a checkout of TorchRec, "
            "or leave it out to fetch one"
        ) from error


def fetch(source: str) -> Path:
    """Fetch a checkout of the installed torchrec's commit.

    Args:
        source: repository that has it.
    """
    from torchrec.version import git_version

    folder = KEPT / git_version
    if not (folder / "version.txt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for step in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", source, git_version],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(["git", *step], cwd=folder, check=True)
    return folder


RESULTS = ("passed", "failed", "skipped")
TABLE = re.compile(r"(?<=<!-- written by make test-torchrec-own -->\n\n).*?(?=<!-- end -->)", re.S)


def table(version: str, outcomes: Sequence[Outcome]) -> str:
    """Return the outcome by file as a table of the page."""
    rows = [f"| TorchRec {version} | {' | '.join(RESULTS)} |", "|---|---|---|---|"]
    files = list(dict.fromkeys(outcome.file for outcome in outcomes))
    for title, selected in [*((f"`{file}`", [file]) for file in files), ("all", files)]:
        counts = [
            sum(o.file in selected and o.result == kind for o in outcomes) for kind in RESULTS
        ]
        rows.append(f"| {title} | {' | '.join(map(str, counts))} |")
    return "\n".join([*rows, "", ""])


def with_table(page: str, rows: str) -> str:
    """Return the page with the outcome of a run."""
    return TABLE.sub(lambda _: rows, page)


def run_tests(checkout: Path, *, theirs: bool, only: str) -> Iterator[Outcome]:
    """Run the test files on a checkout; yield their outcomes."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        files = [str(suite) for suite in SUITES if (checkout / suite).exists()]
        if not theirs:
            (folder / "sitecustomize.py").write_text(IN_PLACE)
        paths = [work, str(checkout.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--rootdir", str(checkout), "--tb=short", f"--junitxml={report}", *files]
        subprocess.run(
            [*command, *(["-k", only] if only else [])],
            cwd=checkout,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        yield from read_report(report.read_text())


def read_report(text: str) -> Iterator[Outcome]:
    """Yield the outcomes in a JUnit file."""
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        result = "skipped" if "skipped" in kinds else "failed" if kinds else "passed"
        *_, file, class_name = ["", *case.get("classname", "").split(".")]
        yield Outcome(file, f"{class_name}::{case.get('name')}", result)


def read_differences(page: str) -> Sequence[str]:
    """Return the tests in the page's table: rows that begin with `Class::test`."""
    return re.findall(r"^\| `(\w+::\w+)` \|", page, re.MULTILINE)
