"""Every generated page and picture: ``python -m lab pages`` writes them all.

A page is a function of files in the repository, so a test makes each again and compares. A page
older than its rows fails that test. Rows come from the suites (``python -m lab
validate``), the benchmark of the search (``python -m lab search``, ``ablate``) and measured gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lab.pages.accuracy import accuracy_text
from lab.pages.api import api_text
from lab.pages.commands import flag_lines
from lab.pages.figure import figure_of_rows
from lab.pages.gains import gain_rows, gain_table, optimism
from lab.pages.json_keys import json_text
from lab.pages.model_file import model_file_text
from lab.pages.planners_page import benchmarks_text
from lab.pages.readme import readme_text, replace_block
from lab.pages.sample import with_sample
from lab.planners.ablation import ABLATION, ABLATION_ROWS
from lab.planners.rows import SEARCH_ROWS
from predictor.errors import InputError
from shardopt.files import atomic_write_text, decode, read_bytes
from shardopt.measure.store import read_rows

ROOT = Path(__file__).resolve().parents[2]
ACCURACY = "docs/accuracy"
SEARCH = "configs/bench/search"
FAMILIES = ("all", "shapes", "published")
"""Model families whose gains docs/benchmarks.md shows; the README has all together."""


def _readme(root: Path) -> str:
    page = root / "README.md"
    return readme_text(decode(read_bytes(page, "README"), page), root / ACCURACY)


def _with_block(root: Path, name: str, block: str, lines: Iterable[str]) -> str:
    """Return a hand-written page with one generated chapter."""
    page = root / name
    text = decode(read_bytes(page, "page"), page)
    return replace_block(text, block, "\n" + "\n".join(lines), name)


def _benchmarks(root: Path) -> str:
    folder = root / ACCURACY
    gains = [*gain_table([*gain_rows(folder, FAMILIES)]), "", optimism(folder)]
    rows = read_rows(root / SEARCH / "rows.csv", SEARCH_ROWS)
    file = root / SEARCH / ABLATION
    ablated = read_rows(file, ABLATION_ROWS) if file.is_file() else []
    return benchmarks_text(rows, ablated, gains)


PAGES: Mapping[str, Callable[[Path], str]] = {
    "README.md": _readme,
    "docs/accuracy.md": lambda root: accuracy_text(root / ACCURACY),
    "docs/benchmarks.md": _benchmarks,
    "docs/api.md": lambda root: api_text(),
    "docs/commands.md": lambda root: _with_block(root, "docs/commands.md", "flags", flag_lines()),
    "docs/json.md": lambda root: json_text(),
    "docs/model_file.md": lambda root: model_file_text(),
    "docs/measured.svg": lambda root: figure_of_rows(root / ACCURACY),
}
"""File -> function that makes it, from the files below the root of the repository."""


def write_sample(root: Path = ROOT) -> None:
    """Run the command at the head of the README and put its answer there.

    Raises:
        InputError: the command fails.
    """
    page = root / "README.md"
    text = with_sample(decode(read_bytes(page, "README"), page), root, str(page))
    atomic_write_text(page, text, update=True)


def write_pages(root: Path = ROOT) -> list[str]:
    """Write every page; return the names of those that changed."""
    changed = stale_pages(root)
    for name in changed:
        atomic_write_text(root / name, PAGES[name](root), update=True)
    return changed


def stale_pages(root: Path = ROOT) -> list[str]:
    """Return the names of the pages that differ from their rows.

    Raises:
        InputError: a file of rows is missing or broken.
    """
    return [name for name, make in PAGES.items() if _text(root / name) != make(root)]


def _text(path: Path) -> str | None:
    try:
        return decode(read_bytes(path, "page"), path)
    except InputError:
        return None
