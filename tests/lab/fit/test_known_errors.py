"""Ranges and errors that the shipped profiles state, and the command that computes them."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest
import yaml

from lab.cli import main
from lab.fit.known_errors import INTRA, WRITTEN, Facts, computed, set_key, with_facts
from predictor.hardware.loader import list_hardware, load_hardware, parse_hardware
from predictor.hardware.schema import GROUP_NAMES, HardwareProfile, KnownError
from shardopt.formatting import percent
from tests.public_data import EXCERPTS, FULL, needs_public_data

COMMAND = "python -m lab fit known-errors --data DIR predictor/hardware/profiles"


def shown(facts: Facts) -> list[tuple[str, int, str, str]]:
    """Errors of whole iterations to the digits that are printed."""
    return [(e.suite, e.n, percent(e.mean), percent(e.geomean)) for e in facts.iterations]


def without_errors(profile: HardwareProfile) -> HardwareProfile:
    """Drop the errors that the command writes, and GEMM's, which differ on the excerpts."""
    gemm = profile.gemm.model_copy(update={"provenance": None})
    return profile.model_copy(update={"known_error": (), "gemm": gemm})


@needs_public_data
def test_shipped_profiles_state_what_the_suites_compute() -> None:
    for name, facts in computed(FULL).items():
        stated = Facts.stated(load_hardware(name))
        for group in WRITTEN:
            assert stated.of_group(group) == facts.of_group(group), f"{name} {group}: run {COMMAND}"
        assert shown(stated) == shown(facts), f"{name}: run {COMMAND}"


@pytest.mark.slow
def test_shipped_profiles_state_what_the_excerpts_show() -> None:
    """The excerpts hold a quarter of GEMM's test rows; all else is complete."""
    errors = computed(EXCERPTS)
    for name, facts in errors.items():
        stated = Facts.stated(load_hardware(name))
        assert stated.of_group(INTRA) == facts.of_group(INTRA), f"{name}: run {COMMAND}"
        assert shown(stated) == shown(facts), f"{name}: run {COMMAND}"
        of_sample, of_all = facts.of_group("gemm"), stated.of_group("gemm")
        assert of_all["range"] == of_sample["range"], f"{name}: run {COMMAND}"
        assert bool(of_all["error"]) == bool(of_sample["error"])
        for key in ("mean", "geomean") if of_all["error"] else ():
            assert of_sample["error"][key] == pytest.approx(of_all["error"][key], rel=0.25), name
    assert sum(bool(facts.of_group("gemm")["error"]) for facts in errors.values()) >= 8


@pytest.mark.slow
def test_the_command_writes_them_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(str(resources.files("predictor.hardware"))) / "profiles"
    for path in shipped.glob("*.yaml"):
        shutil.copy(path, tmp_path)
    spoilt = tmp_path / "h100-sxm.yaml"
    text = spoilt.read_text(encoding="utf-8")
    spoilt.write_text(text.replace("suite: gemm", "suite: other"), encoding="utf-8")
    assert main(["fit", "known-errors", "--data", str(EXCERPTS), str(tmp_path)]) == 0
    assert "h100-sxm" in capsys.readouterr().out
    assert "suite: other" not in spoilt.read_text(encoding="utf-8")
    assert main(["fit", "known-errors", "--data", str(EXCERPTS), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "changed: none\n"
    for name in list_hardware():
        again = (tmp_path / f"{name}.yaml").read_text(encoding="utf-8")
        assert without_errors(parse_hardware(again, f"{name}.yaml")) == without_errors(
            load_hardware(name)
        )


def test_folders_that_hold_nothing_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "known-errors", "--data", str(tmp_path), str(tmp_path)]) == 2
    assert "neusight" in capsys.readouterr().err


@pytest.mark.parametrize("name", list_hardware())
def test_errors_are_of_fitted_groups_and_fractions(name: str) -> None:
    profile = load_hardware(name)
    for group in profile.groups.values():
        error = group.provenance.error
        if error is not None:
            rows = group.provenance.range or group.provenance.n
            assert rows or group.provenance.kind == "derived"
            assert 0 < error.geomean <= error.mean < 1
    for error in profile.known_error:
        assert error.geomean <= error.mean * 1.001


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
    changed = set_key(TEXT, path, value)
    expected = yaml.safe_load(TEXT)
    at = expected
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert yaml.safe_load(changed) == expected
    assert changed.startswith("# by hand\nname: x  # a name\n")
    assert set_key(changed, path, value) == changed
    restored = set_key(changed, path, None)
    del at[path[-1]]
    assert yaml.safe_load(restored) == expected


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
    facts = Facts.stated(bare)
    assert not facts.iterations
    assert not any(any(facts.of_group(group).values()) for group in GROUP_NAMES)
    assert bare.gemm.tflops == profile.gemm.tflops
