"""The page in a real browser: no errors, no requests, sorting and filtering by clicking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardopt.report.html.page import page
from tests.shardopt.report.browser import Browser, find_browser
from tests.shardopt.report.plans import NASTY, nasty

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on the PATH; SHARDOPT_BROWSER names one"
)

SHOWN = "[...document.querySelectorAll('#plan tbody tr')].filter(r => !r.hidden)"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "out.html"
    path.write_text(page(*nasty(), {"shardopt": "0"}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser, file: Path) -> Iterator[Browser]:
    """The page, opened anew; at the end nothing may have been logged or fetched."""
    started.errors.clear()
    started.requests.clear()
    started.open(file)
    yield started
    assert started.errors == []
    assert set(started.requests) == {file.resolve().as_uri()}


def column(browser: Browser, number: int) -> list[str]:
    found = browser.run(f"{SHOWN}.map(r => r.cells[{number}].textContent)")
    assert isinstance(found, list)
    return found


def test_it_opens_and_the_hostile_name_is_text(browser: Browser) -> None:
    assert NASTY in column(browser, 0)
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.getElementById('count').textContent") == "12 of 12 shown"


def test_a_click_on_a_title_sorts_and_another_turns_round(browser: Browser) -> None:
    rows = [int(cell.replace(",", "")) for cell in column(browser, 1)]
    assert rows == sorted(rows)
    browser.click("#plan th:nth-child(2) button")
    browser.click("#plan th:nth-child(2) button")
    turned = [int(cell.replace(",", "")) for cell in column(browser, 1)]
    assert turned == sorted(rows, reverse=True)
    assert browser.run("document.querySelector('#plan th:nth-child(2)').ariaSort") == "descending"
    browser.click("#plan th:nth-child(1) button")
    names = column(browser, 0)
    assert names[1:3] == ["t0", "t1"]
    assert names.index("t2") < names.index("t10")
    assert browser.run("document.querySelector('#plan th:nth-child(2)').ariaSort") is None


def test_text_type_and_rank_filter(browser: Browser) -> None:
    browser.click("#filter")
    browser.type("T1")
    assert set(column(browser, 0)) == {"t1", "t10", "t11"}
    browser.click("#rank")
    browser.type("2")
    assert column(browser, 0) == ["t10"]
    assert browser.run("document.getElementById('count').textContent") == "1 of 12 shown"
    options = "[...document.getElementById('type').options].map(o => o.value)"
    assert browser.run(options) == ["", "TW"]


def test_pointing_at_a_bar_tells_what_runs(browser: Browser) -> None:
    assert browser.run("getComputedStyle(document.getElementById('tip')).display") == "none"
    browser.point(".timeline svg.p-dense_backward.critical rect")
    tip = browser.run("document.getElementById('tip').textContent")
    assert "on the critical path" in tip
    assert "rank" in tip


def test_zoom_widens_the_lanes(browser: Browser) -> None:
    width = "document.querySelector('.lanes').getBoundingClientRect().width"
    before = browser.run(width)
    browser.run(
        "(() => { const z = document.getElementById('zoom'); z.value = 2;"
        "z.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(width) == pytest.approx(4 * before)


@pytest.mark.parametrize("width", [1400, 480])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_window_in_both_schemes(
    browser: Browser, file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.open(file, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(255, 255, 255)") != dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [1400, 700])
def test_no_label_of_the_timeline_is_cut_off(browser: Browser, file: Path, width: int) -> None:
    browser.open(file, width=width)
    shown = browser.run(
        "[...document.querySelectorAll('.lanes svg text')]"
        ".filter(t => getComputedStyle(t).visibility !== 'hidden')"
        ".map(t => [t.getBoundingClientRect().right,"
        " t.parentElement.getBoundingClientRect().right])"
    )
    assert shown
    assert all(right <= edge for right, edge in shown)


def test_all_ranks_are_on_the_page(browser: Browser) -> None:
    frame = "document.querySelector('.timeline')"
    assert browser.run(f"{frame}.scrollHeight <= {frame}.clientHeight")


def test_bars_of_the_timeline_are_drawn(browser: Browser) -> None:
    boxes = browser.run(
        "[...document.querySelectorAll('.timeline svg svg rect')].map(r => "
        "{ const b = r.getBoundingClientRect(); return [b.width, b.height]; })"
    )
    assert len(boxes) > 50
    assert sum(width > 1 for width, _ in boxes) > len(boxes) / 4
    assert all(height > 10 for _, height in boxes)
