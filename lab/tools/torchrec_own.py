"""TorchRec's own tests of its planner, run with `ShardoptPlanner` in its planner's place.

    python -m lab torchrec-own CHECKOUT [--theirs] [--write] [-k EXPRESSION]

CHECKOUT is a checkout of https://github.com/meta-pytorch/torchrec, 1.7 to 1.9. Its test files are
run as they are, on its own torchrec: in every process, those that the tests start too, the name
`EmbeddingShardingPlanner` stands for our planner. docs/hook.md says how many pass, and lists those
that differ with the reason: this fails if the numbers or the list are not those of the run, and
`--write` writes the numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hook.md"
SUITES = (
    "torchrec/distributed/planner/tests/test_planners.py",
    "torchrec/distributed/planner/tests/test_stats.py",
    "torchrec/distributed/planner/tests/test_types.py",
    "torchrec/distributed/planner/tests/test_embedding_utils.py",
    "torchrec/schema/api_tests/test_planner_schema.py",
    "torchrec/distributed/tests/test_model_parallel_gloo.py",
)
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
"""Runs at the start of every Python process (`sitecustomize`); no test is about the search, so it
takes little effort."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; 1 if they differ from the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--theirs", action="store_true", help="with TorchRec's own planner")
    parser.add_argument("--write", action="store_true", help="write the numbers to the page")
    parser.add_argument("-k", default="", help="only tests whose name matches, as in pytest")
    given = parser.parse_args(argv)
    results = dict(run_tests(given.checkout, theirs=given.theirs, only=given.k))
    passed = [name for name, outcome in results.items() if outcome == "passed"]
    failed = [name for name, outcome in results.items() if outcome == "failed"]
    print(
        f"{len(passed)} passed, {len(failed)} failed, {len(results) - len(passed) - len(failed)} "
        f"skipped of {len(results)}"
    )
    if given.theirs:
        print("\n".join(failed))
        return 0
    page = PAGE.read_text()
    expected = set(read_differences(page))
    new = sorted(set(failed) - expected)
    gone = sorted(expected & set(passed))
    for name in new:
        print(f"differs, and docs/hook.md does not say why: {name}")
    for name in gone:
        print(f"passes, and docs/hook.md says it differs: {name}")
    version = (given.checkout / "version.txt").read_text().strip()
    wanted = with_numbers(page, version, len(results), len(passed), len(failed))
    if given.write:
        PAGE.write_text(wanted)
    elif not given.k and wanted != page:
        print("docs/hook.md has other numbers: run this with --write")
        return 1
    return 1 if new or gone or not results else 0


def with_numbers(page: str, version: str, total: int, passed: int, failed: int) -> str:
    """The page, with the outcome of a run in its sentence."""
    skipped = total - passed - failed
    said = (
        f"With version {version}, {passed} of {total} pass, {skipped} are skipped and {failed} fail"
    )
    return re.sub(r"With version [^,]+, \d+ of \d+ pass, \d+ are skipped and \d+ fail", said, page)


def run_tests(checkout: Path, *, theirs: bool, only: str) -> Iterator[tuple[str, str]]:
    """Name (``Class::test``) and outcome of every test: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        files = [str(suite) for suite in SUITES if (checkout / suite).exists()]
        if not theirs:
            (folder / "sitecustomize.py").write_text(IN_PLACE)
        paths = [made, str(checkout.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
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


def read_report(text: str) -> Iterator[tuple[str, str]]:
    """Outcomes in a JUnit file."""
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "failed" if kinds else "passed"
        yield f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}", outcome


def read_differences(page: str) -> Sequence[str]:
    """The tests that the page's table lists: rows that begin with `Class::test`."""
    return re.findall(r"^\| `(\w+::\w+)` \|", page, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
