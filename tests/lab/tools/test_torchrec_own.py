"""Handling of TorchRec's own test results and their page by `make test-torchrec-own`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab.tools import torchrec_own
from lab.tools.torchrec_own import (
    PAGE,
    SUITES,
    fetch,
    read_differences,
    read_report,
    table,
    with_table,
)
from predictor.errors import InputError

REPORT = """<testsuites><testsuite>
<testcase classname="torchrec.distributed.planner.tests.test_stats.TestStats" name="test_a"/>
<testcase classname="x.TestStats" name="test_b"><failure message="no"/></testcase>
<testcase classname="x.TestStats" name="test_c"><error message="no"/></testcase>
<testcase classname="x.TestStats" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_from_the_report() -> None:
    outcomes = list(read_report(REPORT))
    assert [(o.name, o.result) for o in outcomes] == [
        ("TestStats::test_a", "passed"),
        ("TestStats::test_b", "failed"),
        ("TestStats::test_c", "failed"),
        ("TestStats::test_d", "skipped"),
    ]
    assert outcomes[0].file == "test_stats"


def test_the_page_names_the_suites_and_what_differs() -> None:
    page = PAGE.read_text()
    differences = read_differences(page)
    assert differences
    assert len(differences) == len(set(differences))
    for suite in SUITES:
        assert suite.rsplit("/", 1)[-1].removesuffix(".py") in page


def test_the_outcome_of_a_run_is_written_to_the_page() -> None:
    page = PAGE.read_text()
    written = with_table(page, table("1.9.2", list(read_report(REPORT))))
    assert "| TorchRec 1.9.2 | passed | failed | skipped |" in written
    assert "| all | 1 | 2 | 1 |" in written
    assert read_differences(written) == read_differences(page), "the reasons stay"


def test_a_folder_that_is_no_checkout_is_refused_before_tests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrec_own, "run_tests", lambda *_, **__: pytest.fail("tests ran"))
    with pytest.raises(InputError, match=r"version\.txt"):
        torchrec_own.run_suites(tmp_path, "nowhere", theirs=False, write=False, only="")


def test_the_commit_of_the_installed_torchrec_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchrec")
    import torchrec.version

    source = tmp_path / "source"
    source.mkdir()
    (source / "version.txt").write_text("1.2.3\n")
    for step in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *step], cwd=source, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=source, check=True, capture_output=True, text=True
    ).stdout.strip()
    monkeypatch.setattr(torchrec.version, "git_version", head)
    monkeypatch.setattr(torchrec_own, "KEPT", tmp_path / "kept")
    assert (fetch(str(source)) / "version.txt").read_text() == "1.2.3\n"
    assert fetch("nowhere") == tmp_path / "kept" / head, "kept, so fetched once"
