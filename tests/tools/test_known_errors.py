"""Ranges and errors that the shipped profiles state, and the command that computes them."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest

from predictor.hardware.loader import list_hardware, load_hardware, parse_hardware
from shardopt.formatting import percent
from tools.known_errors import WRITTEN, computed, main
from tools.profile_facts import Facts

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public tables are not here")
COMMAND = "python -m tools.known_errors --data DIR predictor/hardware/profiles"


def shown(facts: Facts) -> list[tuple[str, int, str, str]]:
    """Errors of whole iterations to the digits that are printed."""
    return [(e.suite, e.n, percent(e.mean), percent(e.geomean)) for e in facts.iterations]


@needs_data
def test_shipped_profiles_state_what_the_suites_compute() -> None:
    for name, facts in computed(DATA).items():
        stated = Facts.stated(load_hardware(name))
        for group in WRITTEN:
            assert stated.of_group(group) == facts.of_group(group), f"{name} {group}: run {COMMAND}"
        assert shown(stated) == shown(facts), f"{name}: run {COMMAND}"


@needs_data
def test_the_command_writes_them_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(str(resources.files("predictor.hardware"))) / "profiles"
    for path in shipped.glob("*.yaml"):
        shutil.copy(path, tmp_path)
    spoilt = tmp_path / "h100-sxm.yaml"
    text = spoilt.read_text(encoding="utf-8")
    spoilt.write_text(text.replace("suite: gemm", "suite: other"), encoding="utf-8")
    assert main(["--data", str(DATA), str(tmp_path)]) == 0
    assert "h100-sxm" in capsys.readouterr().out
    assert "suite: other" not in spoilt.read_text(encoding="utf-8")
    assert main(["--data", str(DATA), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "changed: none\n"
    for name in list_hardware():
        again = (tmp_path / f"{name}.yaml").read_text(encoding="utf-8")
        same = parse_hardware(again, name).model_copy(update={"known_error": ()})
        assert same == load_hardware(name).model_copy(update={"known_error": ()})


def test_folders_that_hold_nothing_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--data", str(tmp_path), str(tmp_path)])
    assert caught.value.code == 2
    assert "neusight" in capsys.readouterr().err


@pytest.mark.parametrize("name", list_hardware())
def test_errors_are_of_fitted_groups_and_fractions(name: str) -> None:
    profile = load_hardware(name)
    for group in profile.groups.values():
        error = group.provenance.error
        if error is not None:
            assert group.provenance.range or group.provenance.n
            assert 0 < error.geomean <= error.mean < 1
    for error in profile.known_error:
        assert error.geomean <= error.mean * 1.001
