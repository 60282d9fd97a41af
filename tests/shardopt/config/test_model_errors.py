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

FEATURE = "tables[0].features[0]"
CASES = [
    # (old, new, line, key, parts of the message)
    ("schema: 1", "schema: 2", 1, "schema", ["got 2", "write 'schema: 1'"]),
    ("schema: 1\n", "", 1, "schema", ["missing", "'schema: 1'"]),
    ("batch_size", "batchsize", 3, "batchsize", ["unknown key", "did you mean 'batch_size'?"]),
    ("8192", "0", 3, "batch_size", ["got 0", "at least 1"]),
    ("8192", "2.5", 3, "batch_size", ["got 2.5", "whole number"]),
    ("8192", "true", 3, "batch_size", ["got True", "whole number"]),
    ("8192", "1:30", 3, "batch_size", ["got '1:30'", "whole number"]),
    ("exact_row_wise", "rowwise", 4, "optimizer", ["allowed: sgd, ", "'exact_row_wise_adagrad'?"]),
    ("base", "sparse_dst", 5, "train_pipeline", ["allowed: base", "did you mean 'sparse_dist'?"]),
    ("forward: fp16", "forward: fp8", 6, "qcomm.forward", ["got 'fp8'", "fp32, fp16, bf16"]),
    *(
        ("base\n", f"base\nreplica_groups: {given}\n", 6, f"replica_groups{key}", parts)
        for given, key, parts in (
            ("4", "", ["size, sync_"]),
            ("{sync_interval: 1}", ".size", ["missing"]),
            ("{size: 0}", ".size", ["at least 1"]),
            ("{siz: 2}", ".siz", ["did you mean 'size"]),
            ("{modules: 2}", ".modules", ["not modelled"]),
            ("{size: 2, sharding_strategy: x}", ".sharding_strategy", ["default, fully_sharded"]),
            (
                "{size: 2, sync_interval: 2, sharding_strategy: fully_sharded}",
                "",
                ["every step"],
            ),
        )
    ),
    ("name: t_0", "name: 5", 8, "tables[0].name", ["got 5", 'in quotes: "5"']),
    ("name: t_0", "name: off", 8, "tables[0].name", ["quote"]),
    ("name: t_0", "name: a.b", 8, "tables[0].name", ["must not contain '.'"]),
    ("40_000_000", "-1", 9, "tables[0].num_embeddings", ["got -1", "at least 1"]),
    ("40_000_000", ".nan", 9, "tables[0].num_embeddings", ["got nan"]),
    ("40_000_000", "1e30", 9, "tables[0].num_embeddings", ["at most"]),
    ("_dim: 128", "_dim: 0", 10, "tables[0].embedding_dim", ["got 0", "at least 1"]),
    ("        pooling_factor: 3.0\n", "", 12, f"{FEATURE}.pooling_factor", ["missing"]),
    ("3.0", ".nan", 13, f"{FEATURE}.pooling_factor", ["got nan", "at least 0"]),
    ("3.0", "-1", 13, f"{FEATURE}.pooling_factor", ["got -1", "at least 0"]),
    ("3.0", "yes", 13, f"{FEATURE}.pooling_factor", ["got True"]),
    ("zipf:", "zpf:", 14, "index_distribution", ["allowed", "did you mean 'zipf'?"]),
    ("{zipf: {alpha: 1.05, q: 2}}", "uniforn", 14, "index_distribution", ["mean 'uniform'?"]),
    ("1.05", "-1", 14, "index_distribution.zipf.alpha", ["got -1", "at least 0"]),
    ("alpha:", "alfa:", 14, "zipf.alfa", ["unknown key", "did you mean 'alpha'?"]),
    ("q: 2", "q: -1", 14, "zipf.q", ["more than -1"]),
    ("frequency", "freq", 15, "id_order", ["allowed: random, frequency"]),
    ("table_wise", "tw", 16, "sharding_types[0]", ["did you mean 'table_wise'?", "grid_shard"]),
    ("[fused]", "[fuzed]", 16, "compute_kernels[0]", ["fused_uvm", "did you mean 'fused'?"]),
    ("[fused]", "fused", 16, "compute_kernels", ["must be a list", "write [fused]"]),
    ("[fused]", "[]", 16, "compute_kernels", ["empty list"]),
    ("ranks: [0, 1]", "ranks: [0, 0]", 16, "ranks", ["only once"]),
    ("ranks: [0, 1]", "ranks: [-1]", 16, "ranks[0]", ["at least 0"]),
    ("0.2", "1.5", 17, "cache_load_factor", ["got 1.5"]),
    ("min_partition: 32", "min_partitions: 32", 17, "constraints.min_partitions", ["unknown key"]),
    ("fp16\n    pooling", "int8\n    pooling", 22, "tables[1].data_type", ["fp32, fp16, bf16"]),
    ("pooling: none", "pooling: max", 23, "tables[1].pooling", ["allowed: sum, mean, none"]),
    ("pooling: none", "pooling: none\n    weighted: true", 24, "weighted", ["sum or mean"]),
    ("name: cat_2", "name: cat_1", 27, "name", ["duplicate feature 'cat_1'", "'seq'", ":26"]),
    ("fractions: [0.5, 0.5]", "fractions: [0]", 29, "fractions", ["0"]),
    ("in_features: 13", "in_features: -13", 31, "dense.in_features", ["got -13"]),
    ("[512, 128]", "[512, 64]", 32, "dense.bottom_mlp", ["64", "128"]),
    ("interaction: dot", "interaction: dotty", 33, "dense.interaction", ["dcn_v2", "'dot'?"]),
    ("interaction: dot", "interaction: {dcn: {}}", 33, "dense.interaction", ["mean 'dcn_v2'?"]),
    ("[512, 1]", "[512, 2]", 34, "dense.top_mlp", ["got [512, 2]"]),
    ("[512, 1]", "512", 34, "dense.top_mlp", ["must be a list", "write [512]"]),
    ("tf32", "fp16", 35, "dense.data_type", ["allowed: fp32, tf32, bf16"]),
    ("optimizer: adam\n", "optimizer: adamax\n", 24, "optimizer", ["did you mean 'adam'?"]),
    (
        "4e5\n    embedding_dim: 128",
        "4e5\n    embedding_dim: 64",
        33,
        "dense.interaction",
        ["'t_0' has 128 and 't_1' has 64"],
    ),
    ("name: small", "name: small\nname: other", 3, "name", ["appears twice, first on line 2"]),
    (
        "name: t_1\n    module: seq",
        "name: t_0\n    module: ebc",
        18,
        "tables[1].name",
        ["duplicate table 't_0' in module 'ebc'", "model.yaml:8"],
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "key", "parts"), CASES)
def test_one_problem(
    error_of: Callable[..., str], old: str, new: str, line: int, key: str, parts: list[str]
) -> None:
    message = error_of(old, new)
    matching = [m for m in message.splitlines() if re.search(rf"model\.yaml:{line}: ", m)]
    assert matching, message
    assert any(key in m and all(part in m for part in parts) for m in matching), message


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


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("{file: none.npz, feature: cat_0}", ["none.npz"]),
        ("{file: stats.npz, feature: cat_1}", ["no feature 'cat_1'", "did you mean 'cat_0'?"]),
        ("{file: stats.npz, feature: half}", ["half.weights is missing"]),
        ("{file: stats.npz, feature: odd}", ["odd"]),
        ("{file: stats.npz, feature: bare}", ["bare.range_width"]),
        ("{file: stats.npz, feature: long}", ["(2, 2)"]),
        ("{file: model.yaml, feature: cat_0}", ["model.yaml"]),
        ("{file: stats.npz, featur: cat_0}", ["unknown key", "did you mean 'feature'?"]),
    ],
)
def test_statistics_files(
    tmp_path: Path, error_of: Callable[..., str], spec: str, parts: list[str]
) -> None:
    ones = np.ones(2)
    arrays = {"cat_0.counts": ones, "cat_0.weights": ones, "half.counts": ones}
    arrays |= {"odd.counts": ones, "odd.weights": np.ones(3)}
    for name in ("bare", "long"):
        arrays |= {f"{name}.counts": ones, f"{name}.weights": ones}
        arrays[f"{name}.range_rows"] = np.ones((2, 2)) / 2
    arrays |= {"long.range_width": np.array(1), "long.rows": np.array(3)}
    np.savez(tmp_path / "stats.npz", **arrays)
    message = error_of("{zipf: {alpha: 1.05, q: 2}}", spec)
    assert "model.yaml:14: tables[0].features[0].index_distribution" in message
    for part in parts:
        assert part in message


def test_many_duplicate_keys_are_read_at_once_and_not_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("schema: 1\n" + "x: 1\n" * 40_000)
    with pytest.raises(InputError) as caught:
        load_model(path)
    lines = str(caught.value).split("\n")
    assert lines[0].endswith(" problems")
    assert len(lines) == 102
    assert re.fullmatch(r"  and 39[0-9]+ more", lines[-1])


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
    "wanted", ["tables: {csv: fifo}", "features: [{name: f, index_distribution: {file: fifo}}]"]
)
def test_a_fifo_that_a_model_names_is_refused_and_not_waited_for(
    tmp_path: Path, wanted: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    tables = wanted if wanted.startswith("tables") else f"tables:\n  - name: t\n    {wanted}"
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
