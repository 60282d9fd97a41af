"""Model files written and read back."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.model.distribution import Empirical, ReuseHistogram, Uniform, Zipf
from predictor.model.plan import ShardingType
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import Constraints, DcnV2, DenseArch, Feature, QComm, Workload
from shardopt.config import load_model
from shardopt.config.write import model_text, with_digest, write_model
from tests.builders import a_table, a_workload, random_workload


def everything() -> Workload:
    features = (
        Feature("on", 1e-5, 2.0, Zipf(1.05, 2.7), "frequency"),
        Feature("g", 1 / 3, distribution=ReuseHistogram(100.0, (0.5, 0.25))),
        Feature("h", 2.0, distribution=Uniform()),
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
        dense=DenseArch(13, (64, 32), (64, 1), DcnV2(3, 16), "bf16", "adagrad"),
        train_pipeline="prefetch_sparse_dist",
        qcomm=QComm("fp16", "bf16"),
        replica_groups=ReplicaGroups(4, 10, use_inter_host_allreduce=True),
    )


@pytest.mark.parametrize("made", [everything(), *(random_workload(seed) for seed in range(5))])
def test_what_is_read_is_what_was_written(tmp_path: Path, made: Workload) -> None:
    path = tmp_path / "model.yaml"
    write_model(path, made)
    read = load_model(path)
    assert read == with_digest(made)
    assert replace(read, sha256="") == made
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model_text(read) == model_text(made), "the digest is no part of the file"


def test_measured_indices_are_refused() -> None:
    feature = Feature("f", 1.0, distribution=Empirical((1.0,), (1.0,)))
    with pytest.raises(InputError, match=r"feature 'f': Empirical.*copy the model file"):
        model_text(a_workload(a_table(features=(feature,))))
