"""`shardopt plan` with several machines: one table, a plan for each."""

from pathlib import Path

import pytest

import shardopt.api.setting
from predictor.model.plan_json import load_plan

QUICK = ("--effort", 0.005, "--scenarios", "none")


def test_machines_are_compared_and_keep_their_plans(
    as_json, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again(*given: object, **options: object) -> None:
        raise AssertionError("the model is read twice")

    monkeypatch.setattr(shardopt.api.setting, "read_model", read_again)
    (tmp_path / "prices.yaml").write_text("a100-80gb: 2\nh100-sxm: 4\n")
    flags = ("--gpus", "2,1", "--hardware", "h100-sxm,a100-80gb", "--price", "prices.yaml")
    found = as_json("plan", model, *flags, *QUICK, "-o", "plan.json")["machines"]
    names = [(one["hardware"], one["gpus"]) for one in found]
    assert names == [("h100-sxm", 2), ("h100-sxm", 1), ("a100-80gb", 2), ("a100-80gb", 1)]
    for one in found:
        plan = load_plan(tmp_path / f"plan.{one['hardware']}.{one['gpus']}.json")
        assert (plan.world_size, plan.meta["hardware"]) == (one["gpus"], one["hardware"])
        assert plan.meta["iteration_ms"] == one["iteration_ms"]
        rate = 1e3 * 32768 / one["iteration_ms"]
        assert one["samples_per_s_per_gpu"] == pytest.approx(rate)
        assert one["samples_per_s"] == pytest.approx(rate * one["gpus"])
        price = {"h100-sxm": 4, "a100-80gb": 2}[one["hardware"]]
        assert one["price_per_million_samples"] == pytest.approx(1e6 * price / 3600 / rate)
        assert one["gap"] >= 0
        assert one["hbm_bytes"] > 0
        assert one["bound_by"]


def test_a_machine_that_no_plan_fits_is_a_row(run, as_json, model: Path) -> None:
    model.write_text(model.read_text().replace("200000", "200000000"))
    flags = ("--gpus", "1,4", "--hbm-gib", 24, "--ddr-gib", 0)
    none, fits = as_json("plan", model, *flags, *QUICK)["machines"]
    assert (none["iteration_ms"], none["tables"]) == (None, None)
    assert none["no_plan"]
    assert fits["iteration_ms"] > 0
    shown = run("plan", model, *flags, *QUICK)
    assert (shown.code, shown.out.count("h100-sxm")) == (0, 3)
    assert run("plan", model, "--gpus", "1,1", *flags[2:], *QUICK).code == 3


@pytest.mark.parametrize("flags", [("--gpus", "1,2"), ("--gpus", 2, "--advice-only")])
def test_what_there_is_to_say_of_the_model_is_said_once(
    run, model: Path, flags: tuple[object, ...]
) -> None:
    model.write_text(model.read_text().replace(", index_distribution: uniform", ""))
    shown = run("plan", model, *flags, *QUICK)
    assert (shown.out + shown.err).count("index_distribution is missing") == 1


def test_help_has_the_usual_options_and_help_all_the_rest(run) -> None:
    first, whole = (run("plan", flag).out for flag in ("-h", "--help-all"))
    usual, every = (
        {line.split()[1] for line in text.splitlines() if line.startswith("│ --")}
        for text in (first, whole)
    )
    assert usual < every
    assert {"--gpus", "--hardware", "--json"} <= usual
    partners = {"--gpus": "--gpus-per-node", "--confirm": "--minutes", "--from": "--max-moves"}
    assert {*partners.values()} <= usual
    assert {"--seed", "--horizon", "--replay"} <= every - usual
