"""The knobs: what a plan cannot express, what turning each does to the case, and their grid.

`--tune` takes the values of a grid together; the advisor (`search.tune.advice`) takes single steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from predictor.errors import InfeasibleError, InputError
from predictor.hardware.loader import context_bytes
from predictor.hardware.schema import HardwareProfile
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Uniform
from predictor.model.memory.peak import DEFAULT_RESERVE, leave_for_shards
from predictor.model.memory.ranks import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import ComputeKernel
from predictor.model.topology import FULLY_SHARDED, ReplicaGroups, Topology
from predictor.model.workload import DenseArch, Table, Workload
from predictor.units import GIB
from search.problem import Problem
from search.space.enumerate import LANE, MIN_WIDTH

PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist")
PRECISIONS = ("fp32", "fp16", "bf16")
MAX_RANKS = 1 << 16
"""More ranks than this are not tried."""
LOOPS = {
    "base": "TrainPipelineBase",
    "sparse_dist": "TrainPipelineSparseDist",
    "prefetch_sparse_dist": "PrefetchTrainPipelineSparseDist",
}
"""TorchRec's classes, in torchrec.distributed.train_pipeline."""
NUMERICS = "changes numerics"
CONVERGES = "check that training converges equally well"
SINGLE = 3
"""Tables that are tried one by one."""
RARELY = 10
"""Steps between averagings of copies that are tried where the user has no copies."""
NO_CACHE = "no table may be fused_uvm_caching"

SWITCH = OFF, ON = ("false", "true")

Value = str | int | float
Setting = Mapping[str, Value]
"""A value for every parameter that is tuned."""


@dataclass(frozen=True)
class Case:
    """The model and the machine before anything is reserved or placed.

    Args:
        installed: the ranks with all of their memory.
        reserve: share of device memory that stays free of tables, in [0, 1).
    """

    workload: Workload
    installed: Topology
    hardware: HardwareProfile
    reserve: float = DEFAULT_RESERVE

    def problem(self) -> Problem:
        """What the plan search takes.

        Raises:
            InfeasibleError: nothing is left for tables, or replica groups do not suit the ranks.
        """
        try:
            group = self.workload.sharding_group(self.installed)
        except InputError as error:
            raise InfeasibleError(str(error)) from error
        device, context = self.hardware.device, context_bytes(self.hardware)
        topology = leave_for_shards(self.workload, group, self.reserve, device, context)
        return Problem(self.workload, topology, self.hardware)

    def constrained(self, name: str, value: Any) -> Case:
        """The case with a constraint for all tables that do not have it."""
        change: dict[str, Any] = {name: value}
        tables = tuple(
            t
            if getattr(t.constraints, name) is not None
            else replace(t, constraints=replace(t.constraints, **change))
            for t in self.workload.tables
        )
        return self.with_model(tables=tables)

    def with_model(self, **changes: Any) -> Case:
        """The case with other fields of its workload."""
        return replace(self, workload=replace(self.workload, **changes))


@dataclass(frozen=True)
class Step:
    """One thing that the user could change.

    Args:
        name: of the setting, as the model file has it where it does.
        target: key of a table; None for the whole model.
        value: its new value.
        turn: makes the change, after others too.
        costs: what it takes beside time, in words.
        how: what to change where.
    """

    name: str
    target: str | None
    value: Value | bool
    turn: Callable[[Case], Case]
    costs: tuple[str, ...] = ()
    how: str = ""


class Knob(ABC):
    """One thing to tune.

    Attributes:
        name: what a user calls it.
        kind: type of its values.
        allowed: what values there are, in words.
        choices: the values of a knob of texts; numbers are above 0 and at most ``most``.
        tried: values to try by default.
        alone: why one rank alone cannot tune it; empty if it can.
        ordered: near values act alike.
        changes_loads: it changes what a shard costs its rank.
        key: what the model file calls it, if not as the user of ``--tune`` does.
        costs: what turning it takes beside time.
    """

    name: str
    key = ""
    costs: tuple[str, ...] = ()
    kind: type[str] | type[int] | type[float] = int
    allowed: str
    choices: tuple[str, ...] = ()
    most: float = 1e9
    tried: tuple[Value, ...] = ()
    alone = ""
    ordered = True
    changes_loads = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return (self.name,)

    def refusal(self, case: Case) -> str:
        """Why it cannot be tuned here; empty if it can."""
        return self.alone if case.installed.world_size == 1 else ""

    def effect(self, value: Any) -> Value:
        """What of a value the prediction sees: settings with the same effects have one outcome."""
        found: Value = value
        return found

    def defaults(self, case: Case) -> tuple[Value, ...]:
        """Values to try where none are given."""
        return self.tried

    @abstractmethod
    def current(self, case: Case, parameter: str) -> Value:
        """The value of the case as given."""

    @abstractmethod
    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        """The case with a parameter at a value."""

    def how(self, before: Case, after: Case) -> str:
        """What to change in the model file and in the script."""
        return ""

    def advised(self, case: Case) -> Iterable[Value]:
        """Values that are worth a look for a user who did not ask."""
        return ()

    def steps(self, case: Case) -> Iterator[Step]:
        """What the advisor tries."""
        if self.refusal(case):
            return
        for value in self.advised(case):
            if self.fault(case, value):
                continue

            def turn(given: Case, value: Value = value) -> Case:
                for parameter in self.parameters:
                    given = self.turn(given, parameter, value)
                return given

            after = turn(case)
            if after != case:
                shown = value == ON if self.choices == SWITCH else value
                how = self.how(case, after)
                yield Step(self.key or self.name, None, shown, turn, self.costs, how)

    def fault(self, case: Case, value: Any) -> str:
        """What is wrong with a value; empty if nothing is."""
        fine = value in self.choices if self.kind is str else 0 < value <= self.most
        return "" if fine else f"allowed are {self.allowed}"


class BatchSize(Knob):
    """Samples per rank and iteration."""

    name = "batch_size"
    changes_loads = True
    allowed = "samples per rank, whole numbers of at least 1"
    most = 2**40
    costs = ("changes training",)

    def advised(self, case: Case) -> Iterable[Value]:
        return 2 * case.workload.batch_size, case.workload.batch_size // 2

    def how(self, before: Case, after: Case) -> str:
        return _batch(before, after)

    def defaults(self, case: Case) -> tuple[Value, ...]:
        now = case.workload.batch_size
        return tuple(sorted({max(1, now // 4), max(1, now // 2), now, 2 * now, 4 * now}))

    def current(self, case: Case, parameter: str) -> Value:
        return case.workload.batch_size

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(batch_size=value)


class Pipeline(Knob):
    """TorchRec's train pipeline.

    Only a UVM cache is prefetched, and on a stream of its own
    (`PrefetchTrainPipelineSparseDist` in train_pipelines.py).
    """

    name = "pipeline"
    key = "train_pipeline"
    changes_loads = True
    kind = str
    choices = PIPELINES
    allowed = ", ".join(PIPELINES)
    ordered = False
    costs = ("another train loop",)

    def advised(self, case: Case) -> Iterable[Value]:
        return PIPELINES

    def how(self, before: Case, after: Case) -> str:
        value = after.workload.train_pipeline
        return f"train_pipeline: {value} in the model file; {LOOPS[value]} in the script"

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return tuple(p for p in PIPELINES if not self.fault(case, p))

    def current(self, case: Case, parameter: str) -> Value:
        return case.workload.train_pipeline

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(train_pipeline=value)

    def fault(self, case: Case, value: Any) -> str:
        if value == "prefetch_sparse_dist" and not _cached_tables(case):
            return f"{NO_CACHE}, so there is nothing to prefetch"
        return super().fault(case, value)


class QComm(Knob):
    """Precision of pooled embeddings and their gradients on the wire, each way on its own."""

    name = "qcomm"
    kind = str
    choices = PRECISIONS
    allowed = ", ".join(PRECISIONS)
    tried = PRECISIONS
    alone = "one rank sends nothing"
    ordered = False
    costs = (NUMERICS,)

    def advised(self, case: Case) -> Iterable[Value]:
        return ("bf16",) if "fp32" in vars(case.workload.qcomm).values() else ()

    def how(self, before: Case, after: Case) -> str:
        forward, backward = after.workload.qcomm.forward, after.workload.qcomm.backward
        return (
            f"qcomm: {{forward: {forward}, backward: {backward}}} in the model file; sharders with "
            "qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig("
            f"forward_precision=CommType.{forward.upper()}, "
            f"backward_precision=CommType.{backward.upper()})); {CONVERGES}"
        )

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("qcomm_forward", "qcomm_backward")

    def effect(self, value: Any) -> Value:
        return "16 bits" if value in ("fp16", "bf16") else str(value)

    def current(self, case: Case, parameter: str) -> Value:
        return str(getattr(case.workload.qcomm, parameter.removeprefix("qcomm_")))

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        way = {parameter.removeprefix("qcomm_"): value}
        return case.with_model(qcomm=replace(case.workload.qcomm, **way))


class Bucket(Knob):
    """MiB of dense gradients in one all-reduce (DDP's ``bucket_cap_mb``)."""

    name = "bucket"
    key = "bucket_cap_mb"
    kind = float
    allowed = "MiB above 0, at most 10^6"
    most = 1e6
    tried = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
    alone = "one rank reduces no gradients"

    def advised(self, case: Case) -> Iterable[Value]:
        return 5.0, 100.0

    def how(self, before: Case, after: Case) -> str:
        size = f"{after.workload.dense.bucket_cap_mb:g}"
        return (
            f"dense: bucket_cap_mb: {size} in the model file; DistributedModelParallel(..., "
            f"data_parallel_wrapper=DefaultDataParallelWrapper(bucket_cap_mb={size}))"
        )

    def current(self, case: Case, parameter: str) -> Value:
        return case.workload.dense.bucket_cap_mb

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(dense=replace(case.workload.dense, bucket_cap_mb=value))


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

    def how(self, before: Case, after: Case) -> str:
        return _constraint(before, after, "min_partition", "min_partition={}")

    def fault(self, case: Case, value: Any) -> str:
        if value % LANE:
            return f"it must be a multiple of {LANE} (FBGEMM reads {LANE} at once)"
        return super().fault(case, value)

    def refusal(self, case: Case) -> str:
        tables = case.workload.tables
        return _all_set(tables, "min_partition")


class CacheRatio(Knob):
    """``cache_load_factor`` of every table that has none: the share of rows in its UVM cache."""

    name = "cache_ratio"
    key = "cache_load_factor"
    kind = float
    allowed = "shares above 0, at most 1"
    most = 1.0
    tried = (0.05, 0.1, 0.2, 0.4, 0.8)

    def current(self, case: Case, parameter: str) -> Value:
        return DEFAULT_CACHE_LOAD_FACTOR

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.constrained("cache_load_factor", value)

    def advised(self, case: Case) -> Iterable[Value]:
        return 0.1, 0.4

    def how(self, before: Case, after: Case) -> str:
        form = "cache_params=CacheParams(load_factor={})"
        return _constraint(before, after, "cache_load_factor", form)

    def refusal(self, case: Case) -> str:
        cached = _cached_tables(case)
        return _all_set(cached, "cache_load_factor") if cached else NO_CACHE


class Hosts(Knob):
    """Number of hosts, each as those given."""

    name = "hosts"
    key = "gpus"
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
        local, now = case.installed.local_world_size, case.installed.nvlink_domain
        profile = case.hardware
        joins = profile.nvlink_domain > profile.gpus_per_host and now >= local
        if now <= local and not joins:
            return now
        limit = max(now, profile.nvlink_domain if joins else 0)
        whole = (n for n in range(1, hosts + 1) if hosts % n == 0 and n * local <= limit)
        return local * max(whole, default=1)

    def fault(self, case: Case, value: Any) -> str:
        most = MAX_RANKS // case.installed.local_world_size
        return "" if 1 <= value <= most else f"it must be at least 1 and at most {most}"

    def how(self, before: Case, after: Case) -> str:
        return _batch(before, after)

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
    key = "replica_groups"
    changes_loads = True
    costs = ("changes training",)
    allowed = "ranks of a sharding group, divisors of the number of ranks"
    alone = "one rank has no groups"

    def advised(self, case: Case) -> Iterable[Value]:
        ranks = case.installed.world_size
        return tuple(n for n in (case.installed.local_world_size, ranks // 2) if n < ranks)

    def steps(self, case: Case) -> Iterator[Step]:
        """Groups whose copies meet in every step, and, where there are none yet, in every tenth: a
        pair of settings of which neither gains alone."""
        for step in super().steps(case):
            yield step
            if case.workload.replica_groups is None:

                def turn(given: Case, step: Step = step) -> Case:
                    return KNOBS["sync_interval"].turn(step.turn(given), "sync_interval", RARELY)

                value = f"{{size: {step.value}, sync_interval: {RARELY}}}"
                yield replace(step, value=value, turn=turn, how=_copies(turn(case)))

    def how(self, before: Case, after: Case) -> str:
        return _copies(after)

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
        if any(t.constraints.ranks is not None for t in case.workload.tables):
            return "constraints.ranks of a table names ranks of one group size"
        return super().refusal(case)


class SyncInterval(Knob):
    """Steps from one averaging of the copies to the next: ``replica_groups.sync_interval``.

    More steps are always faster, and copies drift further apart, so the user says how many may be.
    """

    name = "sync_interval"
    allowed = "training steps, whole numbers of at least 1"
    alone = "one rank has no copies"
    costs = ("changes training",)

    def advised(self, case: Case) -> Iterable[Value]:
        groups = case.workload.replica_groups
        few = groups is not None and groups.size < case.installed.world_size
        return (10 * groups.sync_interval,) if few and groups is not None else ()

    def how(self, before: Case, after: Case) -> str:
        return _copies(after)

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return (self.current(case, self.name),)

    def current(self, case: Case, parameter: str) -> Value:
        return _groups(case).sync_interval

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return case.with_model(replica_groups=_groups(case, sync_interval=value))

    def refusal(self, case: Case) -> str:
        if _groups(case).fully_sharded:
            return "copies that are fully_sharded are averaged in every step"
        return super().refusal(case)


def _groups(case: Case, **changes: Any) -> ReplicaGroups:
    """The replica groups of a case, one over all ranks where it has none, with changes."""
    groups = case.workload.replica_groups or ReplicaGroups(case.installed.world_size)
    return replace(groups, **changes)


class DeviceMemory(Knob):
    """Share of each rank's installed device memory that a plan may use, reserve included."""

    name = "hbm"
    kind = float
    allowed = "shares above 0, at most 1"
    most = 1.0
    tried = (0.25, 0.5, 0.75, 1.0)

    def current(self, case: Case, parameter: str) -> Value:
        return 1.0

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        caps = tuple(int(value * cap) for cap in case.installed.hbm_cap_bytes)
        return replace(case, installed=replace(case.installed, hbm_cap_bytes=caps))

    def how(self, before: Case, after: Case) -> str:
        least = min(after.installed.hbm_cap_bytes) / GIB
        return f"limit HBM to {least:.6g} GiB per rank, so that plans leave the rest free"

    def refusal(self, case: Case) -> str:
        return "" if case.hardware.device == "cuda" else "the ranks have no device memory"


class TableKnob(Knob):
    """A property of tables: turned for all that can have it, or for one.

    Attributes:
        field: of `Table`.
        script: what the script needs for it.
    """

    kind = str
    ordered = False
    changes_loads = True
    field: str
    script: str

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return self.choices

    def can(self, table: Table) -> bool:
        """Whether the table could have another value."""
        return True

    def value_of(self, table: Table) -> Value:
        """What it has."""
        value = getattr(table, self.field)
        return str(value).lower() if isinstance(value, bool) else value

    def changed(self, table: Table, value: Any) -> Table:
        """The table with another value."""
        return replace(table, **{self.field: value == ON if self.choices == SWITCH else value})

    def open(self, case: Case) -> list[Table]:
        """The tables that can have it, those that are read most first."""
        tables = [t for t in case.workload.tables if self.can(t)]
        return sorted(tables, key=lambda t: -t.lookups_per_sample * t.embedding_dim)

    def refusal(self, case: Case) -> str:
        return "" if self.open(case) else f"no table can have another {self.field}"

    def current(self, case: Case, parameter: str) -> Value:
        return self.value_of(self.open(case)[0])

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        return self.turn_some(case, value, [(t.module, t.name) for t in self.open(case)])

    def turn_some(self, case: Case, value: Any, some: Sequence[tuple[str, str]]) -> Case:
        """The case with the value for some tables, by module and name."""
        tables = (
            self.changed(t, value) if (t.module, t.name) in some else t
            for t in case.workload.tables
        )
        return case.with_model(tables=tuple(tables))

    def how(self, before: Case, after: Case) -> str:
        return f"{self.field} in the model file; {self.script}"

    def steps(self, case: Case) -> Iterator[Step]:
        if self.refusal(case):
            return
        tables = self.open(case)
        keys = {
            (t.module, t.name): k
            for t, k in zip(case.workload.tables, case.workload.keys, strict=True)
        }
        for value in self.advised(case):
            some = [(t.module, t.name) for t in tables if self.value_of(t) != value]
            groups = [(None, some)] * (len(some) > 1) + [
                (keys[one], [one]) for one in some[:SINGLE]
            ]
            for target, named in groups:

                def turn(given: Case, value: Value = value, named: Any = named) -> Case:
                    return self.turn_some(given, value, named)

                shown = value == ON if self.choices == SWITCH else value
                how = self.how(case, case)
                yield Step(self.key or self.name, target, shown, turn, self.costs, how)


class Dedup(TableKnob):
    """Every rank sends the distinct ids of its batch only."""

    name = field = "index_dedup"
    choices = SWITCH
    allowed = "true, false"
    script = "EmbeddingCollectionSharder(..., use_index_dedup=True) in the script"

    def can(self, table: Table) -> bool:
        return not table.is_pooled

    def advised(self, case: Case) -> Iterable[Value]:
        return (ON,)


class TablePrecision(TableKnob):
    """Precision of the weights."""

    name = "table_precision"
    key = field = "data_type"
    choices = PRECISIONS
    allowed = ", ".join(PRECISIONS)
    costs = (NUMERICS,)
    script = "data_type of the EmbeddingBagConfig in the script; " + CONVERGES

    def effect(self, value: Any) -> Value:
        return "16 bits" if value in ("fp16", "bf16") else str(value)

    def advised(self, case: Case) -> Iterable[Value]:
        return ("fp16",)

    def steps(self, case: Case) -> Iterator[Step]:
        narrow = [t for t in case.workload.tables if t.data_type != "fp32"]
        if len(narrow) < len(case.workload.tables):
            yield from super().steps(case)


class IdOrder(TableKnob):
    """Where the hot ids lie: in the first rows, or anywhere."""

    name = field = "id_order"
    choices = ("random", "frequency")
    allowed = ", ".join(choices)
    costs = ("ids are numbered anew",)
    script = "rows sorted by how often they are read (frequency), or by a hash (random)"

    def can(self, table: Table) -> bool:
        return any(not isinstance(f.distribution, Uniform) for f in table.features)

    def value_of(self, table: Table) -> Value:
        return table.features[0].id_order

    def changed(self, table: Table, value: Any) -> Table:
        features = (replace(f, id_order=value) for f in table.features)
        return replace(table, features=tuple(features))

    def advised(self, case: Case) -> Iterable[Value]:
        return self.choices


class DenseKnob(Knob):
    """A field of the dense part, where that has it.

    Attributes:
        field: of `DenseArch` and `CapturedDense`.
        script: what the script needs for it.
    """

    kind = str
    ordered = False
    field: str
    script: str
    dense: tuple[type, ...] = (DenseArch, CapturedDense)

    def defaults(self, case: Case) -> tuple[Value, ...]:
        return tuple(value for value in self.choices if not self.fault(case, value))

    def refusal(self, case: Case) -> str:
        has = isinstance(case.workload.dense, self.dense) and case.hardware.device == "cuda"
        return "" if has else f"the dense part has no {self.field} here"

    def current(self, case: Case, parameter: str) -> Value:
        value = getattr(case.workload.dense, self.field)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def turn(self, case: Case, parameter: str, value: Any) -> Case:
        new = {self.field: value == ON if self.choices == SWITCH else value}
        return case.with_model(dense=replace(case.workload.dense, **new))

    def advised(self, case: Case) -> Iterable[Value]:
        return (ON,)

    def how(self, before: Case, after: Case) -> str:
        value = self.current(after, self.name)
        return f"dense: {{{self.field}: {value}}} in the model file; {self.script_for(value)}"

    def script_for(self, value: Value) -> str:
        """What the script needs for a value."""
        return self.script


class DensePrecision(DenseKnob):
    """How products of the dense part are computed; captured ops have their own types."""

    name = "dense_precision"
    key = "dense.data_type"
    field = "data_type"
    choices = ("fp32", "tf32", "bf16")
    allowed = ", ".join(choices)
    costs = (NUMERICS,)

    def advised(self, case: Case) -> Iterable[Value]:
        now = self.choices.index(str(self.current(case, self.name)))
        return self.choices[now + 1 :]

    def script_for(self, value: Value) -> str:
        made = {
            "fp32": "no autocast",
            "tf32": 'torch.set_float32_matmul_precision("high")',
            "bf16": "torch.autocast(dtype=torch.bfloat16)",
        }
        return f"{made[str(value)]} in the script; {CONVERGES}"

    def fault(self, case: Case, value: Any) -> str:
        if value == "bf16" and isinstance(case.workload.dense, CapturedDense):
            return "captured ops have the types that they were captured with"
        return super().fault(case, value)


class Compiled(DenseKnob):
    """Forward and backward of the dense part are compiled."""

    name = field = "compiled"
    key = "dense.compiled"
    choices = SWITCH
    allowed = "true, false"
    costs = ("work: the dense part must compile",)
    script = "torch.compile of the dense part in the script"


class CudaGraphs(DenseKnob):
    """The dense part runs as captured graphs."""

    name = field = "cuda_graphs"
    key = "dense.cuda_graphs"
    choices = SWITCH
    allowed = "true, false"
    costs = ("work: fixed shapes in the dense part",)
    script = "torch.cuda.make_graphed_callables of the dense part in the script"


def _batch(before: Case, after: Case) -> str:
    """Samples of a rank and of all; the number of ranks."""
    ranks, local = after.installed.world_size, after.installed.local_world_size
    size, words = after.workload.batch_size, []
    if size != before.workload.batch_size:
        words.append(f"batch_size: {size} in the model file and in each rank's data loader")
    if ranks != before.installed.world_size:
        words.append(f"{ranks} GPUs, {local} per host: start torchrun on {ranks // local} hosts")
    total, was = size * ranks, before.workload.batch_size * before.installed.world_size
    if total != was:
        words.append(
            f"{total:,} samples per iteration instead of {was:,}: {CONVERGES} (learning rate)"
        )
    return "; ".join(words)


def _copies(after: Case) -> str:
    groups = after.workload.replica_groups
    assert groups is not None
    if groups.size == after.installed.world_size:
        return "no replica_groups in the model file; DistributedModelParallel in the script"
    if groups.fully_sharded:
        return (
            f"replica_groups: {{size: {groups.size}, sharding_strategy: {FULLY_SHARDED}}} in the "
            f"model file; DMPCollection(..., sharding_group_size={groups.size}, "
            f"sharding_strategy=ShardingStrategy.FULLY_SHARDED) in the script; {CONVERGES}"
        )
    return (
        f"replica_groups: {{size: {groups.size}, sync_interval: {groups.sync_interval}}} in the "
        f"model file; DMPCollection(..., sharding_group_size={groups.size}) and its sync() every "
        f"{groups.sync_interval} steps in the script; {CONVERGES}"
    )


def _constraint(before: Case, after: Case, name: str, script: str) -> str:
    tables = zip(before.workload.tables, after.workload.tables, strict=True)
    values = [getattr(b.constraints, name) for a, b in tables if a != b]
    value = values[0] if values else None
    return (
        f"constraints: {{{name}: {value}}} for the tables without one; "
        f"ParameterConstraints({script.format(value)})"
    )


def change_lines(before: Case, after: Case, changed: Iterable[str]) -> list[str]:
    """A line for each change, with what it asks of the model file, the script or the command.

    Args:
        changed: the parameters that differ from the case as given.
    """
    knobs = dict.fromkeys(PARAMETERS[name] for name in PARAMETERS if name in set(changed))
    return list(dict.fromkeys(filter(None, (knob.how(before, after) for knob in knobs))))


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


_KINDS = (
    *(BatchSize, Pipeline, QComm, Bucket, ColumnMinimum),
    *(CacheRatio, Hosts, Groups, SyncInterval, DeviceMemory),
    *(Dedup, TablePrecision, IdOrder, DensePrecision, Compiled, CudaGraphs),
)
KNOBS: dict[str, Knob] = {kind.name: kind() for kind in _KINDS}
PARAMETERS = {p: knob for knob in KNOBS.values() for p in knob.parameters}


@dataclass(frozen=True)
class Grid:
    """The values that every parameter may take: a setting is one of each."""

    values: Mapping[str, tuple[Value, ...]]

    @property
    def size(self) -> int:
        """Number of settings."""
        return math.prod(map(len, self.values.values()))

    def ordered(self, parameter: str) -> bool:
        """Near values act alike."""
        return PARAMETERS[parameter].ordered

    def apply_setting(self, case: Case, setting: Setting) -> Case:
        """The case with every parameter of a setting at its value."""
        turned = case
        for name, knob in PARAMETERS.items():  # in their order: hosts are set on equal ranks
            if name in setting and setting[name] != knob.current(turned, name):
                turned = knob.turn(turned, name, setting[name])
        return turned

    def loads_of(self, setting: Setting) -> tuple[Value, ...]:
        """Values that the loads of shards depend on: settings with the same ones share them."""
        return tuple(v for name, v in setting.items() if PARAMETERS[name].changes_loads)

    def effects_of(self, setting: Setting) -> tuple[Value, ...]:
        """What of a setting the prediction sees."""
        return tuple(PARAMETERS[name].effect(value) for name, value in setting.items())

    def nearest(self, case: Case) -> dict[str, Value]:
        """The setting that is nearest to the case as given."""
        return {
            name: self._nearest(values, PARAMETERS[name].current(case, name))
            for name, values in self.values.items()
        }

    def changes(self, case: Case, setting: Setting) -> dict[str, Value]:
        """The parameters of a setting that differ from the case as given."""
        return {
            name: value
            for name, value in setting.items()
            if value != PARAMETERS[name].current(case, name)
        }

    @staticmethod
    def _nearest(values: tuple[Value, ...], wanted: Value) -> Value:
        if wanted in values:
            return wanted
        if isinstance(wanted, str):
            return values[0]
        return min(values, key=lambda value: abs(float(value) - float(wanted)))


def grid_of(case: Case, chosen: Mapping[str, tuple[Value, ...] | None]) -> Grid:
    """The grid of the knobs that are tuned.

    Args:
        chosen: knob -> values, or None for those it has by default.

    Raises:
        InputError: a knob cannot be tuned here, or not to one of the values.
    """
    values: dict[str, tuple[Value, ...]] = {}
    for name in [name for name in KNOBS if name in chosen]:
        knob, given = KNOBS[name], chosen[name]
        refused = knob.refusal(case)
        if refused:
            raise InputError(f"{name} cannot be tuned here: {refused}")
        wanted = knob.defaults(case) if given is None else given
        for value in wanted:
            fault = knob.fault(case, value)
            if fault:
                raise InputError(f"{name} cannot be {value}: {fault}")
        values |= dict.fromkeys(knob.parameters, wanted)
    return Grid(values)
