"""A row of the table as what was trained: model, batch, pipeline, GPU.

The model is that of TorchRec's `benchmark_train_pipeline.py`: `TestSparseNN` (a dense MLP without
activations, pooled embeddings, `TestOverArchLarge`) or `TestMixedEmbeddingSparseArch` (sequences
padded to 20 ids beside pooled embeddings, one linear layer); torchrec/distributed/test_utils/
test_model.py. Ids are uniform. Cells that a row leaves empty have that file's defaults.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean, median

from lab.planners.reservation import reserve_topology
from lab.validate.report import Cell, ComparedRow, Report, Scores, Summary, data_folder, noise_of
from predictor.csv_rows import LARGEST, MOST_RANKS, Row, count, number, read_table
from predictor.errors import ShardoptError, did_you_mean
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import context_bytes, list_hardware, load_hardware
from predictor.hardware.schema import SIGMA_OVER_MEAN, HardwareProfile
from predictor.model.dlrm_program import OpWriter, free_after_last_use
from predictor.model.memory.peak import rank_peaks
from predictor.model.op_calls import DenseProgram, Lookup, LookupBackward, OpCall, Operand
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DenseArch, Feature, Optimizer, Table, Workload
from predictor.predict import predict
from predictor.units import GIB, MIB
from search.baselines.torchrec_planner import torchrec_plan

FILE = "torchrec_steps_measured.csv"
COLUMNS = (
    *("commit", "run", "gpu", "gpu_certainty", "world_size", "batch_per_rank", "n_batches"),
    "num_benchmarks",
    *("ms_per_batch", "steady_ms_per_batch", "pooling", "n_unweighted", "n_weighted", "dim"),
    *("rows_per_table", "extra_tables", "default_sharding", "constraints", "model", "pipeline"),
    *("extra", "float_features", "dense_hidden", "dense_out", "over_out", "over_layers"),
    *("plan_commit", "sparse_optimizer", "mode"),
)
CONFIGURATION = tuple(
    c for c in COLUMNS if c not in ("commit", "run", "ms_per_batch", "steady_ms_per_batch")
)
"""Columns that say what was run; rows alike in all of them are repeats."""

FLOAT_FEATURES, DENSE_OUT, OVER_OUT, OVER_LAYERS = 10, 8, 16, 5
"""TorchRec's defaults (`DENSE_LAYER_OUT_SIZE`, `OVER_ARCH_OUT_SIZE` of test_model.py)."""
MAX_SEQUENCE = 20
"""Ids to which `TestMixedEmbeddingSparseArch` pads a sequence."""
ROWS_STEP = 1000
"""Table i has at least so many rows times i + 1 (`EmbeddingTablesConfig`)."""
PIPELINES = {
    "base": "base",
    "sparse": "sparse_dist",
    "prefetch": "prefetch_sparse_dist",
    # evaluation exchanges ids ahead as training does; a fused pipeline starts lookups ahead as well
    "eval-sdd": "sparse_dist",
    "eval-fused": "sparse_dist",
    "eval": "sparse_dist",
}
MODES = {"": True, "train": True, "training": True, "eval": False, "evaluation": False}
"""Whether a backward runs."""
OPTIMIZERS = {
    "EXACT_SGD": Optimizer.EXACT_SGD,
    "SGD": Optimizer.EXACT_SGD,
    "EXACT_ADAGRAD": Optimizer.ADAGRAD,
    "EXACT_ROWWISE_ADAGRAD": Optimizer.ROWWISE_ADAGRAD,
    "EXACT_ROW_WISE_ADAGRAD": Optimizer.ROWWISE_ADAGRAD,
    "ADAM": Optimizer.ADAM,
    "PARTIAL_ROWWISE_ADAM": Optimizer.PARTIAL_ROWWISE_ADAM,
}
EBC, WEIGHTED, EC = "ebc", "weighted_ebc", "ec"
"""Modules, in the order in which the model runs them."""
_LOAD_FACTOR = re.compile(r"cache_load_factor\s+([0-9.]+)")
_KERNEL = re.compile(r"(\w+)\s+(fused_uvm_caching|fused_uvm|fused)\b")


@dataclass(frozen=True)
class Sharding:
    """What a row asks of one table; None leaves it open."""

    sharding_type: ShardingType | None
    compute_kernel: ComputeKernel | None = None


@dataclass(frozen=True)
class Run:
    """One row.

    Args:
        steady: the time is of a steady loop, not of one that was cold.
        batches: of that loop.
        cells: of `CONFIGURATION`, in its order.
        profile: that predicts its GPU.
        allocated_bytes, reserved_bytes: the peak of the fullest rank, if the row has it.
    """

    commit: str
    name: str
    gpu: str
    certainty: str
    profile: str
    ranks: int
    steady: bool
    batches: int
    measured_ms: float
    plan_commit: str
    workload: Workload
    cells: tuple[str, ...]
    notes: str
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Alike for runs that no column tells apart."""
        return self.cells

    @cached_property
    def unlike(self) -> str:
        """What of the run the predictor does not know; empty if nothing."""
        text = self.notes.lower().replace("-", "_")
        known = ("shampoo", "sync_fwd", "mpzch", "kvzch", "ssd", "stash", "ems", "vbe")
        return ", ".join(word for word in known if re.search(rf"(?<![a-z]){word}(?![a-z])", text))


def parse_run(row: Row) -> Run:
    """The run of a row.

    Raises:
        ValueError: says which cell cannot be used, and why.
    """
    steady_text = row["steady_ms_per_batch"].strip()
    steady = bool(steady_text) or _whole(row, "num_benchmarks", 1) > 1
    measured = number(row, "steady_ms_per_batch" if steady_text else "ms_per_batch")
    return Run(
        row["commit"],
        row["run"],
        row["gpu"],
        row["gpu_certainty"],
        _profile(row["gpu"]),
        count(row, "world_size", MOST_RANKS),
        steady,
        _whole(row, "n_batches", 0),
        measured,
        row["plan_commit"].strip(),
        _workload(row),
        tuple(row[column].strip() for column in CONFIGURATION),
        " ".join((row["run"], row["extra"], row["model"])),
        _peak(row, "peak_alloc_GB"),
        _peak(row, "peak_reserved_GB"),
    )


def _peak(row: Row, column: str) -> float | None:
    """The harness prints MiB, which the table gives over a thousand as GB."""
    text = row[column].strip() if column in row else ""
    return number({column: text}, column) * 1000 * MIB if text else None


def _profile(gpu: str) -> str:
    found = profile_of_device(gpu)
    if found is not None:
        return found
    chip = gpu.split("-")[0].split()[0].lower() if gpu.strip() else ""
    hint = did_you_mean(chip, [*list_hardware()])
    raise ValueError(
        f"gpu is '{gpu}', which no profile describes{hint}; a profile is a YAML file with 'base:' "
        "and the groups that differ, see CONTRIBUTING.md"
    )


def _whole(row: Row, column: str, default: int) -> int:
    """A whole number of at least 0; the default where the cell is empty."""
    text = row[column].strip()
    if not text:
        return default
    return 0 if text == "0" else count(row, column, LARGEST)


def _workload(row: Row) -> Workload:
    pipeline = PIPELINES.get(row["pipeline"].strip())
    if pipeline is None:
        known = ", ".join(PIPELINES)
        raise ValueError(f"pipeline is '{row['pipeline']}'; predicted are {known}")
    dense = _dense(row)
    tables = tuple(_tables(row))
    if not tables:
        raise ValueError("n_unweighted and n_weighted are 0 and extra_tables is empty: no tables")
    if row["model"].strip() == "mixed_embedding":
        dense = _mixed(dense, tables)
    elif row["model"].strip() in ("", "test_sparse_nn"):
        # both modules' outputs are put side by side, then again with the dense part's
        width = sum(table.embedding_dim for table in tables)
        dense = replace(dense, activation="swish_layer_norm", copies=(2.0 * width, 0.0))
    else:
        raise ValueError(
            f"model is '{row['model']}'; predicted are test_sparse_nn and mixed_embedding"
        )
    name = row["yaml"] if "yaml" in row else row["run"]
    training = MODES.get(row["mode"].strip().lower())
    if training is None:
        raise ValueError(f"mode is '{row['mode']}'; predicted are train and eval")
    found = Workload(name, count(row, "batch_per_rank"), tables, dense, pipeline)
    return replace(found, training=training)


def _dense(row: Row) -> DenseArch:
    out = _whole(row, "dense_out", DENSE_OUT)
    hidden = tuple(_sizes(row, "dense_hidden"))
    over = _whole(row, "over_out", OVER_OUT)
    layers = _whole(row, "over_layers", OVER_LAYERS)
    return DenseArch(
        _whole(row, "float_features", FLOAT_FEATURES),
        (*hidden, out),
        (over,) * (1 + layers),
        "concat",
        "fp32",
        "sgd",
    )


def _mixed(dense: DenseArch, tables: tuple[Table, ...]) -> DenseArch:
    """One linear layer over pooled outputs and padded sequences.

    Sequences are padded, put side by side, then beside the pooled outputs, then beside the dense
    part's; of these the predictor has one concatenation and one pass over the sequences.
    """
    pooled = sum(t.embedding_dim for t in tables if t.is_pooled)
    padded = sum(MAX_SEQUENCE * t.embedding_dim for t in tables if not t.is_pooled)
    widths = sum(t.embedding_dim for t in tables)
    sequences = sum(t.embedding_dim * t.lookups_per_sample for t in tables if not t.is_pooled)
    moved = 4 * padded + 4 * (pooled + padded) - 2 * widths - sequences
    bottom = dense.bottom_mlp[-1]
    layers = ((dense.in_features, bottom), (pooled + padded + bottom, dense.top_mlp[-1]))
    return DenseArch(
        dense.in_features,
        (),
        (),
        "concat",
        "fp32",
        dense.optimizer,
        layers,
        copies=(max(0.0, moved), 2.0 * padded),
    )


def _sizes(row: Row, column: str) -> Iterator[int]:
    for text in filter(None, row[column].strip().split("-")):
        yield count({column: text}, column)


def _tables(row: Row) -> Iterator[Table]:
    pooling = number(row, "pooling")
    optimizer = _optimizer(row["sparse_optimizer"])
    asked = shardings(row)
    found = _load_factor(row["extra"])

    def table(
        name: str, size: int, dim: int, module: str, data_type: str = "fp32", pooled: bool = True
    ) -> Table:
        wanted = asked.get(name, asked[""])
        cached = wanted.compute_kernel is ComputeKernel.FUSED_UVM_CACHING
        limits = Constraints(
            None if wanted.sharding_type is None else (wanted.sharding_type,),
            (wanted.compute_kernel or ComputeKernel.FUSED,),
            cache_load_factor=found if cached else None,
        )
        return Table(
            name,
            size,
            dim,
            (Feature(f"{name}_ids", pooling),),
            module,
            data_type,
            "sum" if pooled else "none",
            module == WEIGHTED,
            optimizer,
            limits,
        )

    least = count(row, "rows_per_table")
    extra = [*_extra_tables(row)]
    for kind, module, prefix in (
        ("n_unweighted", EBC, "table"),
        ("n_weighted", WEIGHTED, "weighted_table"),
    ):
        for i in range(_whole(row, kind, 0)):
            size = max(least, ROWS_STEP * (i + 1))
            yield table(f"{prefix}_{i}", size, count(row, "dim"), module)
        if module == EBC:
            for name, size, dim, data_type, what in extra:
                if what == "EBC":
                    yield table(name, size, dim, EBC, data_type)
    for name, size, dim, data_type, what in extra:
        if what != "EBC":
            yield table(name, size, dim, EC, data_type, pooled=False)


def _extra_tables(row: Row) -> Iterator[tuple[str, int, int, str, str]]:
    """Name, rows, dimension, data type and kind (EBC or EC) of each further table."""
    for text in row["extra_tables"].split():
        parts = text.split(":")
        shape = parts[1].split("x") if len(parts) > 1 else []
        if len(parts) != 4 or len(shape) != 2 or parts[3] not in ("EBC", "EC"):
            raise ValueError(
                f"extra_tables has '{text}'; a table is name:rows x dim:data type:EBC or EC"
            )
        size, dim = (count({"extra_tables": n}, "extra_tables") for n in shape)
        if parts[2].lower() not in ("fp32", "fp16", "bf16"):
            raise ValueError(f"extra_tables has data type '{parts[2]}'; known are FP32, FP16, BF16")
        yield parts[0], size, dim, parts[2].lower(), parts[3]


def shardings(row: Mapping[str, str]) -> dict[str, Sharding]:
    """Table -> what the row asks of it; under ``""`` what holds for all others.

    Raises:
        ValueError: it names a type or kernel that there is not.
    """
    found = {"": Sharding(_sharding_type(row["default_sharding"]))}
    for text in row["constraints"].split():
        name, _, rest = text.partition(":")
        kind, _, kernel = rest.partition("/")
        found[name] = Sharding(_sharding_type(kind), _kernel(kernel))
    for name, kernel in _KERNEL.findall(row["extra"]):
        if name in found:
            found[name] = Sharding(found[name].sharding_type, _kernel(kernel))
    return found


def _sharding_type(text: str) -> ShardingType | None:
    try:
        return ShardingType(text.strip()) if text.strip() else None
    except ValueError:
        known = ", ".join(ShardingType)
        raise ValueError(f"sharding type '{text}' is none of {known}") from None


def _kernel(text: str) -> ComputeKernel | None:
    try:
        return ComputeKernel(text.strip()) if text.strip() else None
    except ValueError:
        known = ", ".join(ComputeKernel)
        raise ValueError(f"compute kernel '{text}' is none of {known}") from None


def _load_factor(text: str) -> float | None:
    found = _LOAD_FACTOR.search(text)
    return number({"extra": found[1]}, "extra") if found else None


def _optimizer(text: str) -> Optimizer:
    """What tables are trained with.

    A default never reached them: `generate_sharded_model_and_optimizer` (torchrec 1.4.0 and 1.5.0,
    distributed/test_utils/model_config.py) takes ``fused_params`` and shards with
    `get_default_sharders()`, which have none, so that FBGEMM's own default holds, SGD.
    """
    if "default" in text.lower():
        return Optimizer.EXACT_SGD
    word = text.split()[0].upper() if text.strip() else "EXACT_SGD"
    if word not in OPTIMIZERS:
        raise ValueError(f"sparse_optimizer is '{text}'; known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[word]


STATS_FILE = "torchrec_planner_stats.csv"
STATS_COLUMNS = (
    "commit",
    "date",
    "ranks",
    "group",
    "count",
    "sharding",
    "kernel",
    "dim",
    "rows",
    "placed_on",
)
RULE = "TorchRec's rule"
TYPES = {kind.short: kind for kind in ShardingType}


@dataclass(frozen=True)
class Group:
    """Equal tables of one printed plan.

    Args:
        name: the module's path and the tables' name, ``*`` for a number.
        width: columns of a shard.
        placed: (ranks of one table's shards, number of tables placed so).
    """

    commit: str
    date: str
    ranks: int
    name: str
    tables: int
    sharding_type: ShardingType
    kernel: ComputeKernel
    dim: int
    width: int
    rows: int
    placed: tuple[tuple[tuple[int, ...], int], ...]

    def holds(self, table: Table) -> bool:
        """Whether a table may be one of these, by module, name and size."""
        module, _, name = self.name.rpartition(".")
        alike = (table.num_embeddings, table.embedding_dim) == (self.rows, self.dim)
        return alike and module.split(".")[-1] == table.module and _named(name, table.name)


def _named(pattern: str, name: str) -> bool:
    """Whether a name is ``prefix_*``, or one that ends so, as statistics of equal tables merge."""
    if not pattern.endswith("*"):
        return pattern == name
    return name.rstrip("0123456789").endswith(pattern[:-1])


def parse_group(row: Row) -> Group | None:
    """The group of a row; None for the totals of a rank.

    Raises:
        ValueError: says which cell cannot be used, and why.
    """
    if not row["sharding"].strip():
        return None
    if row["sharding"] not in TYPES:
        raise ValueError(f"sharding is '{row['sharding']}'; known are {', '.join(TYPES)}")
    try:
        kernel = ComputeKernel(row["kernel"])
    except ValueError:
        raise ValueError(
            f"kernel is '{row['kernel']}', none of {', '.join(ComputeKernel)}"
        ) from None
    dim, _, width = row["dim"].partition(" ")
    columns = count({"dim": dim}, "dim")
    return Group(
        row["commit"],
        row["date"],
        count(row, "ranks", MOST_RANKS),
        row["group"],
        count(row, "count"),
        TYPES[row["sharding"]],
        kernel,
        columns,
        count({"dim": width.strip("()")}, "dim") if width else columns,
        count(row, "rows"),
        tuple(_placed(row["placed_on"])),
    )


def _placed(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """``0:45 1:45``: 45 tables on either; ``0,0,1,1:1``: shards of one; ``0-1:10``: on each."""
    for part in text.split():
        ranks, _, tables = part.partition(":")
        first, _, last = ranks.partition("-")
        try:
            where = (
                tuple(range(int(first), int(last) + 1))
                if last
                else tuple(int(rank) for rank in ranks.split(","))
            )
            yield where, int(tables)
        except ValueError:
            raise ValueError(f"placed_on has '{part}'; it is ranks:number of tables") from None


@dataclass(frozen=True)
class StepPlan:
    """A plan, and the commit that printed it or `RULE`."""

    plan: ShardingPlan
    source: str


def plan_of(
    workload: Workload, ranks: int, commit: str, groups: Sequence[Group], hardware: HardwareProfile
) -> StepPlan:
    """The plan of a run.

    Args:
        commit: whose plan is looked at first.
        groups: of all printed plans.

    Raises:
        ShardoptError: none was printed, and none fits by the rule.
    """
    latest = sorted(groups, key=lambda g: g.date, reverse=True)
    printed = [(name, [*found]) for name, found in groupby(latest, key=lambda g: g.commit)]
    for name, found in sorted(printed, key=lambda item: item[0] != commit):
        tables = _from_groups(workload, ranks, found)
        if tables is not None:
            return StepPlan(ShardingPlan(tables, ranks, ranks), f"printed in {name}")
    machine = Topology.uniform(
        ranks, ranks, hbm_bytes=hardware.hbm_bytes, ddr_bytes=hardware.ddr_bytes
    )
    topology = reserve_topology(workload, machine, device=hardware.device)
    made = torchrec_plan(workload, topology, hardware.device)
    if made is None:
        raise ShardoptError("no plan was printed, and TorchRec's planner finds none that fits")
    return StepPlan(
        ShardingPlan(dict(zip(workload.keys, made.tables, strict=True)), ranks, ranks), RULE
    )


def _from_groups(
    workload: Workload, ranks: int, groups: Sequence[Group]
) -> dict[str, TablePlan] | None:
    """Every table's sharding, None where the groups do not hold them all as the run asks."""
    places = {group: [where for where, n in _dealt(group) for _ in range(n)] for group in groups}
    found = {}
    for key, table in zip(workload.keys, workload.tables, strict=True):
        group = next((g for g in groups if g.ranks == ranks and g.holds(table) and places[g]), None)
        if group is None or not _allowed(table, group):
            return None
        where = places[group].pop(0)
        found[key] = TablePlan(
            group.sharding_type, group.kernel, tuple(_shards(table, group, where)), table.module
        )
    return found


def _dealt(group: Group) -> Iterator[tuple[tuple[int, ...], int]]:
    """Places one table at a time, in turn: the tables are alike, and a run may have fewer."""
    left = dict(group.placed)
    while any(left.values()):
        for where in left:
            if left[where]:
                left[where] -= 1
                yield where, 1


def _allowed(table: Table, group: Group) -> bool:
    limits = table.constraints
    return (limits.sharding_types is None or group.sharding_type in limits.sharding_types) and (
        limits.compute_kernels is None or group.kernel in limits.compute_kernels
    )


def _shards(table: Table, group: Group, where: tuple[int, ...]) -> Iterator[Shard]:
    rows, dim = table.num_embeddings, table.embedding_dim
    if group.sharding_type is ShardingType.ROW_WISE:
        block = -(-rows // len(where))
        for i, rank in enumerate(where):
            start = min(i * block, rows)
            yield Shard(rank, (start, 0), (min(block, rows - start), dim))
    elif group.sharding_type is ShardingType.DATA_PARALLEL:
        for rank in where:
            yield Shard(rank, (0, 0), (rows, dim))
    else:
        for i, rank in enumerate(where):
            start = i * group.width
            yield Shard(rank, (0, start), (rows, min(group.width, dim - start)))


Backward = Callable[[Operand], Operand]


def benchmark_program(workload: Workload) -> DenseProgram:
    """What one rank of the benchmark runs, at the workload's batch size."""
    return _Benchmark(workload).write()


class _Benchmark(OpWriter):
    def __init__(self, workload: Workload) -> None:
        super().__init__("fp32")
        self.workload = workload
        self.batch = workload.batch_size
        self.given = {m: self._outputs(m) for m in workload.modules}

    def write(self) -> DenseProgram:
        features = self.tensor((self.batch, self.workload.dlrm.in_features))
        mixed = bool(self.workload.dlrm.linears)
        dims = self.workload.dlrm.linears[:1] if mixed else ()
        widths = [o for _, o in dims] if mixed else self.workload.dlrm.bottom_mlp
        sparse, frame, sparse_back = self._mixed() if mixed else self._regrouped()
        dense, dense_back = self._layers(features, widths, swish=False)
        joined = self.op("cat", [dense, *sparse], self._wide(dense, *sparse))
        over = [o for _, o in self.workload.dlrm.linears[1:]] or self.workload.dlrm.top_mlp
        out, over_back = self._layers(joined, over, swish=not mixed)
        self.events.append(OpCall("frame", (*sparse, *frame), ()))
        forward, self.events = self.events, []
        grad = over_back(self.op("mean_backward", [out], self.like(out)))
        dense_back(self.columns(grad, 0, dense.shape[-1]))
        sparse_back(self.columns(grad, dense.shape[-1], joined.shape[-1] - dense.shape[-1]))
        backward, self.events = self.events, []
        self.each("_foreach_add_", self.parameters, self.gradients)
        kept = [*self.parameters, features]
        parts = free_after_last_use((forward, backward, self.events), kept)
        first, second, step = parts
        # the model that was not sharded stays beside the one that was (`runner` of the benchmark)
        whole = [self.like(parameter) for parameter in self.parameters]
        return DenseProgram(self.batch, first, second, step, (*self.parameters, *whole))

    def _tables(self, module: str) -> list[Table]:
        return [t for t in self.workload.tables if t.module == module]

    def _outputs(self, module: str) -> tuple[Operand, ...]:
        tables = self._tables(module)
        if tables[0].is_pooled:
            return (self.tensor((self.batch, sum(t.embedding_dim for t in tables))),)
        ids = [round(self.batch * t.lookups_per_sample) for t in tables]
        # one tensor for all features, of which each takes its part
        return (self.tensor((sum(ids), tables[0].embedding_dim)),)

    def _wide(self, *parts: Operand) -> Operand:
        return self.tensor((self.batch, sum(p.shape[-1] for p in parts)))

    def _layers(
        self, x: Operand, widths: Sequence[int], *, swish: bool
    ) -> tuple[Operand, Backward]:
        backs: list[Backward] = []
        for out in widths:
            x, back = self._linear(x, out)
            backs.append(back)
            if swish:
                x, back = self._swish(x)
                backs.append(back)

        def backward(grad: Operand) -> Operand:
            for back in reversed(backs):
                grad = back(grad)
            return grad

        return x, backward

    def _linear(self, x: Operand, out: int) -> tuple[Operand, Backward]:
        weight, take = self.parameter(out, x.shape[-1])
        y = self.op("addmm", [x, weight], self.tensor((self.batch, out)))

        def backward(grad: Operand) -> Operand:
            found = self.op("mm", [grad, weight], self.like(x))
            of_weight = self.op("mm", [grad, x], self.like(weight))
            take(of_weight)
            return found

        return y, backward

    def _swish(self, x: Operand) -> tuple[Operand, Backward]:
        normal = self.op("native_layer_norm", [x], self.like(x))
        gate = self.op("sigmoid", [normal], self.like(x))
        y = self.op("mul", [x, gate], self.like(x))

        def backward(grad: Operand) -> Operand:
            of_gate = self.op("mul", [grad, x], self.like(x))
            of_x = self.op("mul", [grad, gate], self.like(x))
            of_normal = self.op("sigmoid_backward", [of_gate, gate], self.like(x))
            found = self.op("native_layer_norm_backward", [of_normal, x], self.like(x))
            return self.op("add", [of_x, found], self.like(x))

        return y, backward

    def _regrouped(self) -> tuple[list[Operand], list[Operand], Callable[[Operand], None]]:
        """The modules' outputs side by side, then one tensor a group."""
        modules = self.workload.modules
        self.events += [Lookup(m, self.given[m]) for m in modules]
        values = [self.given[m][0] for m in modules]
        whole = self.op("cat", values, self._wide(*values))
        groups = [self.like(v) for v in values]
        self.events.append(OpCall("permute_multi_embedding", (whole,), tuple(groups)))

        def backward(grad: Operand) -> None:
            copies, first = [], 0
            for group in groups:
                part = self.columns(grad, first, group.shape[-1])
                copies.append(self.op("clone", [part], self.like(group)))
                first += group.shape[-1]
            self.events.append(OpCall("permute", tuple(copies), (of_whole := self.like(whole),)))
            first = whole.shape[-1]
            for module in reversed(modules):
                width = self.given[module][0].shape[-1]
                first -= width
                part = self.columns(of_whole, first, width)
                self.events.append(LookupBackward(module, (part,)))

        return groups, [whole], backward

    def _mixed(self) -> tuple[list[Operand], list[Operand], Callable[[Operand], None]]:
        """Pooled outputs beside padded sequences."""
        pooled = [m for m in self.workload.modules if self._tables(m)[0].is_pooled]
        others = [m for m in self.workload.modules if m not in pooled]
        parts, backs = [], []
        for module in pooled:
            self.events.append(Lookup(module, self.given[module]))
            parts.append(self.view("values", self.given[module][0]))
        for module in others:
            self.events.append(Lookup(module, self.given[module]))
            values, tables = self.given[module][0], self._tables(module)
            shape = (self.batch, MAX_SEQUENCE * tables[0].embedding_dim)
            padded = [self.op("to_dense", [values], self.tensor(shape)) for _ in tables]
            parts.append(self.op("cat", padded, self._wide(*padded)))
            backs.append((module, values, padded))
        whole = self.op("cat", parts, self._wide(*parts))
        self.events.append(OpCall("frame", tuple(p for _, v, ps in backs for p in (v, *ps)), ()))

        def backward(grad: Operand) -> None:
            first = sum(self.given[m][0].shape[-1] for m in pooled)
            for module, values, padded in backs:
                found = []
                for part in padded:
                    of = self.columns(grad, first, part.shape[-1])
                    share = self.tensor((values.shape[0] // len(padded), values.shape[1]))
                    copied = self.op("clone", [of], self.like(part))
                    found.append(self.op("to_jagged", [copied], share))
                    first += part.shape[-1]
                joined = self.op("cat", found, self.like(values))
                self.events.append(LookupBackward(module, (joined,)))
            first = 0
            for module in pooled:
                width = self.given[module][0].shape[-1]
                part = self.columns(grad, first, width)
                self.events.append(LookupBackward(module, (part,)))
                first += width

        return [whole], [], backward


@dataclass(frozen=True)
class RunMemory:
    """The fullest rank of a run, in bytes.

    Args:
        allocated, reserved: predicted peaks.
        capacity: of its GPU, less what lies outside PyTorch's allocator.
    """

    run: Run
    allocated: float
    reserved: float
    capacity: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of allocated and of reserved bytes, signed; NaN where nothing was measured."""
        return (
            _error(self.allocated, self.run.allocated_bytes),
            _error(self.reserved, self.run.reserved_bytes),
        )


def _error(predicted: float, measured: float | None) -> float:
    return math.nan if measured is None else predicted / measured - 1.0


def memory_of(run: Run, plan: StepPlan) -> RunMemory:
    """What the fullest rank of a run is predicted to need."""
    hardware = load_hardware(run.profile)
    topology = Topology.uniform(
        run.ranks, run.ranks, hbm_bytes=hardware.hbm_bytes, ddr_bytes=hardware.ddr_bytes
    )
    program = benchmark_program(run.workload)
    peaks = rank_peaks(run.workload, topology, plan.plan, program, hardware.device)
    capacity = hardware.hbm_bytes - context_bytes(hardware)
    return RunMemory(
        run,
        max(peak.allocated_bytes for peak in peaks),
        max(peak.reserved_bytes for peak in peaks),
        capacity,
    )


def memory_scores(found: Sequence[RunMemory]) -> tuple[Scores, ...]:
    """Mean errors, and every row."""
    measured = [m for m in found if m.run.reserved_bytes is not None]
    if not measured:
        return ()
    means = (
        ("all", len(measured), *_means(measured), sum(m.reserved > m.capacity for m in measured)),
    )
    return (
        Scores(
            "peak memory",
            (
                *(("rows", "text"), ("n", "count"), ("allocated", "share")),
                *(("reserved", "share"), ("predicted not to fit", "count")),
            ),
            means,
            "mean absolute error of the fullest rank; every run did fit",
        ),
        Scores(
            "peak memory of every row, GiB",
            (
                *(("commit", "text"), ("run", "text"), ("allocated", "figure")),
                *(("predicted", "figure"), ("error", "signed"), ("reserved", "figure")),
                *(("predicted reserve", "figure"), ("error of reserve", "signed")),
            ),
            tuple(_row(m) for m in measured),
        ),
    )


def _means(of: Sequence[RunMemory]) -> tuple[float, float]:
    allocated = [abs(m.errors[0]) for m in of if not math.isnan(m.errors[0])]
    reserved = [abs(m.errors[1]) for m in of if not math.isnan(m.errors[1])]
    return fmean(allocated or [math.nan]), fmean(reserved or [math.nan])


def _row(m: RunMemory) -> tuple[Cell, ...]:
    allocated, reserved = m.errors
    return (
        m.run.commit,
        m.run.name,
        _gib(m.run.allocated_bytes),
        m.allocated / GIB,
        allocated,
        _gib(m.run.reserved_bytes),
        m.reserved / GIB,
        reserved,
    )


def _gib(size: float | None) -> float | None:
    return None if size is None else size / GIB


SIGMAS = 2.0
"""Two runs differ if their ratio is this many standard deviations of a ratio of repeats."""
UNKNOWN_NOISE = 0.05
"""Mean error of repeats where the table has none."""

Pair = tuple[tuple[Run, ComparedRow], tuple[Run, ComparedRow]]


def order_scores(compared: Sequence[tuple[Run, ComparedRow]], noise: Summary) -> tuple[Scores, ...]:
    """Pairs of runs of one commit on one GPU, by whether their order was predicted.

    Args:
        noise: of repeats.
    """
    commits = defaultdict(list)
    for run, row in compared:
        commits[run.commit, run.gpu, run.steady].append((run, row))
    pairs = [pair for found in commits.values() for pair in combinations(found, 2)]
    told = [pair for pair in pairs if pair[0][0].key != pair[1][0].key]
    alike = [pair for pair in pairs if pair[0][0].key == pair[1][0].key]
    of_kind = _noise_by_kind(compared, noise)
    every = _least(noise)
    rows = (
        ("apart by more than the noise of all repeats", [p for p in told if _distance(p) > every]),
        (
            "apart by more than the noise of their own configurations",
            [p for p in told if _distance(p) > max(of_kind[run.workload.name] for run, _ in p)],
        ),
        ("all of unlike configuration", told),
    )
    unknown = sum(_distance(pair) > every for pair in alike)
    cells = [(name, *_share(found)) for name, found in rows]
    cells.append(("no column tells them apart, but their times do", unknown, 0, math.nan))
    return (
        Scores(
            "order within a commit",
            (("pairs", "text"), ("n", "count"), ("right", "count"), ("share", "share")),
            tuple(cells),
            f"by the noise of all repeats, times differ if they are {math.expm1(every):.0%} apart",
        ),
    )


def _least(noise: Summary) -> float:
    """Log ratio above which two times differ."""
    mean = UNKNOWN_NOISE if math.isnan(noise.mape) else noise.mape
    return SIGMAS * math.sqrt(2.0) * SIGMA_OVER_MEAN * mean


def _noise_by_kind(compared: Sequence[tuple[Run, ComparedRow]], noise: Summary) -> dict[str, float]:
    """Model -> log ratio above which its runs differ; that of all where it was not repeated."""
    kinds = defaultdict(list)
    for run, row in compared:
        kinds[run.workload.name].append((run.key, row.measured_ms))
    found = {name: noise_of(times) for name, times in kinds.items()}
    return {name: _least(own if own.n else noise) for name, own in found.items()}


def _distance(pair: Pair) -> float:
    (_, a), (_, b) = pair
    return abs(math.log(a.measured_ms / b.measured_ms))


def _share(pairs: Sequence[Pair]) -> tuple[int, int, float]:
    right = sum(
        (a.measured_ms - b.measured_ms) * (a.predicted_ms - b.predicted_ms) > 0
        for (_, a), (_, b) in pairs
    )
    return len(pairs), right, right / len(pairs) if pairs else math.nan


STEADY, COLD = "steady steps", "one cold loop"
UNLIKE = "with work that is not modelled"


def validate_torchrec_steps(folder: Path) -> Report:
    """Predict every row of the table in ``folder``.

    Raises:
        InputError: the folder or the tables are not there.
    """
    data_folder(folder, [FILE, STATS_FILE], every=True)
    table = read_table(folder / FILE, COLUMNS, parse_run)
    printed = read_table(folder / STATS_FILE, STATS_COLUMNS, parse_group)
    groups = tuple(group for group in printed.rows if group is not None)
    needs: list[RunMemory] = []
    skipped = [*table.problems, *printed.problems]
    pairs: list[tuple[Run, ComparedRow]] = []
    for run in table.rows:
        try:
            pairs.append((run, _compared(run, groups)))
            needs.append(memory_of(run, _plan(run, groups)))
        except ShardoptError as error:
            skipped.append(f"{run.commit} {run.name}: {error}")
    rows = tuple(row for _, row in pairs)
    kept = [pair for pair in pairs if not pair[0].unlike]
    noise = noise_of((run.key, run.measured_ms) for run, _ in kept)
    return Report(
        "torchrec-steps",
        rows,
        STEADY,
        tuple(skipped),
        NOTES,
        held_out=(COLD, UNLIKE),
        scores=(*order_scores(kept, noise), *_excess(pairs), *memory_scores(needs)),
        noise={"repeats of one configuration": noise},
    )


NOTES = (
    "the GPU of most rows was inferred from memory totals and step time, not stated: column "
    "certainty",
    "nothing was fitted on the times of these rows",
)


def _excess(pairs: Sequence[tuple[Run, ComparedRow]]) -> tuple[Scores, ...]:
    """What cold loops took beyond the steady steps predicted for them."""
    kinds = defaultdict(list)
    for run, row in pairs:
        if row.part == COLD:
            more_s = run.batches * (row.measured_ms - row.predicted_ms) / 1e3
            kinds[run.profile, run.workload.name].append(
                (row.measured_ms / row.predicted_ms, more_s)
            )
    cells = [
        (*kind, len(found), median(a for a, _ in found) - 1.0, median(b for _, b in found))
        for kind, found in kinds.items()
    ]
    columns = (
        *(("profile", "text"), ("model", "text"), ("n", "count")),
        *(("excess", "signed"), ("seconds a loop", "figure")),
    )
    about = "medians; a steady loop of the same model on GB200 took 0.5 s less than its cold one"
    return (Scores("excess of cold loops", columns, tuple(cells), about),) if cells else ()


def _compared(run: Run, groups: tuple[Group, ...]) -> ComparedRow:
    found, iteration_ms, interval_ms = _predicted(run, groups)
    part = UNLIKE if run.unlike else STEADY if run.steady else COLD
    name: dict[str, str | int | float] = {
        "commit": run.commit,
        "run": run.name,
        "gpu": run.gpu,
        "certainty": run.certainty,
        "profile": run.profile,
        "ranks": run.ranks,
        "batch_per_rank": run.workload.batch_size,
        "pipeline": run.workload.train_pipeline,
        "plan": found,
    }
    if run.unlike:
        name["not modelled"] = run.unlike
    return ComparedRow(
        name,
        run.measured_ms,
        iteration_ms,
        f"{run.profile}, {run.workload.name}",
        part,
        "meta-pytorch/torchrec, benchmark_train_pipeline",
        interval_ms,
    )


@cache
def _plan(run: Run, groups: tuple[Group, ...]) -> StepPlan:
    hardware = load_hardware(run.profile)
    return plan_of(run.workload, run.ranks, run.plan_commit, groups, hardware)


@cache
def _predicted(run: Run, groups: tuple[Group, ...]) -> tuple[str, float, tuple[float, float]]:
    """Where the plan comes from, the time of a step and its interval.

    A run called masked tells FBGEMM that no gradients of per-sample weights are wanted.
    """
    hw = load_hardware(run.profile)
    if "masked" in run.name:
        lookups = hw.embedding.model_copy(update={"weight_gradient": 0.0})
        hw = hw.model_copy(update={"embedding": lookups})
    found = _plan(run, groups)
    topology = Topology.uniform(
        run.ranks,
        min(run.ranks, hw.gpus_per_host),
        hbm_bytes=hw.hbm_bytes,
        ddr_bytes=hw.ddr_bytes,
    )
    prediction = predict(run.workload, topology, hw, found.plan)
    return found.source, prediction.iteration_ms, prediction.interval_ms
