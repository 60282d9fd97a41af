"""Notes on tables in host memory: the reason, and the memory of their caches."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR, plan_sharing_bytes
from predictor.model.memory.ranks import UVM_KERNELS
from predictor.model.plan import ComputeKernel, ShardingPlan, TablePlan
from predictor.model.workload import Constraints
from predictor.units import MIB, format_bytes
from search.problem import Problem
from search.space.enumerate import enumerate_space
from search.space.filters import fits_alone

NAMED_BYTES = 256 * MIB
"""Bytes wasted on a rank by a cache of unlike tables from which a note mentions them."""
PLACING = ("sharding_types", "compute_kernels", "ranks", "min_partition", "co_locate")
"""Constraints that say where shards may lie, or how large they are."""


def memory_notes(problem: Problem, plan: ShardingPlan) -> tuple[str, ...]:
    """Return a sentence each on tables too large for devices, and on caches that waste memory."""
    return tuple(filter(None, (*_host_memory_notes(problem, plan), _cache_note(problem, plan))))


def _host_memory_notes(problem: Problem, plan: ShardingPlan) -> tuple[str, ...]:
    """Return a sentence for each table in host memory because no device has room for its shards.

    It names the constraints that keep the table from device memory, if dropping them would help.
    """
    workload, device = problem.workload, problem.hardware.device
    moved = [
        index
        for index, key in enumerate(workload.keys)
        if plan.tables[key].compute_kernel in UVM_KERNELS
        and not _asks_for_host_memory(workload.tables[index].constraints)
    ]
    if not moved:
        return ()
    free = tuple(
        replace(table, constraints=replace(table.constraints, **dict.fromkeys(PLACING)))
        for table in workload.tables
    )
    spaces = [
        enumerate_space(replace(workload, tables=tables), problem.topology, device).options
        for tables in (workload.tables, free)
    ]
    notes = []
    for index in moved:
        as_given, as_it_could = (
            any(
                o.compute_kernel not in UVM_KERNELS and fits_alone(o, problem.topology)
                for o in space[index]
            )
            for space in spaces
        )
        if as_given:
            continue
        table, key = workload.tables[index], workload.keys[index]
        used = plan.tables[key]
        where = "in host memory, without a cache"
        if used.compute_kernel is ComputeKernel.FUSED_UVM_CACHING:
            share = used.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR
            where = f"in host memory, behind a cache of {share:.2g} of its rows"
        size = format_bytes(table.weight_bytes)
        if as_it_could:
            named = [n for n in PLACING if getattr(table.constraints, n) is not None]
            listed = "; ".join(f"{n}: {_shown(getattr(table.constraints, n))}" for n in named)
            notes.append(
                f"Table '{key}' ({size}) is {where}: its constraints ({listed}) leave no device "
                "with room for it; without them it fits in device memory"
            )
        else:
            notes.append(f"Table '{key}' ({size}) is {where}: no device has room for its shards")
    return tuple(notes)


def _asks_for_host_memory(wants: Constraints) -> bool:
    """Return True if the constraints allow no kernel of device memory."""
    named = wants.compute_kernels or ()
    return bool(named) and set(named) <= set(UVM_KERNELS)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)


def _cache_note(problem: Problem, plan: ShardingPlan) -> str:
    """Return a note on cache memory wasted by tables of unlike width in one launch.

    It names the cost of a cache for every width; it is empty if little is wasted.
    """
    workload, device = problem.workload, problem.hardware.device
    more = {} if device == "cpu" else plan_sharing_bytes(workload, plan)
    apart = split_caches(plan)
    least = plan_sharing_bytes(workload, apart) if more else {}
    wasted = {rank: size - least[rank] for rank, size in more.items()}
    rank = max(wasted, key=wasted.__getitem__, default=0)
    if wasted.get(rank, 0) < NAMED_BYTES:
        return ""
    ms = problem.scorer.score([[apart.tables[key] for key in workload.keys]])[0]
    return (
        f"Cached tables of unlike width share launches, whose caches have rows as wide as the "
        f"widest: {format_bytes(wasted[rank])} on rank {rank} hold nothing. With a cache for every "
        f"width, which saves them, the plan takes {ms:.4g} ms: TorchRec "
        "gives tables a launch of their own where cache_params differ in reserved_memory (name "
        "the width there, in bytes), and under the prefetch_sparse_dist pipeline"
    )


def split_caches(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with a cache for every width.

    TorchRec groups tables by all parameters of a cache but its load factor
    (`_get_grouping_fused_params`). FBGEMM keeps ``reserved_memory`` bytes free only if the cache is
    larger than the free memory.
    """

    def split(table: TablePlan) -> TablePlan:
        if table.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
            return table
        width = float(max(shard.size[1] for shard in table.shards))
        params = table.parameters.get("cache_params") or {}
        named = {"load_factor": DEFAULT_CACHE_LOAD_FACTOR, **params, "reserved_memory": width}
        return replace(table, parameters={**table.parameters, "cache_params": named})

    return replace(plan, tables={key: split(table) for key, table in plan.tables.items()})
