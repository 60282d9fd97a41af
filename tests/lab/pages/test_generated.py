"""Every generated page is what its rows make it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lab.cli import main
from lab.pages import generated
from lab.pages.generated import PAGES, stale_pages, write_pages
from tests.public_data import ROOT


def test_no_page_is_older_than_its_rows() -> None:
    assert not stale_pages(), "run python -m lab pages"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The pages and the rows that they are made of."""
    for name in ("docs/accuracy", "configs/bench/search"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_pages_follow_their_rows(copy: Path) -> None:
    summary = copy / "docs/accuracy/summary.csv"
    text = summary.read_text()
    changed = re.sub(r"^(tbe,[^,]+,1),\d+,[\d.]+,", r"\1,28,0.9367,", text, flags=re.MULTILINE)
    assert changed != text
    summary.write_text(changed)
    assert set(stale_pages(copy)) == {"README.md", "docs/accuracy.md"}
    assert set(write_pages(copy)) == {"README.md", "docs/accuracy.md"}
    assert "| 28 | 93.7 % |" in (copy / "README.md").read_text()
    assert stale_pages(copy) == []


def test_a_page_that_is_gone_is_written(copy: Path) -> None:
    (copy / "docs/measured.svg").unlink()
    assert write_pages(copy) == ["docs/measured.svg"]


def test_the_check_says_which_page_is_stale(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generated, "stale_pages", lambda: stale_pages(copy))
    assert main(["pages", "--check"]) == 0
    (copy / "README.md").write_text((ROOT / "README.md").read_text().replace("3.7 %", "3.6 %"))
    assert main(["pages", "--check"]) == 1
    assert "README.md" in capsys.readouterr().out
