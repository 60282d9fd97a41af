"""The knobs: what a plan cannot express, and what turning them does to the case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from predictor.model.memory import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import ComputeKernel
from predictor.model.topology import ReplicaGroups, Topology
from predictor.model.workload import Table
from search.space.enumerate import LANE, MIN_WIDTH
from search.tune.case import Case, Knob, Value

PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist")
PRECISIONS = ("fp32", "fp16", "bf16")
MAX_RANKS = 1 << 16
"""More ranks than this are not tried."""
NO_CACHE = "no table may be fused_uvm_caching"


class BatchSize(Knob):
    """Samples per rank and iteration."""

    name = "batch_size"
    changes_loads = True
    allowed = "samples per rank, whole numbers of at least 1"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        now = case.workload.batch_size
        return tuple(sorted({max(1, now // 4), max(1, now // 2), now, 2 * now, 4 * now}))

    def current(self, case: Case, parameter: str) -> Value:
        return case.workload.batch_size

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(batch_size=value)

    def fault(self, case: Case, value: Any) -> str:
        return "" if 1 <= value <= 2**40 else "it must be at least 1"


class Pipeline(Knob):
    """TorchRec's train pipeline.

    Only a UVM cache is prefetched, and on a stream of its own
    (`PrefetchTrainPipelineSparseDist` in train_pipelines.py).
    """

    name = "pipeline"
    changes_loads = True
    kind = str
    allowed = ", ".join(PIPELINES)
    ordered = False

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return tuple(p for p in PIPELINES if not self.fault(case, p))

    def current(self, case: Case, parameter: str) -> Value:
        return case.workload.train_pipeline

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(train_pipeline=value)

    def fault(self, case: Case, value: Any) -> str:
        if value not in PIPELINES:
            return f"allowed are {self.allowed}"
        if value == "prefetch_sparse_dist" and not _cached_tables(case):
            return f"{NO_CACHE}, so there is nothing to prefetch"
        return ""


class QComm(Knob):
    """Precision of pooled embeddings and their gradients on the wire, each way on its own."""

    name = "qcomm"
    kind = str
    allowed = ", ".join(PRECISIONS)
    ordered = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("qcomm_forward", "qcomm_backward")

    def effect(self, value: Any) -> Value:
        return "16 bits" if value in ("fp16", "bf16") else str(value)

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return PRECISIONS

    def current(self, case: Case, parameter: str) -> Value:
        return str(getattr(case.workload.qcomm, parameter.removeprefix("qcomm_")))

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        way = {parameter.removeprefix("qcomm_"): value}
        return case.with_model(qcomm=replace(case.workload.qcomm, **way))

    def fault(self, case: Case, value: Any) -> str:
        return "" if value in PRECISIONS else f"allowed are {self.allowed}"

    def refusal(self, case: Case) -> str:
        return "" if case.installed.world_size > 1 else "one rank sends nothing"


class Bucket(Knob):
    """MiB of dense gradients in one all-reduce (DDP's ``bucket_cap_mb``)."""

    name = "bucket"
    kind = float
    allowed = "MiB above 0"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)

    def current(self, case: Case, parameter: str) -> Value:
        return case.workload.dense.bucket_cap_mb

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(dense=replace(case.workload.dense, bucket_cap_mb=value))

    def fault(self, case: Case, value: Any) -> str:
        return "" if 0 < value <= 1e6 else "give MiB above 0"

    def refusal(self, case: Case) -> str:
        return "" if case.installed.world_size > 1 else "one rank reduces no gradients"


class ColumnMinimum(Knob):
    """Least columns of a column shard: ``min_partition`` of every table that has none."""

    name = "cw_min"
    allowed = f"columns, multiples of {LANE}"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        widest = max(t.embedding_dim for t in case.workload.tables)
        return tuple(w for w in (16, 32, 64, 128) if w < widest) or (LANE,)

    def current(self, case: Case, parameter: str) -> Value:
        return MIN_WIDTH

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.constrained("min_partition", value)

    def fault(self, case: Case, value: Any) -> str:
        fine = value > 0 and value % LANE == 0
        return "" if fine else f"it must be a multiple of {LANE} (FBGEMM reads {LANE} at once)"

    def refusal(self, case: Case) -> str:
        tables = case.workload.tables
        return _all_set(tables, "min_partition")


class CacheRatio(Knob):
    """``cache_load_factor`` of every table that has none: the share of rows in its UVM cache."""

    name = "cache_ratio"
    kind = float
    allowed = "shares above 0, at most 1"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return (0.05, 0.1, 0.2, 0.4, 0.8)

    def current(self, case: Case, parameter: str) -> Value:
        return DEFAULT_CACHE_LOAD_FACTOR

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.constrained("cache_load_factor", value)

    def fault(self, case: Case, value: Any) -> str:
        return "" if 0 < value <= 1 else "it must be a share above 0 and at most 1"

    def refusal(self, case: Case) -> str:
        cached = _cached_tables(case)
        return _all_set(cached, "cache_load_factor") if cached else NO_CACHE


class Hosts(Knob):
    """Number of hosts, each as those given."""

    name = "hosts"
    changes_loads = True
    allowed = "whole numbers of at least 1"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        now = case.installed.hosts
        tried = {1, *(now * 2**k // 4 for k in range(5))}
        return tuple(sorted(n for n in tried if n and not self.fault(case, n)))

    def current(self, case: Case, parameter: str) -> Value:
        return case.installed.hosts

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        given, local = case.installed, case.installed.local_world_size
        return replace(
            case,
            installed=Topology.uniform(
                value * local,
                local,
                hbm_bytes=given.hbm_cap_bytes[0],
                ddr_bytes=given.ddr_cap_bytes[0],
                nvlink_domain=self._domain(case, value),
            ),
        )

    def _domain(self, case: Case, hosts: int) -> int:
        """An NVLink domain inside a host stays; one that joins hosts, by the cluster or by the
        platform, is as large as that allows with whole hosts that divide all."""
        local, now, profile = (
            case.installed.local_world_size,
            case.installed.nvlink_domain,
            case.hardware,
        )
        joins = profile.nvlink_domain > profile.gpus_per_host and now >= local
        if now <= local and not joins:
            return now
        limit = max(now, profile.nvlink_domain if joins else 0)
        whole = (n for n in range(1, hosts + 1) if hosts % n == 0 and n * local <= limit)
        return local * max(whole, default=1)

    def fault(self, case: Case, value: Any) -> str:
        most = MAX_RANKS // case.installed.local_world_size
        return "" if 1 <= value <= most else f"it must be at least 1 and at most {most}"

    def refusal(self, case: Case) -> str:
        caps = zip(case.installed.hbm_cap_bytes, case.installed.ddr_cap_bytes, strict=True)
        if len(set(caps)) > 1:
            return "the ranks differ in memory, so another host could be of either kind"
        if any(t.constraints.ranks is not None for t in case.workload.tables):
            return "constraints.ranks of a table names ranks of the cluster as given"
        return ""


class Groups(Knob):
    """Ranks that a copy of all tables is sharded over: ``replica_groups.size``; all ranks mean one
    copy.

    The groups lie as the model's do, else as `DMPCollection` forms them by default.
    """

    name = "groups"
    changes_loads = True
    allowed = "ranks of a sharding group, divisors of the number of ranks"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        ranks = case.installed.world_size
        halved = (ranks >> k for k in range(ranks.bit_length()) if ranks % (1 << k) == 0)
        return tuple(sorted(n for n in halved if not self.fault(case, n)))

    def current(self, case: Case, parameter: str) -> Value:
        groups = case.workload.replica_groups
        return case.installed.world_size if groups is None else groups.size

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(replica_groups=_groups(case, size=value))

    def fault(self, case: Case, value: Any) -> str:
        try:
            self.turn(case, self.name, value).workload.sharding_group(case.installed)
        except InputError as error:
            return str(error)
        return ""

    def refusal(self, case: Case) -> str:
        if case.installed.world_size == 1:
            return "one rank has no groups"
        if any(t.constraints.ranks is not None for t in case.workload.tables):
            return "constraints.ranks of a table names ranks of one group size"
        return ""


class SyncInterval(Knob):
    """Steps from one averaging of the copies to the next: ``replica_groups.sync_interval``.

    More steps are always faster, and copies drift further apart, so the user says how many may be.
    """

    name = "sync_interval"
    allowed = "training steps, whole numbers of at least 1"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return (self.current(case, self.name),)

    def current(self, case: Case, parameter: str) -> Value:
        return _groups(case).sync_interval

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(replica_groups=_groups(case, sync_interval=value))

    def fault(self, case: Case, value: Any) -> str:
        return "" if 1 <= value <= 10**9 else "it must be at least 1"

    def refusal(self, case: Case) -> str:
        if _groups(case).fully_sharded:
            return "copies that are fully_sharded are averaged in every step"
        return "" if case.installed.world_size > 1 else "one rank has no copies"


def _groups(case: Case, **changes: Any) -> ReplicaGroups:
    """The replica groups of a case, one over all ranks where it has none, with changes."""
    groups = case.workload.replica_groups or ReplicaGroups(case.installed.world_size)
    return replace(groups, **changes)


class DeviceMemory(Knob):
    """Share of each rank's installed device memory that a plan may use, reserve included."""

    name = "hbm"
    kind = float
    allowed = "shares above 0, at most 1"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return (0.25, 0.5, 0.75, 1.0)

    def current(self, case: Case, parameter: str) -> Value:
        return 1.0

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        caps = tuple(int(value * cap) for cap in case.installed.hbm_cap_bytes)
        return replace(case, installed=replace(case.installed, hbm_cap_bytes=caps))

    def fault(self, case: Case, value: Any) -> str:
        return "" if 0 < value <= 1 else "it must be a share above 0 and at most 1"

    def refusal(self, case: Case) -> str:
        return "" if case.hardware.device == "cuda" else "the ranks have no device memory"


def _cached_tables(case: Case) -> list[Table]:
    """Tables that may have a UVM cache."""
    if case.hardware.device != "cuda":
        return []
    cached = ComputeKernel.FUSED_UVM_CACHING
    kernels = [t.constraints.compute_kernels for t in case.workload.tables]
    pairs = zip(case.workload.tables, kernels, strict=True)
    return [table for table, named in pairs if not named or cached in named]


def _all_set(tables: Sequence[Table], name: str) -> str:
    if all(getattr(t.constraints, name) is not None for t in tables):
        return f"every table has a constraint {name} of its own"
    return ""
