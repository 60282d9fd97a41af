"""Knobs: parameters outside the plan, and the effect of each on the case.

A setting gives every parameter of a grid a value; `--tune` searches settings. A step turns one knob
and leaves the rest; the advisor (`search.tune.advice`) tries steps with the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from predictor.errors import InfeasibleError, InputError
from predictor.hardware.loader import context_bytes
from predictor.hardware.schema import HardwareProfile
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Uniform
from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.memory.peak import DEFAULT_RESERVE, leave_for_shards
from predictor.model.plan import ComputeKernel
from predictor.model.topology import FULLY_SHARDED, NetworkLevel, ReplicaGroups, Topology
from predictor.model.workload import INTEGERS, DenseArch, Table, Workload
from predictor.units import GIB
from search.problem import Problem
from search.space.enumerate import LANE, MIN_WIDTH

LOOPS = {
    "base": "TrainPipelineBase",
    "sparse_dist": "TrainPipelineSparseDist",
    "prefetch_sparse_dist": "PrefetchTrainPipelineSparseDist",
}
"""Train pipeline -> TorchRec's class, in torchrec.distributed.train_pipeline."""
PRODUCTS = {
    "fp32": "no autocast",
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "bf16": "torch.autocast(dtype=torch.bfloat16)",
}
"""Precision of products in the dense part -> the code that sets it in a script."""
PAIRS = {
    "index": "z[:, i, j]",
    "gather": "torch.gather(z.flatten(1), 1, pairs), padded to a multiple of 8 columns,",
    "all": "z.flatten(1), padded to a multiple of 8 columns,",
}
"""Selection of an interaction's pairs out of all products ``z`` -> the code in a script."""
PRECISIONS = ("fp32", "fp16", "bf16")
SWITCH = OFF, ON = ("false", "true")
MAX_RANKS = 1 << 16
"""Largest number of ranks that is tried."""
SINGLE = 3
"""Number of tables that are tried one by one."""
RARELY = 10
"""Steps between averagings of copies, tried if the model has no copies."""
NUMERICS, TRAINING = "changes numerics", "changes training"
CONVERGES = "check that training converges equally well"
ACCURATE = "check that predictions are as good"
NO_CACHE = "no table may be fused_uvm_caching"
AT_MOST = "at most this: no samples balance exactly"
NO_DEDUP = "FBGEMM finds distinct ids on GPUs alone"

Value = str | int | float
Setting = Mapping[str, Value]
"""Parameter -> value."""


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
        """Return the problem for the plan search.

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

    @property
    def ranks(self) -> int:
        """Number of ranks, all replica groups together."""
        return self.installed.world_size

    @property
    def groups(self) -> ReplicaGroups:
        """Replica groups; one group over all ranks if the model has none."""
        return self.workload.replica_groups or ReplicaGroups(self.ranks)


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

    @property
    def label(self) -> str:
        """``index_dedup: true on t_item``."""
        value = str(self.value).lower() if isinstance(self.value, bool) else f"{self.value}"
        return f"{self.name}: {value}" + (f" on {self.target}" if self.target is not None else "")


def _nothing(case: Case) -> Iterable[Value]:
    """Try no value."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A parameter that can be set, by default a field of the workload.

    Args:
        path: of the field; ``tables`` and ``features`` in it stand for each of them.
        allowed: what values there are, in words.
        choices: the values of a text; numbers are above 0 and at most ``most``.
        tried: values to try where ``--tune`` names none.
        advised: values that are worth a look for a user who did not ask.
        can: whether a table can have another value, where it is one of tables.
        unset: what a table has that says nothing.
        script: what a training script needs for a value.
        alone: why one rank alone cannot set it; empty if it can.
        refused: why it cannot be set here; empty if it can.
        wrong: what is wrong with a value, before its kind is looked at; empty if nothing is.
        user_name: what a user of ``--tune`` calls it, with others, if not by its name.
        key: what the model file calls it, if not by its name.
        costs: what turning it takes beside time.
        ordered: near values act alike.
        halves: fp16 and bf16 cannot be told apart by a prediction.
        trained: it means nothing for inference.
        one_by_one: the advisor tries it on single tables, too.
    """

    name: str
    path: str = ""
    kind: type[str] | type[int] | type[float] = int
    allowed: str = ""
    choices: tuple[str, ...] = ()
    most: float = 1e9
    tried: Callable[[Case], Iterable[Value]] = lambda case: ()
    advised: Callable[[Case], Iterable[Value]] = _nothing
    can: Callable[[Case, Table], bool] = lambda case, table: True
    unset: Value | None = None
    script: Callable[[Any], str] = "{}".format
    alone: str = ""
    refused: Callable[[Case], str] = lambda case: ""
    wrong: Callable[[Case, Any], str] = lambda case, value: ""
    user_name: str = ""
    key: str = ""
    costs: tuple[str, ...] = ()
    ordered: bool = True
    halves: bool = False
    one_by_one: bool = False
    trained: bool = False

    @property
    def of_tables(self) -> bool:
        """True if the knob is a property of tables."""
        return self.path.startswith("tables.")

    def open(self, case: Case) -> list[Table]:
        """Return the tables that can have another value, those that are read most first."""
        tables = [table for table in case.workload.tables if self.can(case, table)]
        return sorted(tables, key=lambda t: -t.lookups_per_sample * t.embedding_dim)

    def read(self, case: Case) -> Value:
        """Return the current value; for tables, that of the first one that can have another."""
        path = self.path.split(".")
        value: Any = self.open(case)[0] if self.of_tables else case.workload
        for name in path[self.of_tables :]:
            value = getattr(value, name)
            value = value[0] if isinstance(value, tuple) else value
        if value is None:
            assert self.unset is not None
            return self.unset
        return str(value).lower() if isinstance(value, bool) else value

    def turn(self, case: Case, value: Any, only: Sequence[Table] | None = None) -> Case:
        """Return the case with another value, in all tables that can have it or only some."""
        if not self.of_tables:
            field = _with(case.workload, self.path.split("."), self.shown(value))
            return replace(case, workload=field)
        turning = {(t.module, t.name) for t in (self.open(case) if only is None else only)}
        tables = tuple(
            self.turn_table(t, value) if (t.module, t.name) in turning else t
            for t in case.workload.tables
        )
        return replace(case, workload=replace(case.workload, tables=tables))

    def turn_table(self, table: Table, value: Any) -> Table:
        """Return a table with another value."""
        changed: Table = _with(table, self.path.split(".")[1:], self.shown(value))
        return changed

    def shown(self, value: Any) -> Any:
        """Return the value as the model file has it."""
        return value == ON if self.choices == SWITCH else value

    def how(self, before: Case, after: Case, value: Any) -> str:
        """Describe the change of the model file and the script for a value."""
        field = self.path.removeprefix("tables.")
        file = field if self.one_by_one else f"{field}: {value}"
        converges = CONVERGES if before.workload.training else ACCURATE
        checked = f"; {converges}" if {NUMERICS, TRAINING} & {*self.costs} else ""
        return f"{file} in the model file; {self.script(value)} in the script{checked}"

    def refusal(self, case: Case) -> str:
        """Return why the knob cannot be set here; empty if it can."""
        if case.ranks == 1 and self.alone:
            return self.alone
        if self.trained and not case.workload.training:
            return "mode is inference"
        if not self.refused(case) and self.of_tables and not self.open(case):
            return f"no table can have another {self.path.rpartition('.')[2]}"
        return self.refused(case)

    def fault(self, case: Case, value: Any) -> str:
        """Return the fault of a value; empty if it is allowed."""
        fine = value in self.choices if self.kind is str else 0 < value <= self.most
        return self.wrong(case, value) or ("" if fine else f"allowed are {self.allowed}")

    def defaults(self, case: Case) -> tuple[Value, ...]:
        """Return the values to try if the user names none."""
        values = self.choices or self.tried(case)
        return tuple(value for value in values if not self.fault(case, value))

    def effect(self, value: Value) -> Value:
        """Return the value as predictions see it: settings with equal effects have one outcome."""
        return "16 bits" if self.halves and value in ("fp16", "bf16") else value


def _with(instance: Any, path: Sequence[str], value: Any) -> Any:
    """Return a dataclass with another value at a path of its fields."""
    name, *rest = path
    if rest:
        inner = getattr(instance, name)
        several = isinstance(inner, tuple)
        value = (
            tuple(_with(i, rest, value) for i in inner) if several else _with(inner, rest, value)
        )
    return replace(instance, **{name: value})


class QCommKnob(Knob):
    """Precision of pooled embeddings, or of their gradients, on the wire."""

    def how(self, before: Case, after: Case, value: Any) -> str:
        ways = {way: str(getattr(after.workload.qcomm, way)) for way in ("forward", "backward")}
        file = ", ".join(f"{way}: {kind}" for way, kind in ways.items())
        script = ", ".join(f"{way}_precision=CommType.{k.upper()}" for way, k in ways.items())
        return (
            f"qcomm: {{{file}}} in the model file; sharders with qcomm_codecs_registry="
            f"get_qcomm_codecs_registry(QCommsConfig({script})); {CONVERGES}"
        )


class BatchSize(Knob):
    """Samples per rank and iteration."""

    def how(self, before: Case, after: Case, value: Any) -> str:
        """Describe samples per rank, samples of all ranks, and the number of ranks."""
        ranks, local = after.ranks, after.installed.local_world_size
        size, words = after.workload.batch_size, []
        if size != before.workload.batch_size:
            words.append(f"batch_size: {size} in the model file and in each rank's data loader")
        if ranks != before.ranks:
            words.append(
                f"{ranks} GPUs, {local} per host: start torchrun on {ranks // local} hosts"
            )
        total, was = size * ranks, before.workload.batch_size * before.ranks
        if total != was:
            words.append(
                f"{total:,} samples per iteration instead of {was:,}: {CONVERGES} (learning rate)"
            )
        return "; ".join(words)


class Hosts(BatchSize):
    """Number of hosts, all like those of the case."""

    def read(self, case: Case) -> Value:
        return case.installed.hosts

    def turn(self, case: Case, value: Any, only: Sequence[Table] | None = None) -> Case:
        before, local = case.installed, case.installed.local_world_size
        installed = Topology.uniform(
            value * local,
            local,
            hbm_bytes=before.hbm_cap_bytes[0],
            ddr_bytes=before.ddr_cap_bytes[0],
            nvlink_domain=self._domain(case, value),
        )
        network = tuple(filter(None, _levels(case, value)))
        return replace(case, installed=replace(installed, network=network))

    def _domain(self, case: Case, hosts: int) -> int:
        """Return the ranks of an NVLink domain with that many hosts.

        A domain inside a host stays. One that joins hosts grows as far as the cluster or platform
        allows, to a whole number of hosts that divides them all.
        """
        local, now = case.installed.local_world_size, case.installed.nvlink_domain
        profile = case.hardware
        joins = profile.nvlink_domain > profile.gpus_per_host and now >= local
        if now <= local and not joins:
            return now
        limit = max(now, profile.nvlink_domain if joins else 0)
        whole = (n for n in range(1, hosts + 1) if hosts % n == 0 and n * local <= limit)
        return local * max(whole, default=1)


class DeviceMemory(Knob):
    """Share of each rank's installed device memory that a plan may use, reserve included."""

    def read(self, case: Case) -> Value:
        return 1.0

    def turn(self, case: Case, value: Any, only: Sequence[Table] | None = None) -> Case:
        caps = tuple(int(value * cap) for cap in case.installed.hbm_cap_bytes)
        return replace(case, installed=replace(case.installed, hbm_cap_bytes=caps))

    def how(self, before: Case, after: Case, value: Any) -> str:
        least = min(after.installed.hbm_cap_bytes) / GIB
        return f"limit HBM to {least:.6g} GiB per rank, so that plans leave the rest free"


class Copies(Knob):
    """A field of the replica groups: ``size``, ranks that a copy of all tables is sharded over,
    where all ranks mean one copy; or ``sync_interval``. The groups lie as the model's do, else as
    `DMPCollection` forms them by default."""

    def read(self, case: Case) -> Value:
        value: int = getattr(case.groups, self.path)
        return value

    def turn(self, case: Case, value: Any, only: Sequence[Table] | None = None) -> Case:
        groups = replace(case.groups, **{self.path: value})
        return replace(case, workload=replace(case.workload, replica_groups=groups))

    def how(self, before: Case, after: Case, value: Any) -> str:
        groups = after.groups
        if groups.size == after.ranks:
            return "no replica_groups in the model file; DistributedModelParallel in the script"
        file = f"sync_interval: {groups.sync_interval}"
        script = f") and its sync() every {groups.sync_interval} steps"
        if groups.fully_sharded:
            file = f"sharding_strategy: {FULLY_SHARDED}"
            script = ", sharding_strategy=ShardingStrategy.FULLY_SHARDED)"
        return (
            f"replica_groups: {{size: {groups.size}, {file}}} in the model file; DMPCollection("
            f"..., sharding_group_size={groups.size}{script} in the script; {CONVERGES}"
        )


class Products(Knob):
    """Precision of products in the dense part."""

    def how(self, before: Case, after: Case, value: Any) -> str:
        """Add a new capture under autocast: it has the ops that run, while these are derived."""
        how = super().how(before, after, value)
        captured = value == "bf16" and isinstance(after.workload.dense, CapturedDense)
        return how + ('; then to_yaml(..., dense_data_type="bf16") again' if captured else "")


def _nothing_to_prefetch(case: Case, value: Any) -> str:
    """Return why a pipeline would prefetch nothing; empty if it would.

    It prefetches only a UVM cache, on its own stream (`PrefetchTrainPipelineSparseDist` in
    train_pipelines.py).
    """
    if value == "prefetch_sparse_dist" and not case.workload.training:
        return "TorchRec's pipelines for inference prefetch nothing"
    if value == "prefetch_sparse_dist" and not any(_may_cache(case, t) for t in _tables(case)):
        return f"{NO_CACHE}, so there is nothing to prefetch"
    return ""


def _tables(case: Case) -> Sequence[Table]:
    return case.workload.tables


def _may_cache(case: Case, table: Table) -> bool:
    """Return True if a table may have a UVM cache."""
    kernels = table.constraints.compute_kernels
    may = not kernels or ComputeKernel.FUSED_UVM_CACHING in kernels
    return may and case.hardware.device == "cuda"


def _cache_refused(case: Case) -> str:
    cached = [table for table in _tables(case) if _may_cache(case, table)]
    return _all_set(cached, "cache_load_factor") if cached else NO_CACHE


def _all_set(tables: Sequence[Table], name: str) -> str:
    if all(getattr(t.constraints, name) is not None for t in tables):
        return f"every table has a constraint {name} of its own"
    return ""


def _widths(case: Case) -> Iterable[int]:
    widest = max(t.embedding_dim for t in _tables(case))
    return tuple(w for w in (16, 32, 64, 128) if w < widest) or (LANE,)


def _hosts_wrong(case: Case, value: Any) -> str:
    most = MAX_RANKS // case.installed.local_world_size
    if not 1 <= value <= most:
        return f"it must be at least 1 and at most {most}"
    try:
        _levels(case, value)
    except InputError as error:
        return str(error)
    return ""


def _levels(case: Case, hosts: int) -> list[NetworkLevel | None]:
    """Return the levels of the network over that many hosts, None for those that join none.

    Raises:
        InputError: parts of a level would be filled unevenly.
    """
    before = case.installed
    count = hosts * before.local_world_size
    return [level.in_row(before.world_size, count) for level in before.network]


def _hosts_refused(case: Case) -> str:
    caps = zip(case.installed.hbm_cap_bytes, case.installed.ddr_cap_bytes, strict=True)
    if len(set(caps)) > 1:
        return "the ranks differ in memory, so another host could be of either kind"
    return _ranks_named(case)


def _ranks_named(case: Case) -> str:
    named = any(t.constraints.ranks is not None for t in _tables(case))
    return "constraints.ranks of a table names ranks of the groups as given" if named else ""


def _group_sizes(case: Case) -> Iterable[int]:
    ranks = case.ranks
    return sorted(ranks >> k for k in range(ranks.bit_length()) if ranks % (1 << k) == 0)


def _group_wrong(case: Case, value: Any) -> str:
    try:
        PARAMETERS["groups"].turn(case, value).workload.sharding_group(case.installed)
    except InputError as error:
        return str(error)
    return ""


def _no_dense(case: Case) -> str:
    if not isinstance(case.workload.dense, DenseArch | CapturedDense):
        return "the dense part is given as measured times"
    return "" if case.hardware.device == "cuda" else "it is predicted for GPUs alone"


def _no_pairs(case: Case) -> str:
    dense = case.workload.dense
    dot = isinstance(dense, DenseArch) and dense.interaction == "dot" and not dense.linears
    return _no_dense(case) or ("" if dot else "only the interaction dot takes pairs")


def _smaller_weights(case: Case) -> Iterable[str]:
    if not case.workload.training:
        return INTEGERS
    return ("fp16",) if any(t.data_type == "fp32" for t in _tables(case)) else ()


def _weights_wrong(case: Case, value: Any) -> str:
    if case.workload.training:
        return "FBGEMM does not train such weights" if value in INTEGERS else ""
    return "FBGEMM has no lookups of bf16 for inference" if value == "bf16" else ""


def _faster_products(case: Case) -> Iterable[str]:
    kinds = list(PRODUCTS)
    return kinds[kinds.index(str(PARAMETERS["dense_precision"].read(case))) + 1 :]


def _of_text(
    name: str, path: str, choices: Sequence[str], knob_class: type[Knob] = Knob, **more: Any
) -> Knob:
    more |= {"choices": tuple(choices), "allowed": ", ".join(choices), "kind": str}
    return knob_class(name=name, path=path, ordered=False, **more)


def _of_qcomm(way: str) -> Knob:
    return QCommKnob(
        name=f"qcomm_{way}",
        path=f"qcomm.{way}",
        choices=PRECISIONS,
        allowed=", ".join(PRECISIONS),
        kind=str,
        ordered=False,
        user_name="qcomm",
        trained=way == "backward",
        alone="one rank sends nothing",
        halves=True,
        costs=(NUMERICS,),
        advised=lambda case: ("bf16",) if "fp32" in vars(case.workload.qcomm).values() else (),
    )


def _no_uneven_batches(case: Case) -> str:
    deviations = (f.pooling_factor_std for t in case.workload.tables for f in t.features)
    return "" if any(deviations) else "no feature has a pooling_factor_std"


def _of_dense(name: str, field: str, choices: Sequence[str] = SWITCH, **more: Any) -> Knob:
    path = f"dense.{field}"
    more = {"advised": lambda case: (ON,), "refused": _no_dense, **more}
    return _of_text(name, path, choices, key=path, **more)


def _of_tables(name: str, path: str, choices: Sequence[str], **more: Any) -> Knob:
    key = path.rpartition(".")[2]
    return _of_text(name, f"tables.{path}", choices, key=key, one_by_one=True, **more)


def _constraint(name: str, field: str, unset: Value, **more: Any) -> Knob:
    """A constraint of every table that has none."""

    def can(case: Case, table: Table) -> bool:
        return getattr(table.constraints, field) is None

    return Knob(name=name, path=f"tables.constraints.{field}", unset=unset, can=can, **more)


PARAMETERS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        BatchSize(
            name="batch_size",
            path="batch_size",
            allowed="samples per rank, whole numbers from 1 to 10^9",
            most=10**9,
            tried=lambda case: sorted(
                {max(1, int(case.workload.batch_size * share)) for share in (0.25, 0.5, 1, 2, 4)}
            ),
            # how long a request may wait decides it for inference
            advised=lambda case: (
                tuple(filter(None, (2 * case.workload.batch_size, case.workload.batch_size // 2)))
                if case.workload.training
                else ()
            ),
            costs=(TRAINING,),
        ),
        _of_text(
            "pipeline",
            "train_pipeline",
            tuple(LOOPS),
            key="train_pipeline",
            advised=lambda case: LOOPS,
            wrong=_nothing_to_prefetch,
            script=LOOPS.__getitem__,
            costs=("another train loop",),
        ),
        _of_qcomm("forward"),
        _of_qcomm("backward"),
        Knob(
            name="bucket",
            trained=True,
            path="dense.bucket_cap_mb",
            key="bucket_cap_mb",
            kind=float,
            allowed="MiB above 0, at most 10^6",
            most=1e6,
            tried=lambda case: (1.0, 5.0, 10.0, 25.0, 50.0, 100.0),
            advised=lambda case: (5.0, 100.0),
            alone="one rank reduces no gradients",
            script="data_parallel_wrapper=DefaultDataParallelWrapper(bucket_cap_mb={:g})".format,
        ),
        _constraint(
            "cw_min",
            "min_partition",
            MIN_WIDTH,
            allowed=f"columns, multiples of {LANE}",
            tried=_widths,
            refused=lambda case: _all_set(_tables(case), "min_partition"),
            wrong=lambda case, value: (
                f"it must be a multiple of {LANE} (FBGEMM reads {LANE} at once)"
                if value % LANE
                else ""
            ),
            script="ParameterConstraints(min_partition={})".format,
        ),
        _constraint(
            "cache_ratio",
            "cache_load_factor",
            DEFAULT_CACHE_LOAD_FACTOR,
            kind=float,
            allowed="shares above 0, at most 1",
            most=1.0,
            tried=lambda case: (0.05, 0.1, 0.2, 0.4, 0.8),
            advised=lambda case: (0.1, 0.4),
            refused=_cache_refused,
            key="cache_load_factor",
            script="ParameterConstraints(cache_params=CacheParams(load_factor={}))".format,
        ),
        Hosts(
            name="hosts",
            key="gpus",
            allowed="whole numbers of at least 1",
            tried=lambda case: sorted(
                {1, *(max(1, case.installed.hosts * 2**k // 4) for k in range(5))}
            ),
            refused=_hosts_refused,
            wrong=_hosts_wrong,
        ),
        Copies(
            name="groups",
            trained=True,
            path="size",
            key="replica_groups",
            allowed="ranks of a sharding group, divisors of the number of ranks",
            tried=_group_sizes,
            advised=lambda case: [
                n for n in (case.installed.local_world_size, case.ranks // 2) if n < case.ranks
            ],
            alone="one rank has no groups",
            refused=_ranks_named,
            wrong=_group_wrong,
            costs=(TRAINING,),
        ),
        # longer is always faster, and copies drift further apart, so the user says how long
        Copies(
            name="sync_interval",
            trained=True,
            path="sync_interval",
            allowed="training steps, whole numbers of at least 1",
            tried=lambda case: (case.groups.sync_interval,),
            advised=lambda case: (
                (10 * case.groups.sync_interval,) if case.groups.size < case.ranks else ()
            ),
            alone="one rank has no copies",
            refused=lambda case: (
                "copies that are fully_sharded are averaged in every step"
                if case.groups.fully_sharded
                else ""
            ),
            costs=(TRAINING,),
        ),
        DeviceMemory(
            name="hbm",
            kind=float,
            allowed="shares above 0, at most 1",
            most=1.0,
            tried=lambda case: (0.25, 0.5, 0.75, 1.0),
            refused=lambda case: (
                "" if case.hardware.device == "cuda" else "the ranks have no device memory"
            ),
        ),
        # what it gains is the most that balancing can: no samples balance exactly
        _of_text(
            "balance_batches",
            "balance_batches",
            SWITCH,
            alone="one rank waits for none",
            refused=_no_uneven_batches,
            advised=lambda case: (ON,),
            script="samples shared out over ranks by the work of their lengths".format,
            costs=(AT_MOST, "samples move between ranks before each step"),
        ),
        # every rank sends the distinct ids of its batch only
        _of_tables(
            "index_dedup",
            "index_dedup",
            SWITCH,
            trained=True,
            can=lambda case, table: not table.is_pooled,
            refused=lambda case: "" if case.hardware.device == "cuda" else NO_DEDUP,
            advised=lambda case: (ON,),
            script="EmbeddingCollectionSharder(..., use_index_dedup=True)".format,
        ),
        _of_tables(
            "table_precision",
            "data_type",
            (*PRECISIONS, *INTEGERS),
            advised=_smaller_weights,
            wrong=_weights_wrong,
            script="data_type of the EmbeddingBagConfig".format,
            halves=True,
            costs=(NUMERICS,),
        ),
        # where the hot ids lie: in the first rows, or anywhere
        _of_tables(
            "id_order",
            "features.id_order",
            ("random", "frequency"),
            can=lambda case, table: any(
                not isinstance(f.distribution, Uniform) for f in table.features
            ),
            advised=lambda case: ("random", "frequency"),
            script="rows by how often they are read (frequency), or by a hash (random),".format,
            costs=("ids are numbered anew",),
        ),
        _of_dense(
            "dense_precision",
            "data_type",
            tuple(PRODUCTS),
            knob_class=Products,
            advised=_faster_products,
            script=PRODUCTS.__getitem__,
            costs=(NUMERICS,),
        ),
        # TorchRec's DLRM picks them by index, whose backward adds element by element
        _of_dense(
            "pairs",
            "pairs",
            tuple(PAIRS),
            advised=lambda case: ("gather", "all"),
            refused=_no_pairs,
            script=PAIRS.__getitem__,
            costs=("a line of code in the interaction",),
        ),
        _of_dense(
            "compiled",
            "compiled",
            script="torch.compile of the dense part".format,
            costs=("work: the dense part must compile",),
        ),
        _of_dense(
            "cuda_graphs",
            "cuda_graphs",
            script="torch.cuda.make_graphed_callables of the dense part".format,
            costs=("work: fixed shapes in the dense part",),
        ),
    )
}
KNOBS: dict[str, tuple[Knob, ...]] = {
    name: tuple(knob for knob in PARAMETERS.values() if name in (knob.user_name, knob.name))
    for name in dict.fromkeys(knob.user_name or knob.name for knob in PARAMETERS.values())
}
"""Name on the command line -> parameters that it sets."""


def steps(case: Case) -> Iterator[Step]:
    """Yield the steps that the advisor tries, one at a time."""
    for key, knobs, value, refused in _advised(case):
        if refused:
            continue
        for target, turn in _turns(case, knobs, value):
            after = turn(case)
            if after != case:
                how = "; ".join(dict.fromkeys(knob.how(case, after, value) for knob in knobs))
                yield Step(key, target, knobs[0].shown(value), turn, knobs[0].costs, how)
                if knobs[0].name == "groups" and case.workload.replica_groups is None:
                    yield _with_rare_averaging(case, turn, value)


def refusals(case: Case) -> dict[str, str]:
    """Map each setting that the advisor cannot try here, but could elsewhere, to the reason."""
    return {
        key if value is None else f"{key}: {value}": refused
        for key, _, value, refused in _advised(case)
        if refused
    }


def _advised(case: Case) -> Iterator[tuple[str, tuple[Knob, ...], Any, str]]:
    """Yield the name that the model file has for each setting, its parameters, each value to try,
    and why it cannot be tried here; None for the value where no value can."""
    for name, knobs in KNOBS.items():
        knob = knobs[0]
        key = name if len(knobs) > 1 else knob.key or name
        refused = knob.refusal(case)
        if refused:
            if knob.advised is not _nothing:
                yield key, knobs, None, refused
            continue
        for value in knob.advised(case):
            yield key, knobs, value, knob.fault(case, value)


def _turns(
    case: Case, knobs: Sequence[Knob], value: Value
) -> Iterator[tuple[str | None, Callable[[Case], Case]]]:
    """Yield changes to a value: of the whole model (None), and of each of the tables that are read
    most, with its key."""
    knob = knobs[0]
    if not knob.one_by_one:
        setting = dict.fromkeys((parameter.name for parameter in knobs), value)
        yield None, partial(turned, setting=setting)
        return
    changing = [table for table in knob.open(case) if knob.turn_table(table, value) != table]
    if len(changing) > 1:
        yield None, partial(knob.turn, value=value, only=changing)
    keys = dict(zip(map(id, _tables(case)), case.workload.keys, strict=True))
    for table in changing[:SINGLE]:
        yield keys[id(table)], partial(knob.turn, value=value, only=[table])


def _with_rare_averaging(case: Case, turn: Callable[[Case], Case], size: Value) -> Step:
    """Return a step to replica groups that rarely average.

    Neither setting of the pair gains alone if there are no copies yet.
    """

    def both(case: Case) -> Case:
        return turned(turn(case), {"sync_interval": RARELY})

    knob = PARAMETERS["groups"]
    value = f"{{size: {size}, sync_interval: {RARELY}}}"
    return Step(knob.key, None, value, both, knob.costs, knob.how(case, both(case), size))


def turned(case: Case, setting: Setting) -> Case:
    """Return the case with every parameter of a setting at its value."""
    for name, knob in PARAMETERS.items():  # in their order: hosts are set on equal ranks
        if name in setting and setting[name] != knob.read(case):
            case = knob.turn(case, setting[name])
    return case


def changes(case: Case, setting: Setting) -> dict[str, Value]:
    """Return the parameters of a setting that differ from the case."""
    return {name: v for name, v in setting.items() if v != PARAMETERS[name].read(case)}


def change_lines(case: Case, setting: Setting) -> list[str]:
    """Return a line for each change of the model file, the script or the command."""
    after, named = turned(case, setting), changes(case, setting)
    lines = [k.how(case, after, named[name]) for name, k in PARAMETERS.items() if name in named]
    return list(dict.fromkeys(filter(None, lines)))


@dataclass(frozen=True)
class Grid:
    """Grid of settings: the values that each parameter may take."""

    values: Mapping[str, tuple[Value, ...]]

    @property
    def size(self) -> int:
        """Number of settings."""
        return math.prod(map(len, self.values.values()))

    def effects_of(self, setting: Setting) -> tuple[Value, ...]:
        """Return a setting as predictions see it."""
        return tuple(PARAMETERS[name].effect(value) for name, value in setting.items())

    def nearest(self, case: Case) -> dict[str, Value]:
        """Return the setting nearest to the case."""
        return {
            name: _nearest(values, PARAMETERS[name].read(case))
            for name, values in self.values.items()
        }


def _nearest(values: tuple[Value, ...], current: Value) -> Value:
    if current in values:
        return current
    if isinstance(current, str):
        return values[0]
    return min(values, key=lambda value: abs(float(value) - float(current)))


def grid_of(case: Case, chosen: Mapping[str, tuple[Value, ...] | None]) -> Grid:
    """Return the grid of the knobs to tune.

    Args:
        chosen: knob -> values, or None for those it has by default.

    Raises:
        InputError: a knob cannot be tuned here, or not to one of the values.
    """
    values: dict[str, tuple[Value, ...]] = {}
    for name in [name for name in KNOBS if name in chosen]:
        knob, requested = KNOBS[name][0], chosen[name]
        refused = knob.refusal(case)
        if refused:
            raise InputError(f"{name} cannot be tuned here: {refused}")
        to_try = knob.defaults(case) if requested is None else requested
        for value in to_try:
            fault = knob.fault(case, value)
            if fault:
                raise InputError(f"{name} cannot be {value}: {fault}")
        values |= dict.fromkeys((parameter.name for parameter in KNOBS[name]), to_try)
    return Grid(values)
