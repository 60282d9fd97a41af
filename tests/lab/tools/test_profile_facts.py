"""Replacing computed figures in profile files that people write."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from lab.tools.profile_facts import Facts, set_key, with_facts
from predictor.hardware.loader import list_hardware, load_hardware, parse_hardware
from predictor.hardware.schema import GROUP_NAMES, KnownError

TEXT = """\
# by hand
name: x  # a name
sms: 3
group:
  tiles: [[1, 2],
    [3, 4]]
  provenance:
    source: >-
      Some words: with a colon
      over two lines.
    n: 4
  after: 1

items:
- a
- b
"""
ERROR = KnownError(suite="gemm", rows="some: rows", n=3, mean=0.25, geomean=0.125)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["group", "provenance", "n"], 7),
        (["group", "provenance", "range"], {"m": [1, 2.5], "n": [3, 4]}),
        (["group", "provenance", "error"], ERROR.model_dump()),
        (["group", "provenance", "source"], "other"),
        (["group", "tiles"], {"a": 1}),
        (["items"], [{"suite": "a", "n": 1}, {"suite": "b", "n": 2}]),
        (["new"], [{"suite": "a", "n": 1}]),
        (["sms"], 4),
    ],
)
def test_one_key_changes_and_nothing_else(path: list[str], value: object) -> None:
    made = set_key(TEXT, path, value)
    wanted = yaml.safe_load(TEXT)
    at = wanted
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert yaml.safe_load(made) == wanted
    assert made.startswith("# by hand\nname: x  # a name\n")
    assert set_key(made, path, value) == made
    gone = set_key(made, path, None)
    del at[path[-1]]
    assert yaml.safe_load(gone) == wanted


def test_a_new_key_stands_where_it_is_asked_for() -> None:
    lines = set_key(TEXT, ["new"], 1, after="sms").splitlines()
    assert lines.index("new: 1") == lines.index("sms: 3") + 1


@pytest.mark.parametrize("name", list_hardware())
def test_stated_figures_written_again_change_nothing(name: str) -> None:
    file = resources.files("predictor.hardware") / "profiles" / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    profile = load_hardware(name)
    again = with_facts(text, GROUP_NAMES, Facts.stated(profile))
    assert parse_hardware(again, file.name) == profile
    if text.startswith("base:") or "\nbase:" in text:
        return  # what it takes from there keeps its facts
    bare = parse_hardware(with_facts(text, GROUP_NAMES, Facts()), name)
    assert Facts.stated(bare) == Facts()
    assert bare.gemm.tflops == profile.gemm.tflops
