"""Train pipelines of TorchRec: which one is predicted, and what is said to be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed import train_pipeline
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.train_pipeline import experimental_pipelines, train_pipelines
from torchrec.distributed.types import PipelineType

from predictor.errors import InputError
from predictor.model.workload import PIPELINES
from shardopt.config import load_model
from shardopt.torchrec import to_yaml
from shardopt.torchrec.pipelines import KNOWN, priced_as
from tests.shardopt.torchrec.hook_models import Model, bag, factors, planner, problem_of, topology


class Mine(train_pipeline.TrainPipelineSparseDist[Any, Any]):
    """A user's."""


PRICED = (
    train_pipelines.TrainPipelineBase,
    train_pipelines.TrainPipelineSparseDist,
    train_pipelines.PrefetchTrainPipelineSparseDist,
    train_pipelines.TrainPipelineSemiSync,
)


@pytest.mark.parametrize(("name", "kind"), [*zip(PIPELINES, PRICED, strict=True)])
def test_what_is_priced_leaves_nothing_out(name: str, kind: type) -> None:
    assert priced_as(name) == priced_as(kind) == (name, "", "")


def test_every_train_pipeline_of_the_installed_version_is_known() -> None:
    """One that a new version brings must be looked at."""
    for room in (train_pipelines, experimental_pipelines):
        for name, kind in vars(room).items():
            trains = isinstance(kind, type) and issubclass(kind, train_pipelines.TrainPipeline)
            if trains and kind is not train_pipelines.TrainPipeline and "Eval" not in name:
                assert kind.__name__ in KNOWN
                assert priced_as(kind) == KNOWN[kind.__name__]


@pytest.mark.parametrize("pipeline", ["TrainPipelineSparseDist", Mine])
def test_a_planner_predicts_the_pipeline_of_the_script(
    pipeline: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hook = planner(train_pipeline=pipeline)
    assert problem_of(hook, Model()).workload.train_pipeline == "sparse_dist"
    assert ("Mine" in caplog.text) == (pipeline is Mine), "what it changes is not known"


def test_the_storage_estimator_was_told_the_pipeline() -> None:
    ranks, constraints = topology(), factors(a=20.0, b=2.0)
    sees = EmbeddingStorageEstimator(
        ranks, constraints, pipeline_type=PipelineType.TRAIN_PREFETCH_SPARSE_DIST
    )
    estimators = [EmbeddingPerfEstimator(ranks, constraints), sees]
    enumerator = EmbeddingEnumerator(ranks, 512, constraints, estimator=estimators)
    hook = planner(topology=ranks, enumerator=enumerator)
    assert problem_of(hook, Model()).workload.train_pipeline == "prefetch_sparse_dist"
    assert problem_of(planner(), Model()).workload.train_pipeline == "base"


def test_a_model_file_says_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    arguments = {"batch_size": 64, "default_pooling_factor": 1.0}
    workload = to_yaml(Model(), path, train_pipeline="TrainPipelineSparseDistLite", **arguments)
    assert workload.train_pipeline == "base"
    assert "in one exchange" in " ".join(path.read_text().split("\n# "))
    workload = to_yaml(
        Model(), path, train_pipeline=train_pipelines.TrainPipelineSemiSync, **arguments
    )
    assert workload == load_model(path)
    assert workload.train_pipeline == "semi_sync"


@pytest.mark.parametrize("pipeline", ["TrainPipelineSparseDistEmbStash", "base"])
def test_weights_are_stashed_where_table_and_pipeline_say_so(
    pipeline: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = bag("a", 1000)
    model = Model(config, bag("b"))
    config.stash_weights = True
    tables = problem_of(planner(train_pipeline=pipeline), model).workload.tables
    assert [table.stash_weights for table in tables] == [pipeline != "base", False]
    assert ("'a' have stash_weights" in caplog.text) == (pipeline == "base")
    arguments = {"batch_size": 64, "default_pooling_factor": 1.0, "train_pipeline": pipeline}
    written = to_yaml(model, tmp_path / "m.yaml", **arguments)
    assert load_model(tmp_path / "m.yaml") == written
    again = problem_of(planner(model=tmp_path / "m.yaml", constraints=None), model).workload
    assert [t.stash_weights for t in again.tables] == [t.stash_weights for t in tables]


def test_tables_that_a_script_selects_are_stashed_whatever_their_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`set_stashed_tables` of TorchRec 1.9, which its runtime asks before the config."""
    monkeypatch.setattr(
        MemoryStashingManager,
        "resolve_stash_weights",
        lambda name, config: name == "b",
        raising=False,
    )
    config = bag("a", 1000)
    model = Model(config, bag("b"))
    config.stash_weights = True
    stashing = planner(train_pipeline="TrainPipelineSparseDistEmbStash")
    tables = problem_of(stashing, model).workload.tables
    assert [table.stash_weights for table in tables] == [False, True]


def test_states_of_the_dense_optimizer_are_stashed(tmp_path: Path) -> None:
    pipeline = "TrainPipelineSparseDistOptStash"
    assert problem_of(planner(train_pipeline=pipeline), Model()).workload.stash_optimizer_state
    arguments = {"batch_size": 64, "default_pooling_factor": 1.0, "train_pipeline": pipeline}
    to_yaml(Model(), tmp_path / "m.yaml", **arguments)
    assert load_model(tmp_path / "m.yaml").stash_optimizer_state


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(InputError, match="TrainPipelineSparseDist"):
        planner(train_pipeline="TrainPipelineSparseDst")
    with pytest.raises(InputError, match="int"):
        planner(train_pipeline=3)
