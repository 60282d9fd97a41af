"""All that is not public in TorchRec, and in PyTorch's process groups, and that shardopt touches.

`TOUCHED` lists it, with what `ShardoptPlanner` and `CpuCollection` use of the classes that they
extend; tests look for each name in the installed version, and for private names anywhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints, StorageReservation
    from torchrec.distributed.planner.utils import bytes_to_gb


class Private(NamedTuple):
    """Names that are not public, and the source that has them.

    Args:
        source: full name of a module or class.
        since: the first version of TorchRec that has them, of those that shardopt works with.
    """

    source: str
    names: tuple[str, ...]
    since: str = "1.7"


_PLANNER = "torchrec.distributed.planner"
TOUCHED = (
    Private(
        f"{_PLANNER}.planners",
        (
            *("_batch_size", "_callbacks", "_constraints", "_enumerator", "_partitioner"),
            *("_perf_model", "_proposers", "_stats", "_storage_reservation"),
            *("_timeout_seconds", "_topology"),
        ),
    ),
    Private(f"{_PLANNER}.enumerators.EmbeddingEnumerator", ("_constraints", "_estimators")),
    Private(f"{_PLANNER}.shard_estimators.EmbeddingStorageEstimator", ("_pipeline_type",)),
    Private(f"{_PLANNER}.storage_reservations", ("_hbm_reserved_bytes", "_percentage")),
    Private(f"{_PLANNER}.provider.DefaultPlannerProvider", ("_build_storage_estimator",), "1.9"),
    Private("torchrec.modules.fp_embedding_modules", ("_embedding_bag_collection",)),
    Private("torchrec.modules.fp_embedding_modules", ("_feature_processors",)),
    Private("torchrec.modules.mc_embedding_modules", ("_embedding_module",)),
    Private("torchrec.modules.mc_embedding_modules", ("_managed_collision_collection",)),
    Private("torchrec.modules.pec_embedding_modules", ("_embedding_collection",)),
    Private("torchrec.distributed.mc_embedding_modules", ("_e_sharder",)),
    Private("torchrec.distributed.pec_embedding", ("_embedding_collection_sharder",)),
    Private("torchrec.distributed.embedding", ("_use_index_dedup",)),
    Private("torchrec.distributed.embeddingbag", ("_has_features_permute",)),
    Private("torchrec.distributed.embeddingbag", ("_optimizer_classes", "_optimizer_kwargs")),
    Private("torchrec.distributed.model_parallel", ("_dmp_wrapped_module",)),
    Private(
        "torchrec.distributed.model_parallel.DMPCollection",
        ("_default_ctx", "_remap_sharding_plan"),
    ),
    Private("torchrec.distributed.sharding.dynamic_sharding", ("_generate_tag",), "1.8"),
)

WRAPPED = ("_embedding_bag_collection", "_embedding_module", "_embedding_collection")
"""Attributes in which modules that TorchRec shards as a whole hold the child with the tables."""


def wrapped(module: Any) -> Any:
    """The collection in a module that TorchRec shards as a whole; else the module itself."""
    for attribute in WRAPPED:
        module = getattr(module, attribute, module)
    return module


def feature_processors(module: Any) -> Any:
    """Return the processors of a module, or of their wrapper; None if there are none."""
    return getattr(module, "_feature_processors", None)


def remaps_ids(module: Any) -> bool:
    """Tell if managed collisions remap a module's ids."""
    return hasattr(module, "_managed_collision_collection")


def deduplicates_ids(sharder: Any) -> bool:
    """Tell if a sharder sends distinct ids only."""
    # the sharder of a wrapper, such as managed collisions, has that of its collection
    for attribute in ("_e_sharder", "_embedding_collection_sharder"):
        sharder = getattr(sharder, attribute, sharder)
    return bool(getattr(sharder, "_use_index_dedup", False))


def optimizers_in_backward(parameter: Any) -> list[Any]:
    """Classes of the optimizers that `apply_optimizer_in_backward` gave a parameter."""
    return list(getattr(parameter, "_optimizer_classes", None) or ())


def keep_optimizers(parameter: Any, other: Any) -> None:
    """Give another parameter the optimizers that `apply_optimizer_in_backward` gave this one."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(parameter, name):
            # TorchRec writes into the settings as it shards
            setattr(other, name, copy.deepcopy(getattr(parameter, name)))


def constraints_of(enumerator: Any) -> Mapping[str, ParameterConstraints]:
    """Return the constraints of an enumerator; custom ones may have none."""
    return getattr(enumerator, "_constraints", None) or {}


PIPELINES = {
    "train_base": "base",
    "train_sparse_dist": "sparse_dist",
    "train_prefetch_sparse_dist": "prefetch_sparse_dist",
}
"""Train pipelines by the value of TorchRec's `PipelineType`; ``none`` says nothing."""


def pipeline_of(enumerator: Any) -> str | None:
    """Return the train pipeline that a storage estimator of an enumerator names; None if none."""
    named = [getattr(e, "_pipeline_type", None) for e in getattr(enumerator, "_estimators", ())]
    return next(
        (
            PIPELINES[pipeline.value]
            for pipeline in named
            if pipeline and pipeline.value in PIPELINES
        ),
        None,
    )


def describe_reservation(reservation: StorageReservation) -> str:
    """Describe a reservation in the words of TorchRec's own message where no plan fits."""
    fixed = getattr(reservation, "_hbm_reserved_bytes", None)
    if fixed is not None:
        return f"Storage reservation: {round(bytes_to_gb(fixed), 3)} GB per device"
    share = getattr(reservation, "_percentage", None)
    name = type(reservation).__name__
    return name if share is None else f"Storage reservation percentage: {share}"


def timeout_of_cpus(group: Any) -> Any:
    """A `timedelta`, after which a group's backend for CPUs gives up."""
    return group._get_backend(torch.device("cpu")).options._timeout


def shortest_timeout_s(group: Any) -> float | None:
    """After which a group gives up a rank; None if its backends do not tell."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return float(min(backend.options._timeout.total_seconds() for backend in backends))
    except (AttributeError, RuntimeError, ValueError):  # a backend without options
        return None


def dense_part_of(dmp: Any) -> Any:
    """Return the wrapper that a `DistributedModelParallel` has around its module."""
    return dmp._dmp_wrapped_module


def permute_features(sharded: Any) -> None:
    """Let a sharded module put its ids in order by name, whatever the order of its tables."""
    sharded._has_features_permute = True


@contextmanager
def messages_through(tag: Any, sender: Any) -> Iterator[None]:
    """While it lasts, TorchRec's reshard tags its messages and sends them by these.

    Args:
        tag: makes a number of whatever TorchRec makes tags of.
        sender: stands for `torch.distributed`.
    """
    from torchrec.distributed.sharding import dynamic_sharding

    if not hasattr(dynamic_sharding, "_generate_tag"):
        yield
        return
    theirs = dynamic_sharding._generate_tag, dynamic_sharding.dist
    dynamic_sharding._generate_tag, dynamic_sharding.dist = tag, sender
    try:
        yield
    finally:
        dynamic_sharding._generate_tag, dynamic_sharding.dist = theirs


def copies_of(collection: Any) -> Any:
    """The process group of the copies in a `DMPCollection`."""
    return collection._default_ctx.replica_pg
