"""Every decision has a number, a title, a date and a status, and the index lists it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "decisions"
HEAD = re.compile(r"# (\d+)\. (.+)\n\nDate: (\d{4}-\d\d-\d\d)\. Status: (.+(?:\n.+)?)\.\n\n")


def test_the_index_lists_every_decision() -> None:
    lines = (FOLDER / "README.md").read_text().splitlines()
    expected = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        head = HEAD.match(path.read_text())
        assert head, f"{path.name}: lacks '# N. Title' and 'Date: YYYY-MM-DD. Status: ...'"
        number, title, date, status = (text.replace("\n", " ") for text in head.groups())
        assert int(number) == int(path.name[:4]), path.name
        assert re.match(r"accepted|superseded by \[\d+\]", status), f"{path.name}: {status}"
        expected.append(f"| {number} | [{title}]({path.name}) | {date} | {status} |")
    assert lines[lines.index("|---|---|---|---|") + 1 :] == expected


def test_the_code_cites_the_decisions_that_explain_it() -> None:
    files = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("predictor", "search", "shardopt", "tools"):
        files += (ROOT / folder).rglob("*.py")
    text = "\n".join(path.read_text() for path in files)
    cited = {int(number) for number in re.findall(r"docs/decisions/(\d{4})", text)}
    written = {int(path.name[:4]) for path in FOLDER.glob("[0-9]*.md")}
    assert cited == written
