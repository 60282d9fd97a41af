"""Tables that TorchRec runs as one fused lookup, and so with one cache of rows on the device.

TorchRec groups the tables of one module and sharding type by data type, pooling, kind of kernel,
and all fused parameters but the cache's load factor (`group_tables` in embedding_sharding.py).
Tables of unlike width share a launch, but for cached ones under a prefetch pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.workload import Table

LOAD_FACTOR = "load_factor"
NOT_FUSED = ("stats",)
"""Fields of TorchRec's `CacheParams` that only its planner reads."""


@dataclass(frozen=True, order=True)
class LookupGroup:
    """Tables that one fused lookup serves.

    ``cached_dim`` splits cached tables by dimension under a prefetch pipeline, as TorchRec's
    `EmbDimBucketer` does; it is 0 otherwise. ``hashed`` tables have a lookup of their own, and
    those of each ``store``, a kernel of key-value tables; so have tables whose weights are stashed
    (`_group_tables_per_rank` of TorchRec's embedding_sharding.py). ``parameters`` are what plans
    set of a launch.
    """

    module: str
    sharding_type: ShardingType
    data_type: str
    pooling: str
    weighted: bool
    optimizer: str
    fused: bool
    cached_dim: int = 0
    hashed: bool = False
    store: str = ""
    stashed: bool = False
    parameters: tuple[tuple[str, str], ...] = ()


def group_of(table: Table, plan: TablePlan, train_pipeline: str) -> LookupGroup:
    """The lookup group that a table joins under a plan."""
    kernel = plan.compute_kernel
    return LookupGroup(
        table.module,
        plan.sharding_type,
        table.data_type,
        table.pooling,
        table.weighted,
        table.optimizer,
        kernel is not ComputeKernel.DENSE,
        max(s.size[1] for s in plan.shards) if is_prefetched(plan, train_pipeline) else 0,
        kernel.is_hashed,
        str(kernel) if kernel.is_stored else "",
        is_stashed(table, kernel),
        _launch_parameters(plan),
    )


def is_prefetched(plan: TablePlan, train_pipeline: str) -> bool:
    """Return true if a table's rows are cached ahead of its lookup (`_prefetch_and_cached` in
    TorchRec's embedding_sharding.py)."""
    requested = bool((plan.parameters.get("cache_params") or {}).get("prefetch_pipeline"))
    return plan.compute_kernel.is_cached and (requested or train_pipeline == "prefetch_sparse_dist")


def is_stashed(table: Table, kernel: ComputeKernel) -> bool:
    """Return true if a table's weights are on the host between lookup and backward.

    UVM kernels keep their device memory (`stash_embedding_weights` in memory_stashing.py).
    """
    return table.stash_weights and kernel is ComputeKernel.FUSED


def _launch_parameters(plan: TablePlan) -> tuple[tuple[str, str], ...]:
    """Return the fused parameters that a plan sets for a table, by name
    (`add_params_from_parameter_sharding` in torchrec/distributed/utils.py)."""
    parameters = dict(plan.parameters)
    cache = parameters.pop("cache_params", None) or {}
    if not plan.compute_kernel.is_stored:
        parameters.pop("key_value_params", None)
    excluded = (LOAD_FACTOR, *NOT_FUSED)
    parameters.update(
        (f"cache {name}", value) for name, value in cache.items() if name not in excluded
    )
    return tuple(
        sorted((name, repr(value)) for name, value in parameters.items() if value is not None)
    )
