"""Lists of hosts in the forms of Slurm, MPI and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from shardopt.config.clusters.host_list import read_hosts


def read(folder: Path, text: str) -> list[tuple[str, int | None]]:
    path = folder / "hosts"
    path.write_text(text)
    return read_hosts(path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\n\n# b\nc # last\n", [("a", None), ("c", None)]),
        ("n[01-03,07]", [(f"n{i}", None) for i in ("01", "02", "03", "07")]),
        ("a[1-2]-ib,b9", [("a1-ib", None), ("a2-ib", None), ("b9", None)]),
        ("a slots=8\nb slots = 4 max_slots=9\n", [("a", 8), ("b", 4)]),
        ("a:2\nb:2", [("a", 2), ("b", 2)]),
        ("n[8-11]:4", [(f"n{i}", 4) for i in range(8, 12)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int | None]], tmp_path: Path) -> None:
    assert read(tmp_path, text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("a\nb c\n", "hosts:2: got 'b c'"),
        ("n[3-1]", "hosts:1: got the range '3-1'"),
        ("n[-1]", "got the range '-1'"),
        ("n[0-999999999]", "got the range '0-999999999'"),
        ("n[a]", "allowed in brackets: numbers and ranges"),
        ("a\na", "hosts:2: host 'a' is there twice"),
        ("n[1-70000]", "got the range '1-70000'"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


@given(st.text(alphabet="ab[]-,019 :=slot#\n", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        found = read(tmp_path_factory.mktemp("any"), text)
    except InputError:
        return
    assert found
    assert len({name for name, _ in found}) == len(found)
