"""What a calibration is worth, and that users hear of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from predictor.fit.held_out import HeldOut
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import Verdict
from shardopt.api.setting import Machine, resolve
from shardopt.calibrate.accepted import Accepted
from shardopt.calibrate.design.points import Point
from shardopt.calibrate.profile.build import profile_text
from shardopt.calibrate.profile.builder import CalibratedProfile
from shardopt.calibrate.profile.verdict import judge
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.timing import Samples

MODEL = Path(__file__).parents[4] / "configs" / "models" / "dlrm_criteo_kaggle.yaml"
BASE = load_hardware("cpu-gloo")


def rows(count: int, family: str = "gemm", load: float = 1.0) -> list[Measurement]:
    found = [row_of_samples(Point(family, {"m": i}), Samples((1e-3,) * 3)) for i in range(count)]
    for row in found:
        row.__dict__["load"] = load
    return found


def errors(**by_family: float) -> dict[str, HeldOut]:
    return {name: HeldOut(np.full(4, error), 9) for name, error in by_family.items()}


GOOD = Accepted(rows(19) + rows(19, "collective", load=2.0), [], 0)
MINE, SHIPPED = errors(gemm=0.05, all_reduce=0.05), errors(gemm=0.1, all_reduce=0.1)


def test_nothing_stands_against_a_quiet_calibration() -> None:
    found = judge(GOOD, {"gemm": 0.03}, MINE, SHIPPED, 2)
    assert found == Verdict(quality="quiet")


@pytest.mark.parametrize(
    ("accepted", "drift", "why"),
    [
        (GOOD, 0.2, "reference gemm moved by 20%"),
        (Accepted(rows(18), rows(2), 2), 0.0, "2 of 20 rows of one rank were refused"),
        (
            Accepted(rows(19) + rows(9, "collective"), rows(1, "iteration"), 2),
            0.0,
            "1 of 10 rows of all ranks were refused",
        ),
        (
            Accepted(rows(19) + rows(9, "collective", load=3.1), [], 0),
            0.0,
            "load average of other work 1.1 while all ranks measured",
        ),
        (
            Accepted(rows(19, load=2.0), [], 0),
            0.0,
            "load average of other work 1.0 while one rank measured",
        ),
    ],
)
def test_a_doubt_makes_it_usable(accepted: Accepted, drift: float, why: str) -> None:
    found = judge(accepted, {"gemm": drift, "all_to_all": 0.0}, MINE, SHIPPED, 2)
    assert found == Verdict(quality="usable", why=(why,))


def test_a_larger_error_of_one_kind_makes_it_worse_whatever_the_other_is() -> None:
    mine = errors(gemm=0.01, all_reduce=0.2, host=0.9)
    found = judge(GOOD, {"gemm": 0.2}, mine, SHIPPED, 2)
    assert found.quality == "worse than the shipped one"
    assert found.why == (
        "held-out error of collectives 20.0%, of the shipped one 10.0%",
        "reference gemm moved by 20%",
    )


def test_a_profile_keeps_its_verdict_and_those_who_plan_with_it_hear_it(tmp_path: Path) -> None:
    told = {}
    for quality in ("quiet", "usable", "worse than the shipped one"):
        verdict = Verdict(quality=quality, why=("the cat sat on it",))
        made = CalibratedProfile(BASE.model_copy(update={"verdict": verdict, "name": "mine"}))
        path = tmp_path / "mine.yaml"
        for base in (None, "cpu-gloo"):
            path.write_text(profile_text(made, base))
            assert load_hardware(str(path)).verdict == verdict
        told[quality] = resolve(MODEL, Machine(gpus=2, hardware=str(path))).notes
    assert not any("calibration" in note for note in told["quiet"])
    for quality in ("usable", "worse than the shipped one"):
        (note,) = (note for note in told[quality] if "calibration" in note)
        assert f"hardware mine: its calibration is {quality} (the cat sat on it)" in note


def test_a_file_on_top_of_a_judged_profile_has_no_verdict(tmp_path: Path) -> None:
    verdict = Verdict(quality="usable")
    made = CalibratedProfile(BASE.model_copy(update={"verdict": verdict, "name": "mine"}))
    (tmp_path / "mine.yaml").write_text(profile_text(made))
    (tmp_path / "other.yaml").write_text("base: mine.yaml\n")
    assert load_hardware(str(tmp_path / "other.yaml")).verdict is None


def test_old_profiles_have_none() -> None:
    assert load_hardware("h100-sxm").verdict is None
