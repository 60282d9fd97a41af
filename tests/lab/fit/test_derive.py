"""Derived profiles: the shipped files are what the rules give."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources
from pathlib import Path

import pytest

from lab.cli import main
from lab.fit.cards import CARDS, read_card
from lab.fit.derive import SWITCH_CARDS, derive, text_of
from predictor.cost.gemm import gemm_ms
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware, parse_hardware

NAMES = [card.name for card in CARDS]


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_the_shipped_file_is_what_the_rules_give(card) -> None:  # type: ignore[no-untyped-def]
    shipped = resources.files("predictor.hardware") / "profiles" / f"{card.name}.yaml"
    assert parse_hardware(text_of(card), card.name) == load_hardware(card.name), (
        f"run: python -m lab fit derive predictor/hardware/profiles ({shipped})"
    )


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_every_group_has_the_provenance_of_itsread_card(card) -> None:  # type: ignore[no-untyped-def]
    profile = load_hardware(card.name)
    assert {profile.group_kind(name) for name in profile.groups} == {card.kind}
    assert derive(card)["memory"]["hbm_gb_s"] < card.peak_gb_s


@pytest.mark.parametrize("key", ["sms", "sm"])
def test_a_card_that_lacks_a_key_or_has_an_unknown_one_is_named(key: str) -> None:
    keys = asdict(CARDS[0])
    wrong = {k: v for k, v in keys.items() if k != key} if key in keys else keys | {key: 1}
    with pytest.raises(InputError, match=f"{CARDS[0].name}.*'{key}'"):
        read_card(wrong)


def test_eight_cards_share_two_uplinks_in_an_all_to_all() -> None:
    curve = load_hardware("l40s").collectives.intra.all_to_all
    assert curve.rank_cost[SWITCH_CARDS] == 1
    assert curve.rank_cost[8] == pytest.approx(16 / 7)
    assert not load_hardware("l40s").collectives.intra.all_reduce.rank_cost


def test_wide_results_slow_a_p100_and_never_speed_it_up() -> None:
    hw = load_hardware("p100-pcie-16gb")
    times = [gemm_ms(hw, 4096, n, 1024, "fp32") for n in (4096, 16384, 40960, 65536)]
    assert times == sorted(times)
    assert times[2] / times[0] > 15
    assert load_hardware("a100-40gb").gemm.wide_cost == 0


def test_profiles_are_written_where_asked(tmp_path: Path) -> None:
    assert main(["fit", "derive", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == set(NAMES)
    unchanged, changed = tmp_path / "a30.yaml", tmp_path / "l4.yaml"
    unchanged.write_text(f"# a note of mine\n{unchanged.read_text()}")
    changed.write_text(changed.read_text().replace("sms: 58", "sms: 57"))
    assert main(["fit", "derive", str(tmp_path)]) == 0
    assert unchanged.read_text().startswith("# a note of mine")
    assert "sms: 58" in changed.read_text()
    assert main(["fit", "derive", str(tmp_path / "none")]) == 2
    assert main(["fit", "derive"]) == 2
    assert main(["fit", "deriv"]) == 2
