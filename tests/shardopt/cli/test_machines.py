"""`shardopt plan` with several machines: one table, a plan for each."""

from pathlib import Path

import pytest

import shardopt.api.setting
from predictor.model.plan_json import load_plan

QUICK = ("--effort", 0.005, "--scenarios", "none")


def test_machines_are_compared_and_keep_their_plans(
    as_json, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again(*arguments: object, **options: object) -> None:
        raise AssertionError("the model is read twice")

    monkeypatch.setattr(shardopt.api.setting, "read_model", read_again)
    (tmp_path / "prices.yaml").write_text("a100-80gb: 2\nh100-sxm: 4\n")
    flags = ("--gpus", "2,1", "--hardware", "h100-sxm,a100-80gb", "--price", "prices.yaml")
    machines = as_json("plan", model, *flags, *QUICK, "-o", "plan.json")["machines"]
    names = [(machine["hardware"], machine["gpus"]) for machine in machines]
    assert names == [("h100-sxm", 2), ("h100-sxm", 1), ("a100-80gb", 2), ("a100-80gb", 1)]
    for machine in machines:
        plan = load_plan(tmp_path / f"plan.{machine['hardware']}.{machine['gpus']}.json")
        assert (plan.world_size, plan.meta["hardware"]) == (machine["gpus"], machine["hardware"])
        assert plan.meta["iteration_ms"] == machine["iteration_ms"]
        rate = 1e3 * 32768 / machine["iteration_ms"]
        assert machine["samples_per_s_per_gpu"] == pytest.approx(rate)
        assert machine["samples_per_s"] == pytest.approx(rate * machine["gpus"])
        price = {"h100-sxm": 4, "a100-80gb": 2}[machine["hardware"]]
        assert machine["price_per_million_samples"] == pytest.approx(1e6 * price / 3600 / rate)
        assert machine["gap"] >= 0
        assert machine["hbm_bytes"] > 0
        assert machine["bound_by"]


def test_a_machine_that_no_plan_fits_is_a_row(run, as_json, model: Path) -> None:
    model.write_text(model.read_text().replace("200000", "200000000"))
    flags = ("--gpus", "1,4", "--hbm-gib", 24, "--ddr-gib", 0)
    none, fits = as_json("plan", model, *flags, *QUICK)["machines"]
    assert (none["iteration_ms"], none["tables"]) == (None, None)
    assert none["no_plan"]
    assert fits["iteration_ms"] > 0
    shown = run("plan", model, *flags, *QUICK)
    assert (shown.code, shown.out.count("h100-sxm")) == (0, 3)
    both = ("--gpus", 1, "--hardware", "h100-sxm,a100-80gb")
    assert run("plan", model, *both, *flags[2:], *QUICK).code == 3


def test_a_machine_that_is_named_twice_is_planned_once(as_json, model: Path) -> None:
    flags = ("--gpus", "2,1,2", "--hardware", "a100-80gb,a100-80gb")
    machines = as_json("plan", model, *flags, *QUICK)["machines"]
    assert [(m["hardware"], m["gpus"]) for m in machines] == [("a100-80gb", 2), ("a100-80gb", 1)]
    alone = as_json("plan", model, "--gpus", "1,1", *flags[2:], *QUICK)
    assert (alone["hardware"], alone["world_size"]) == ("a100-80gb", 1)


@pytest.mark.parametrize("flags", [("--gpus", "1,2"), ("--gpus", 2, "--advice-only")])
def test_what_there_is_to_say_of_the_model_is_said_once(
    run, model: Path, flags: tuple[object, ...]
) -> None:
    model.write_text(model.read_text().replace(", index_distribution: uniform", ""))
    shown = run("plan", model, *flags, *QUICK)
    assert (shown.out + shown.err).count("index_distribution is missing") == 1


def test_help_has_the_usual_options_and_help_all_the_rest(run) -> None:
    first, complete = (run("plan", flag).out for flag in ("-h", "--help-all"))
    usual, every = (
        {line.split()[1] for line in text.splitlines() if line.startswith("│ --")}
        for text in (first, complete)
    )
    assert usual < every
    assert {"--gpus", "--hardware", "--json"} <= usual
    partners = {"--gpus": "--gpus-per-node", "--confirm": "--minutes", "--from": "--max-moves"}
    assert {*partners.values()} <= usual
    assert {"--seed", "--horizon", "--replay"} <= every - usual
