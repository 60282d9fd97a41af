"""Whatever is done to a profile file, it loads or raises ProfileError with its name."""

from __future__ import annotations

import copy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from predictor.errors import ProfileError
from predictor.hardware.loader import load_hardware

FULL = (resources.files("predictor.hardware") / "profiles" / "h100-sxm.yaml").read_text(
    encoding="utf-8"
)
GROUPS = yaml.safe_load(FULL)
OVERLAY: dict[str, Any] = {
    "schema": 1,
    "base": "h100-sxm",
    "name": "mine",
    "hbm_gib": 70,
    "gemm": GROUPS["gemm"],
    "collectives": {"inter": GROUPS["collectives"]["inter"]},
}
OVERLAY_TEXT = yaml.safe_dump(OVERLAY, sort_keys=False)
VALUES = st.sampled_from(
    [
        *(None, "", "x", 0, -1, 10**400, 0.5, float("nan"), float("inf"), True, [], {}, [1], [[]]),
        *("h100-sxm", "cpu-gloo", "mine.yaml", "a\0b", "x" * 5000, ".", "distinct_rows", {1: 2}),
        *("2000-13-45", "1e6", {"law": "distinct_rows"}, {"kind": "measured"}, [0, 1, 1]),
    ]
)
PIECES = st.sampled_from(
    [
        *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\t", b": ", b"- ", b"&a [*a]", b"*a", b"<<: "),
        *(b"{", b"]", b"? [1]\n: 2\n", b"2000-13-45", b"0b_", b"[" * 2000, b"\n---\n", b"'", b'"'),
        *(b"!!python/object:os.system {}", b"|\n", b"%YAML 9\n", b"\r", "\u2028".encode()),
        *(b"1:99", b"base: x\n"),
    ]
)


def loads_or_explains(path: Path) -> None:
    try:
        profile = load_hardware(str(path))
    except ProfileError as error:
        message = str(error)
    else:
        assert len(profile.groups) == 7
        return
    assert path.name in message


def containers(data: Any) -> list[Any]:
    found = [data] if isinstance(data, dict | list) else []
    for value in data.values() if isinstance(data, dict) else data if found else []:
        found += containers(value)
    return found


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any]) -> str:
    """The file after up to four keys were taken out, replaced, renamed or copied."""
    data = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.sampled_from([c for c in containers(data) if c]))
        key = draw(st.sampled_from(sorted(where, key=repr) if isinstance(where, dict) else [0]))
        kind = draw(st.sampled_from(["delete", "replace", "rename"]))
        if kind == "delete":
            del where[key]
        elif kind == "replace" or isinstance(where, list):
            where[key] = copy.deepcopy(draw(VALUES))
        else:
            new = draw(st.sampled_from(["base", "law", "provenance", "range", "intra", "", "1"]))
            where[new] = where.pop(key)
        if not data:
            break
    return yaml.safe_dump(data, sort_keys=False)


@st.composite
def damaged(draw: st.DrawFn, good: str) -> bytes:
    """The bytes of the file after up to three of its stretches were replaced."""
    data = good.encode()
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 30)))
        data = data[:start] + draw(PIECES | st.binary(max_size=3)) + data[end:]
    return data


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
@given(text=changed(OVERLAY) | changed(GROUPS))
@example(text="base: mine.yaml\n")
@example(text="base: h100-sxm\ngemm:\ncollectives: []\nembedding: 3\n")
@example(text="base: h100-sxm\nmemory: 2000-13-45\n")
def test_other_values(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    loads_or_explains(path)


@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
@given(data=damaged(OVERLAY_TEXT) | damaged(FULL))
@example(data=b"")
@example(data=b"a: &a [*a]\n")
@example(data=("a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(9))).encode())
def test_other_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    loads_or_explains(path)


@pytest.mark.parametrize(
    "tiles", [f"[[{10**59}, 128]]", "[[0, 128]]", "[[-1, 128]]", f"[[128, {2**31 + 1}]]"]
)
def test_sizes_have_bounds(tmp_path: Path, tiles: str) -> None:
    data = {**OVERLAY, "gemm": {**GROUPS["gemm"], "tiles": yaml.safe_load(tiles)}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ProfileError, match=r"gemm\.tiles"):
        load_hardware(str(path))
