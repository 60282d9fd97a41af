"""Loading profiles, and what a bad one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from predictor.errors import ProfileError
from predictor.hardware.loader import (
    DEFAULT_HARDWARE,
    list_hardware,
    load_hardware,
    parse_hardware,
)

SHIPPED = {"v100-32gb", "a100-40gb", "a100-80gb", "h100-sxm", "h200-sxm", "b200", "cpu-gloo"}


@pytest.fixture
def valid() -> dict[str, object]:
    """The default profile as its file holds it."""
    from importlib import resources

    file = resources.files("predictor.hardware") / "profiles" / f"{DEFAULT_HARDWARE}.yaml"
    data: dict[str, object] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return data


def complaint(data: object) -> str:
    with pytest.raises(ProfileError) as caught:
        parse_hardware(yaml.safe_dump(data, sort_keys=False), "mine.yaml")
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_all_shipped_profiles_are_listed() -> None:
    assert set(list_hardware()) >= SHIPPED


@pytest.mark.parametrize("name", list_hardware())
def test_every_profile_loads_under_its_own_name_with_sources(name: str) -> None:
    profile = load_hardware(name)
    assert profile.name == name
    for group in profile.groups.values():
        assert len(group.provenance.source) > 20
    assert profile.inline == (name == "cpu-gloo")
    assert profile.hbm_bytes > 5 * 2**30


def test_a_path_is_a_profile_too(tmp_path: Path, valid: dict[str, object]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(valid | {"name": "mine"}), encoding="utf-8")
    assert load_hardware(str(path)).name == "mine"


def test_unknown_name_lists_names_and_the_nearest() -> None:
    with pytest.raises(
        ProfileError, match=r"unknown hardware 'h100-smx' \(did you mean 'h100-sxm'"
    ):
        load_hardware("h100-smx")
    with pytest.raises(ProfileError, match="No such file"):
        load_hardware("nowhere/mine.yaml")


def test_a_profile_that_became_a_network_names_both() -> None:
    with pytest.raises(ProfileError) as error:
        load_hardware("h100-sxm-tcpx")
    assert "'h100-sxm'" in str(error.value)
    assert "'network: tcpx'" in str(error.value)


@pytest.mark.parametrize(
    ("alias", "profile"),
    [("h200", "h200-sxm"), ("H100 PCIe", "h100-pcie"), ("A100", "a100-80gb"), ("T4", "t4")],
)
def test_a_chip_may_be_named_as_people_do(alias: str, profile: str) -> None:
    assert load_hardware(alias).name == profile


def test_not_yaml_names_the_line() -> None:
    with pytest.raises(ProfileError, match=r"mine\.yaml:2"):
        parse_hardware("name: x\n  bad: [\n", "mine.yaml")
    for text in ("- 1\n", "", "name: x\nname: y\n"):
        with pytest.raises(ProfileError, match=r"mine\.yaml"):
            parse_hardware(text, "mine.yaml")


def test_unknown_key_names_line_key_and_nearest(valid: dict[str, object]) -> None:
    memory = dict(valid["memory"])  # type: ignore[call-overload]
    memory["hbm_gbs"] = memory.pop("hbm_gb_s")
    text = complaint(valid | {"memory": memory})
    (line,) = (line for line in text.splitlines() if "did you mean 'hbm_gb_s'" in line)
    assert "memory.hbm_gbs: unknown key" in line
    assert int(line.split("mine.yaml:")[1].split(":")[0]) > 5
    assert "memory.hbm_gb_s: missing" in text


@pytest.mark.parametrize("group", ["memory", "gemm", "embedding", "overheads", "collectives"])
def test_a_missing_group_is_named(valid: dict[str, object], group: str) -> None:
    data = {key: value for key, value in valid.items() if key != group}
    assert f"{group}: missing" in complaint(data)


def test_bad_value_shows_it_and_what_is_allowed(valid: dict[str, object]) -> None:
    text = complaint(valid | {"hbm_gib": -1})
    assert "hbm_gib: got -1: input should be greater than 0" in text
    embedding = dict(valid["embedding"])  # type: ignore[call-overload]
    assert "'fbgemm_cuda', 'distinct_rows'" in complaint(
        valid | {"embedding": embedding | {"law": "magic"}}
    )
    bad = embedding | {"forward_efficiency": 1.5}
    assert "embedding.forward_efficiency: got 1.5" in complaint(valid | {"embedding": bad})
    assert "execution: got 'gpu'" in complaint(valid | {"execution": "gpu"})


def test_ranges_rise_and_are_finite(valid: dict[str, object]) -> None:
    for bad, words in (([2, 1], "from 2 down to 1"), ([1, float("inf")], "finite"), ([1], "range")):
        data = yaml.safe_load(yaml.safe_dump(valid))
        data["gemm"]["provenance"]["range"] = {"m": bad}
        assert words in complaint(data)


def test_curve_bands_are_checked(valid: dict[str, object]) -> None:
    text = yaml.safe_dump(valid, sort_keys=False)
    data = yaml.safe_load(text)
    data["collectives"]["intra"]["all_reduce"]["edge_mib"] = [1, 2]
    assert "edge_mib must start at 0" in complaint(data)
    data = yaml.safe_load(text)
    data["collectives"]["intra"]["all_reduce"]["us_per_mib"] = [1]
    assert "one value per edge" in complaint(data)


def test_a_chip_on_another_host(tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text("base: h200-sxm\nhost: a100-80gb\n")
    joined, chip, host = (load_hardware(name) for name in (str(slow), "h200-sxm", "a100-80gb"))
    assert joined.overheads == host.overheads
    assert joined.gemm == chip.gemm
    assert joined.origins["overheads"] == host.origins["overheads"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("base: h100-sxm\nhost: nothing-like-it\n", "nothing-like-it"),
        ("base: h100-sxm\nhost: 3\n", "host is 3"),
        ("base: h100-sxm\nhost: b200\noverheads: {op_us: 3}\n", "host and overheads"),
    ],
)
def test_a_host_that_cannot_be_taken(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=named):
        load_hardware(str(path))
