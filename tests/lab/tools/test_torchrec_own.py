"""What `make test-torchrec-own` makes of TorchRec's results and of the page."""

from __future__ import annotations

from lab.tools.torchrec_own import PAGE, SUITES, read_differences, read_report, with_numbers

REPORT = """<testsuites><testsuite>
<testcase classname="torchrec.distributed.planner.tests.test_stats.TestStats" name="test_a"/>
<testcase classname="x.TestStats" name="test_b"><failure message="no"/></testcase>
<testcase classname="x.TestStats" name="test_c"><error message="no"/></testcase>
<testcase classname="x.TestStats" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_from_the_report() -> None:
    assert dict(read_report(REPORT)) == {
        "TestStats::test_a": "passed",
        "TestStats::test_b": "failed",
        "TestStats::test_c": "failed",
        "TestStats::test_d": "skipped",
    }


def test_the_page_names_the_suites_and_what_differs() -> None:
    page = PAGE.read_text()
    differences = read_differences(page)
    assert differences
    assert len(differences) == len(set(differences))
    for suite in SUITES:
        assert suite.rsplit("/", 1)[-1].removesuffix(".py") in page


def test_the_numbers_of_a_run_are_written_to_the_page() -> None:
    page = with_numbers(PAGE.read_text(), "1.9.2", 140, 133, 3)
    assert "With version 1.9.2, 133 of 140 pass, 4 are skipped and 3 fail" in page
