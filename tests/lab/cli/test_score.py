"""`python -m lab score`: plans scored a second."""

import json
from pathlib import Path

import pytest

KINDS = {
    "random plans",
    "plans with one table or shard moved",
    "neighbours in a local search",
    "random plans in all of 16 scenarios",
}


def test_json_holds_every_kind(run, model: Path) -> None:
    done = run("score", model, "--gpus", 2, "--count", 20, "--repeat", 3, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert (data["world_size"], data["count"], data["repeat"]) == (2, 20, 3)
    assert data["kinds"].keys() == KINDS
    for kind in data["kinds"].values():
        assert len(kind["samples_s"]) == 3
        assert kind["per_second"] == pytest.approx(20 / sorted(kind["samples_s"])[1])
    times = {name: kind["per_second"] for name, kind in data["kinds"].items()}
    ratio = times["random plans"] / times["random plans in all of 16 scenarios"]
    assert data["scenarios_cost"] == pytest.approx(ratio)
    assert data["machine"].keys() >= {"cores", "python", "load_average"}


def test_the_console_names_every_kind(run, model: Path) -> None:
    done = run("score", model, "--gpus", 2, "--count", 5, "--repeat", 1)
    assert done.code == 0, done.err
    *lines, last = done.out.splitlines()
    assert last.endswith("times the time of a plan: the same in all scenarios")
    assert {line.split(": ")[1] for line in lines} == KINDS
    assert all(float(line.split()[0].replace(",", "")) > 0 for line in lines)


@pytest.mark.parametrize("flags", [("--count", 0), ("--repeat", 0), ("--count", 10**7)])
def test_numbers_out_of_range_are_refused(run, model: Path, flags: tuple[str, int]) -> None:
    done = run("score", model, "--gpus", 2, *flags)
    assert done.code == 2
    assert f"{flags[0][2:]} is {flags[1]}" in done.err


def test_nothing_that_fits_is_said_so(run, model: Path) -> None:
    done = run("score", model, "--gpus", 2, "--hbm-gib", 0.001, "--ddr-gib", 0.001)
    assert done.code == 3, done.err
