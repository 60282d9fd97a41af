"""The index of decisions has every page with its title, and a page cites only pages that exist."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def test_the_index_lists_every_decision() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        title = re.match(r"# (\d+)\. (.+)\n", path.read_text(encoding="utf-8"))
        assert title, f"{path.name} lacks '# N. Title'"
        assert int(title[1]) == int(path.name[:4]), path.name
        assert f"[{title[2]}]({path.name})" in index
