"""Model files written and read back; copies in which values change, and no other text."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from predictor.errors import InputError
from predictor.model.dense_settings import LengthShares
from predictor.model.distribution import Empirical, ReuseHistogram, Uniform, Zipf
from predictor.model.plan import ShardingType
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import (
    Constraints,
    DcnV2,
    DenseArch,
    DenseTimes,
    Feature,
    MeasuredDense,
    QComm,
    Workload,
)
from shardopt.config import load_model
from shardopt.config.write import (
    ALL_UNIFORM,
    SOME_UNIFORM,
    fill_model,
    model_text,
    with_digest,
    write_model,
)
from tests.builders import a_table, a_workload, random_workload


def everything() -> Workload:
    features = (
        Feature("on", 1e-5, 2.0, Zipf(1.05, 2.7), "frequency"),
        Feature("g", 1 / 3, distribution=ReuseHistogram(100.0, (0.5, 0.25))),
        Feature(
            "h",
            2.0,
            distribution=Uniform(),
            pooling_factor_std=1.5,
            pooling_factor_max=8.0,
            length_correlation=0.25,
        ),
    )
    constraints = Constraints(
        sharding_types=(ShardingType.TABLE_WISE, ShardingType.ROW_WISE),
        compute_kernels=("fused",),
        min_partition=32,
        cache_load_factor=0.2,
        enforce_hbm=False,
        ranks=(0, 1),
        co_locate="yes",
    )
    tables = (
        a_table("null", features=features, constraints=constraints, pooling="mean"),
        a_table("other", data_type="fp16", optimizer="adam", weighted=True, module="w"),
    )
    return a_workload(
        *tables,
        dense=DenseArch(
            *(13, (64, 32), (64, 1), DcnV2(3, 16), "bf16", "adagrad"),
            length_shares=LengthShares(0.1, 0.2),
        ),
        balance_batches=True,
        train_pipeline="prefetch_sparse_dist",
        qcomm=QComm("fp16", "bf16"),
        replica_groups=ReplicaGroups(4, 10, use_inter_host_allreduce=True),
    )


def unusual() -> list[Workload]:
    """Dense parts by their times; sequences, in hash tables and in others."""
    longer = (Feature("ids", 50.0, pooling_factor_std=75.0),)
    times = DenseTimes(512, 1.5, 2.5, 0.25, 3.0)
    ids = {"features": longer, "module": "ec", "pooling": "none"}
    return [
        a_workload(dense=MeasuredDense(times, 13, "adagrad", bucket_cap_mb=50.0)),
        a_workload(dense=MeasuredDense(replace(times, activation_gib=3.0))),
        a_workload(a_table(index_dedup=True, **ids)),
        a_workload(a_table(storage="dynamicemb", stash_weights=True, **ids)),
    ]


@pytest.mark.parametrize(
    "workload", [everything(), *unusual(), *(random_workload(seed) for seed in range(5))]
)
def test_what_is_read_is_what_was_written(tmp_path: Path, workload: Workload) -> None:
    path = tmp_path / "model.yaml"
    write_model(path, workload)
    read = load_model(path)
    assert read == with_digest(workload)
    assert replace(read, sha256="") == workload
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model_text(read) == model_text(workload), "the digest is no part of the file"


def test_measured_indices_are_refused() -> None:
    feature = Feature("f", 1.0, distribution=Empirical((1.0,), (1.0,)))
    with pytest.raises(InputError, match=r"feature 'f': Empirical"):
        model_text(a_workload(a_table(features=(feature,))))


TEXT = """# a comment
name: m
tables:
  - name: a   # of users
    features:
      - {name: x, pooling_factor: 3, index_distribution: {zipf: {alpha: 1.1}}, id_order: random}
      - name: y
        pooling_factor: 2  # guessed
        index_distribution:
          zipf:
            alpha: 1.2
        # the end of y
      - name: z  # has no values
  - {name: b, features: [{name: w}, {name: v, index_distribution: {file: old.npz}}]}
dense: {in_features: 13}
"""
NEW = {"pooling_factor": 1.5, "index_distribution": {"file": "s.npz", "feature": "x"}}


def fill(*names: str) -> str:
    values = {name: NEW for name in names}
    return fill_model(TEXT, values, Path("/m/model.yaml"), Path("/m/sub/copy.yaml"))


def test_values_change_and_comments_on_others_stay() -> None:
    text = fill("x", "y", "z", "w")
    tables = yaml.safe_load(text)["tables"]
    for feature in (*tables[0]["features"], tables[1]["features"][0]):
        assert feature.items() >= NEW.items(), feature
    assert tables[0]["features"][0]["id_order"] == "random"
    for comment in ("# a comment", "# of users", "# the end of y", "# has no values"):
        assert comment in text
    assert "# guessed" not in text
    assert text.endswith("dense: {in_features: 13}\n")


def test_the_note_on_uniform_features_is_of_those_that_are() -> None:
    text = f"# made\n#   {ALL_UNIFORM}\n{TEXT}"
    paths = Path("/m/model.yaml"), Path("/m/copy.yaml")
    partly, all_filled = (fill_model(text, dict.fromkeys(n, NEW), *paths) for n in ("xy", "xyzwv"))
    assert f"# made\n#   {SOME_UNIFORM}\n# a comment" in partly
    assert all_filled.startswith("# made\n# a comment")
    assert fill_model(text, {}, *paths) == text


def test_other_files_are_named_from_the_copy() -> None:
    assert yaml.safe_load(fill())["tables"][1]["features"][1] == {
        "name": "v",
        "index_distribution": {"file": "../old.npz"},
    }
    assert fill().replace("../old.npz", "old.npz") == TEXT


def test_tables_of_a_csv_file_are_not_copied() -> None:
    with pytest.raises(InputError, match=r"m\.yaml.*CSV"):
        fill_model("tables: {csv: t.csv}", {}, Path("m.yaml"), Path("c.yaml"))
