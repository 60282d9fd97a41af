"""The README's tables are those of the accuracy page."""

import re
from pathlib import Path

import pytest

from lab.pages.accuracy.scores import report_object
from lab.tools.readme import SHOWN, main, updated
from lab.validate.suites import find_suites
from predictor.errors import InputError
from tests.public_data import FULL, TRACES

ROOT = Path(__file__).resolve().parents[3]
EMPTY = """# Title
<!-- generated: accuracy -->
stale
<!-- end of accuracy -->
between
<!-- generated: gain -->
<!-- end of gain -->
end
"""


AGAINST = """
### against TorchRec's planner

Gain.

| plans of | runtime | models | task set | tasks | faster | equal | slower | mean gain | from | to |
|---|---|---|---|---|---|---|---|---|---|---|
| shardopt, machine calibrated | plain | all | all | 12 | 7 | 4 | 1 | +2.9 % | +1.0 % | +4.8 % |
| shardopt, machine calibrated | plain | shapes | b | 5 | 5 | 0 | 0 | +3.5 % | +1.1 % | +5.9 % |
| shardopt, shipped profile | plain | all | all | 3 | 1 | 1 | 1 | +9.9 % | +1.0 % | +4.8 % |

### foretold gains

Optimism.

| plans of | runtime | models | task set | mean foretold |
|---|---|---|---|---|
| shardopt, machine calibrated | plain | shapes | b | +4.4 % |
| shardopt, machine calibrated | plain | all | all | +3.3 % |
| random plans | plain | all | all | -30.0 % |

### tasks

| task |
"""


def page() -> str:
    """An accuracy page with every suite and part that the README shows."""
    sections = []
    for n, suite in enumerate(dict.fromkeys(suite for suite, *_ in SHOWN)):
        parts = [part for of, part, *_ in SHOWN if of == suite]
        rows = "".join(f"| {part} | {n} | 4.5 % | 2.7 % | 22.6 % |\n" for part in parts)
        extra = AGAINST if suite == "against-torchrec" else ""
        sections.append(f"## {suite}\n\n| rows | n |\n|---|---|\n{rows}{extra}")
    return "\n".join(sections)


def test_each_table_goes_to_its_place() -> None:
    found = updated(EMPTY, page())
    accuracy, gain = found.split("between")
    assert "| `torchrec-cpu` | the same, all 51 models | 0 | 4.5 %" in accuracy
    assert accuracy.count("\n| `") == 1 + len(SHOWN)
    assert "| 12 | +2.9 % (+1.0 % to +4.8 %) | +3.3 % | 7 faster, 4 equal, 1 slower |" in gain
    assert "models: shapes, task set: b | 5 | +3.5 % (+1.1 % to +5.9 %) | +4.4 % |" in gain
    assert "9.9 %" not in gain
    assert "| -0.9 % (mean) | +4.0 % (mean) |" in gain
    assert "| task |" not in gain
    assert "stale" not in found
    assert found.startswith("# Title\n")
    assert found.endswith("end\n")
    assert updated(found, page()) == found


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="no part 'plans \\*' of the suite 'against-torchrec'"):
        updated(EMPTY, page().replace("| plans *", "| plans"))
    with pytest.raises(InputError, match="no row 'shardopt, machine calibrated' in 'against"):
        updated(EMPTY, page().replace("### against", "### for"))
    with pytest.raises(InputError, match=r"README.md: lacks '<!-- generated: gain -->'"):
        updated(EMPTY.replace("generated: gain", ""), page())


def test_the_committed_readme_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text()
    assert updated(readme, (ROOT / "docs" / "accuracy.md").read_text()) == readme


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, accuracy = tmp_path / "README.md", tmp_path / "accuracy.md"
    readme.write_text(EMPTY)
    accuracy.write_text(page())
    assert main([str(readme), str(accuracy)]) == 0
    assert "7 faster, 4 equal" in readme.read_text()
    with pytest.raises(SystemExit) as ended:
        main([str(readme), str(tmp_path / "none.md")])
    assert ended.value.code == 2
    assert "none.md" in capsys.readouterr().err


def test_the_readme_links_to_files_that_are_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert "docs/measured.svg" in targets
    assert not [t for t in targets if "://" not in t and not (ROOT / t).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("suite", dict.fromkeys(suite for suite, *_ in SHOWN))
def test_the_figures_are_those_that_the_suite_gives(suite: str) -> None:
    """As ``python -m lab validate SUITE --json`` prints them."""
    (found,) = find_suites(suite)
    if not (found.committed or TRACES.is_dir()):
        pytest.skip("the public data is not here")
    parts = report_object(found.run(None if found.committed else FULL))["parts"]
    readme = (ROOT / "README.md").read_text()
    for _, part, about, _ in (row for row in SHOWN if row[0] == suite):
        (line,) = re.findall(rf"^\| `{suite}` \| {re.escape(about)} \| (.*) \|$", readme, re.M)
        n, mean, geomean, _ = line.split(" | ")
        given = parts[part.removesuffix(" *")]
        assert int(n) == given["n"]
        shown = [float(cell.removesuffix(" %")) for cell in (mean, geomean)]
        assert shown == pytest.approx([100 * given[key] for key in ("mape", "geomean")], abs=0.06)
