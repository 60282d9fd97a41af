"""Bad model files: file, line, key, what was given, what is allowed, the nearest name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from predictor.errors import InputError
from shardopt.config import load_model


def test_all_problems_come_in_one_message_in_file_order(
    write: Callable[[str], Path], good: str
) -> None:
    text = good.replace("8192", "0").replace("embedding_dim: 128", "embedding_dim: 0")
    path = write(text.replace("in_features", "in_feature"))
    with pytest.raises(InputError) as caught:
        load_model(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path}: 5 problems"
    assert [int(line.split(":")[1]) for line in lines] == [3, 10, 21, 30, 31]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["the file is empty"]),
        ("# nothing\n", ["the file is empty"]),
        ("- 1\n", ["model.yaml:1: got [1]", "schema: 1"]),
        ("schema: 1\na: [1\nb: 2\n", ["model.yaml:3:", "not YAML"]),
        ("schema: 1\n\tname: x\n", ["model.yaml:2:1: not YAML", "tabs"]),
        ("schema: 1\n---\nschema: 1\n", ["not YAML", "another document"]),
        ("schema: 1\na: &x [*x]\n", ["model.yaml:2", "aliases"]),
        ("schema: 1\na: *x\n", ["model.yaml:2", "undefined alias"]),
        ("schema: 1\na: !!python/object:os.system x\n", ["model.yaml:2", "YAML tag"]),
        ("schema: 1\n? [a]\n: 1\n", ["model.yaml:2", "key"]),
        ("a: " + "[" * 150_000, ["nested too deeply"]),
        ("a: " + "[" * 60 + "]" * 60, ["model.yaml:1", "nested too deeply"]),
        ("- " * 9000 + "a", ["nested too deeply"]),
        ("\n".join(" " * i + "a:" for i in range(400)), ["nested too deeply"]),
        ("schema: 1\nname: \x07\n", ["model.yaml", "not YAML"]),
        (
            "schema: 1\nbatch_size: 1\ntables: []\ndense: 3\n",
            ["tables: the list is empty", "got 3"],
        ),
        ("schema: 1\nbatch_size: 1\ntables: [3, {}]\ndense: {}\n", ["tables[0]: got 3"]),
        ("schema: 1\nbatch_size: 1\ntables: x\ndense: {}\n", ["tables: got 'x'", "csv"]),
    ],
)
def test_not_a_model(write: Callable[[str], Path], text: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_model(write(text))
    for part in parts:
        assert part in str(caught.value)


def test_unreadable_files(tmp_path: Path, write: Callable[[str], Path], good: str) -> None:
    write(good)
    with pytest.raises(InputError, match=r"did you mean 'model\.yaml'"):
        load_model(tmp_path / "modle.yaml")
    with pytest.raises(InputError, match="nowhere"):
        load_model(tmp_path / "nowhere" / "model.yaml")
    with pytest.raises(InputError, match="is a directory"):
        load_model(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"schema: 1\nname: caf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.yaml:2: .*0xe9"):
        load_model(tmp_path / "latin.yaml")


def test_many_duplicate_keys_are_read_at_once_and_not_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("schema: 1\n" + "x: 1\n" * 40_000)
    with pytest.raises(InputError) as caught:
        load_model(path)
    lines = str(caught.value).split("\n")
    assert lines[0].endswith(" problems")
    assert len(lines) < 10
    assert re.fullmatch(r"  and 39[0-9]+ more like these", lines[-1])


def test_a_key_that_is_wrong_in_every_table_is_told_three_times(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    table = "{name: t%d, num_embeddings: 9, embedding_dim: 8, features: [{name: f%d, ids: 2}]}"
    entries = "\n".join(f"  - {table % (i, i)}" for i in range(50))
    path.write_text(f"schema: 1\nname: m\nbatch_size: 8\ntables:\n{entries}\n")
    with pytest.raises(InputError) as caught:
        load_model(path)
    text = str(caught.value)
    assert text.count("].ids: unknown key") == 3
    assert "tables[2]" in text
    assert "tables[3]" not in text
    assert "empty list" not in text


@pytest.mark.parametrize("text", ["schema: [" + "a," * 600_000 + "]", "# c\n" * 600_000])
def test_a_text_of_more_values_than_any_model_is_not_parsed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"model\.yaml: .*500,000"):
        load_model(path)


def test_what_has_no_end_is_not_read_to_the_end() -> None:
    with pytest.raises(InputError, match=r"/dev/zero: .*256 MiB"):
        load_model(Path("/dev/zero"))


@pytest.mark.parametrize(
    "entry", ["tables: {csv: fifo}", "features: [{name: f, index_distribution: {file: fifo}}]"]
)
def test_a_fifo_that_a_model_names_is_refused_and_not_waited_for(
    tmp_path: Path, entry: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    tables = entry if entry.startswith("tables") else f"tables:\n  - name: t\n    {entry}"
    path = tmp_path / "model.yaml"
    path.write_text(f"schema: 1\n{tables}\n")
    with pytest.raises(InputError, match="fifo: is a FIFO or a device; give a regular"):
        load_model(path)


def test_a_stats_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "s.npz", **{"f.counts": np.zeros(2**24), "f.weights": [1.0]})
    path = tmp_path / "model.yaml"
    feature = "{name: f, pooling_factor: 1, index_distribution: {file: s.npz}}"
    path.write_text(f"schema: 1\ntables:\n  - name: t\n    features: [{feature}]\n")
    with pytest.raises(InputError, match=r"s\.npz"):
        load_model(path)
