"""Why tables of a plan are in host memory that nobody asked to be there."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.memory.ranks import UVM_KERNELS
from predictor.model.plan import ComputeKernel, ShardingPlan
from predictor.model.workload import Constraints
from predictor.units import format_bytes
from search.problem import Problem
from search.space.enumerate import enumerate_space
from search.space.filters import fits_alone

PLACING = ("sharding_types", "compute_kernels", "ranks", "min_partition", "co_locate")
"""Constraints that say where shards may lie, or how large they are."""


def host_memory_notes(problem: Problem, plan: ShardingPlan) -> tuple[str, ...]:
    """A sentence for each table that is in host memory as no device has room for its shards: what
    constraints keep it from device memory, or that nothing would."""
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
            given = "; ".join(f"{n}: {_shown(getattr(table.constraints, n))}" for n in named)
            notes.append(
                f"Table '{key}' ({size}) is {where}: its constraints ({given}) leave no device "
                "with room for it; without them it fits in device memory"
            )
        else:
            notes.append(f"Table '{key}' ({size}) is {where}: no device has room for its shards")
    return tuple(notes)


def _asks_for_host_memory(wants: Constraints) -> bool:
    """Its constraints allow no kernel of device memory."""
    return bool(wants.compute_kernels) and set(wants.compute_kernels) <= set(UVM_KERNELS)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
