"""Profile files that hold some groups and take the others from a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from predictor.errors import ProfileError
from predictor.hardware.loader import load_hardware, parse_hardware
from predictor.hardware.schema import GROUP_NAMES

H100 = load_hardware("h100-sxm")


def group(name: str, base: str = "h100-sxm") -> dict[str, Any]:
    return load_hardware(base).groups[name].model_dump(mode="json")


def write(path: Path, **data: Any) -> str:
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return str(path)


def complaint(path: str) -> str:
    with pytest.raises(ProfileError) as caught:
        load_hardware(path)
    return str(caught.value)


def test_groups_that_are_not_given_are_the_base_s(tmp_path: Path) -> None:
    products = group("gemm") | {"floor_us": 1.5}
    links = {"intra": group("collectives.intra") | {"rel_error": 0.5}}
    path = write(
        tmp_path / "mine.yaml", base="h100-sxm", hbm_gib=70, gemm=products, collectives=links
    )
    profile = load_hardware(path)
    assert (profile.name, profile.hbm_gib, profile.sms) == ("mine", 70, H100.sms)
    assert profile.gemm.floor_us == 1.5
    assert profile.collectives.intra.rel_error == 0.5
    for name in set(GROUP_NAMES) - {"gemm", "collectives.intra"}:
        assert profile.groups[name] == H100.groups[name]
    overlaid = {name for name, origin in profile.origins.items() if origin == path}
    assert overlaid == {"gemm", "collectives.intra"}
    assert set(profile.origins.values()) == {path, "h100-sxm"}


def test_a_partial_group_says_what_it_lacks(tmp_path: Path) -> None:
    partial = {k: v for k, v in group("gemm").items() if k not in ("floor_us", "tiles")}
    text = complaint(write(tmp_path / "mine.yaml", base="h100-sxm", gemm=partial))
    assert "gemm.tiles: missing" in text
    assert "gemm.floor_us: missing" in text
    assert "mine.yaml:2: " in text
    link = group("collectives.inter")
    del link["all_reduce"]["latency_us"]
    text = complaint(write(tmp_path / "m.yaml", base="h100-sxm", collectives={"inter": link}))
    assert "collectives.inter.all_reduce.latency_us: missing" in text


@pytest.mark.parametrize("empty", [None, [1], "x", 3])
@pytest.mark.parametrize("name", ["gemm", "collectives", "embedding"])
def test_a_group_that_is_no_mapping(tmp_path: Path, name: str, empty: object) -> None:
    text = complaint(write(tmp_path / "mine.yaml", **{"base": "h100-sxm", name: empty}))
    assert text.startswith(f"{tmp_path}/mine.yaml:2: {name}: ")


def test_bases_of_bases_and_paths_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    first = write(tmp_path / "first.yaml", base="h100-sxm", gemm=group("gemm") | {"split_k": 3})
    memory = group("memory") | {"hbm_gb_s": 1.0}
    profile = load_hardware(write(tmp_path / "sub" / "x.yaml", base="../first.yaml", memory=memory))
    assert (profile.gemm.split_k, profile.memory.hbm_gb_s) == (3, 1.0)
    assert Path(profile.origins["gemm"]).samefile(first)
    assert profile.origins["memory"].endswith("x.yaml")
    assert profile.origins["embedding"] == "h100-sxm"


def test_cycles_and_unknown_bases_say_where(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", base="b.yaml")
    write(tmp_path / "b.yaml", name="b", base="a.yaml")
    text = complaint(str(tmp_path / "a.yaml"))
    assert text.startswith(f"{tmp_path}/a.yaml:1: base: {tmp_path}/b.yaml:2: base: ")
    assert text.endswith("builds on itself: a.yaml -> b.yaml -> a.yaml")
    text = complaint(write(tmp_path / "c.yaml", base="h100-smx"))
    assert "c.yaml:1: base: unknown hardware 'h100-smx' (did you mean 'h100-sxm'?)" in text
    assert "No such file" in complaint(write(tmp_path / "c.yaml", base="none/x.yaml"))
    assert "Is a directory" in complaint(write(tmp_path / "c.yaml", base="../" + tmp_path.name))
    for base in (None, 3, ["h100-sxm"], ""):
        text = complaint(write(tmp_path / "c.yaml", base=base))
        assert "c.yaml:1: base is" in text


def test_lookups_of_another_kind_of_device(tmp_path: Path) -> None:
    lookups = group("embedding", "cpu-gloo")
    text = complaint(write(tmp_path / "mine.yaml", base="h100-sxm", embedding=lookups))
    assert "mine.yaml:2: embedding.law is distinct_rows, but execution is async" in text
    assert text.endswith("such as cpu-gloo")
    text = complaint(write(tmp_path / "mine.yaml", base="h100-sxm", execution="inline"))
    assert "mine.yaml:2: embedding.law is fbgemm_cuda, but execution is inline" in text
    full = yaml.safe_dump(H100.model_dump(mode="json", by_alias=True) | {"execution": "inline"})
    with pytest.raises(ProfileError, match=r"embedding.law is fbgemm_cuda, but execution is"):
        parse_hardware(full, "mine.yaml")


def test_a_partial_file_without_a_base_names_every_group_and_suggests_one(tmp_path: Path) -> None:
    links = {"intra": group("collectives.intra")}
    nonsense = {f"key{i}": i for i in range(20)}
    path = write(tmp_path / "mine.yaml", gemm=group("gemm"), collectives=links, **nonsense)
    text = complaint(path)
    for name in set(GROUP_NAMES) - {"gemm", "collectives.intra"}:
        assert f"{name}: missing" in text
    assert "gemm: missing" not in text
    assert "'base: h100-sxm'" in text
