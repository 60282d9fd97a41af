"""The page in a real browser: it draws, sorts and filters, and asks for nothing else."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardopt.report.html.page import page
from tests.shardopt.report.plans import NASTY, nasty

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = os.environ.get("SHARDOPT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on the PATH; SHARDOPT_BROWSER names one"
)
PROBE = """<script>
const errors = [], out = document.createElement("pre");
const rows = () => [...document.querySelectorAll("#plan tbody tr")].filter(r => !r.hidden);
const column = n => rows().map(r => r.cells[n].textContent);
const sort = n => document.querySelector(`#plan th:nth-child(${n}) button`).click();
const put = (id, text) => {
  const field = document.getElementById(id);
  field.value = text;
  field.dispatchEvent(new Event("input", {bubbles: true}));
};
addEventListener("error", e => errors.push(e.message));
addEventListener("load", () => {
  const count = document.getElementById("count").textContent;
  const found = {names: column(0), first: column(1), count};
  sort(2); sort(2); found.turned = column(1);
  sort(1); found.sorted = column(0);
  put("filter", "T1"); found.filtered = column(0);
  put("rank", "2"); found.on_rank = column(0);
  found.width = document.documentElement.scrollWidth <= innerWidth;
  found.bars = [...document.querySelectorAll(".timeline svg svg rect")]
    .filter(r => r.checkVisibility())
    .map(r => r.getBoundingClientRect()).map(b => [b.width, b.height]);
  found.fetched = performance.getEntriesByType("resource").length;
  found.errors = errors;
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


def chromium(*words: object) -> str:
    """Run the browser once; what it prints."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    command = [str(PROGRAM), *flags, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    text = page(nasty(), {"shardopt": "0"})
    (tmp_path / "page.html").write_text(text + PROBE, "utf-8")
    shown = chromium("--dump-dom", (tmp_path / "page.html").as_uri())
    (probe,) = re.findall(r'<pre id="probe">(.*?)</pre>', shown, re.S)
    probed: dict[str, Any] = json.loads(html.unescape(probe))
    assert (probed["errors"], probed["fetched"], probed["width"]) == ([], 0, True)
    assert NASTY in probed["names"]
    assert probed["count"] == "12 of 12 shown"
    rows = [int(cell.replace(",", "")) for cell in probed["first"]]
    assert rows == sorted(rows)
    assert [int(cell.replace(",", "")) for cell in probed["turned"]] == rows[::-1]
    names = probed["sorted"]
    assert names.index("t2") < names.index("t10")
    assert set(probed["filtered"]) == {"t1", "t10", "t11"}
    assert probed["on_rank"] == ["t10"]
    assert len(probed["bars"]) > 50
    assert all(height > 10 for _, height in probed["bars"])


def test_a_screenshot_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(nasty(), {"shardopt": "0"}), "utf-8")
    image = tmp_path / "page.png"
    chromium(f"--screenshot={image}", "--window-size=480,900", (tmp_path / "page.html").as_uri())
    assert image.read_bytes().startswith(b"\x89PNG")
