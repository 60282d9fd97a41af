"""Steps of TorchRec's pipeline benchmark: model, plan and time of each row.

The model is that of TorchRec's `benchmark_train_pipeline.py`: `TestSparseNN` (a dense MLP without
activations, pooled embeddings, `TestOverArchLarge`) or `TestMixedEmbeddingSparseArch` (sequences
padded to 20 ids beside pooled embeddings, one linear layer); torchrec/distributed/test_utils/
test_model.py. Ids are uniform. Cells that a row leaves empty have that file's defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from lab.planners.reservation import torchrec_default_plan
from lab.statistics import grouped
from lab.suites import COLUMNS, SUITES, Cell, ComparedRow, Report, Summary, noise_of
from lab.validate.tables import known, profile_of_row, ranks_of, read
from lab.validate.torchrec_memory import MAX_SEQUENCE, StepMemory, memory_of
from predictor.csv_rows import LARGEST, MOST_RANKS, Row, count, number
from predictor.errors import ShardoptError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import SIGMA_OVER_MEAN, HardwareProfile
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import (
    INFERENCE,
    TRAINING,
    Constraints,
    DenseArch,
    Feature,
    Optimizer,
    Table,
    Workload,
)
from predictor.predict import predict
from predictor.units import GIB, MIB

FILE = "torchrec_steps_measured.csv"
STATS_FILE = "torchrec_planner_stats.csv"
CONFIGURATION = tuple(
    c for c in COLUMNS[FILE] if c not in ("commit", "run", "ms_per_batch", "steady_ms_per_batch")
)
"""Columns that identify a configuration; rows equal in all of them are repeats."""
STEADY, COLD = "steady steps", "one cold loop"
UNLIKE = "with work that is not modelled"
UNKNOWN = ("shampoo", "sync_fwd", "mpzch", "kvzch", "ssd", "stash", "ems", "vbe")
"""Words for features that the predictor does not model."""

FLOAT_FEATURES, DENSE_OUT, OVER_OUT, OVER_LAYERS = 10, 8, 16, 5
"""TorchRec's defaults (`DENSE_LAYER_OUT_SIZE`, `OVER_ARCH_OUT_SIZE` of test_model.py)."""
ROWS_STEP = 1000
"""Table i has at least this many rows times i + 1 (`EmbeddingTablesConfig`)."""
PIPELINES = {
    "base": "base",
    "sparse": "sparse_dist",
    "prefetch": "prefetch_sparse_dist",
    # evaluation exchanges ids ahead as training does; a fused pipeline starts lookups ahead as well
    "eval-sdd": "sparse_dist",
    "eval-fused": "sparse_dist",
    "eval": "sparse_dist",
}
MODES = dict.fromkeys(("", "train", "training"), TRAINING)
MODES |= dict.fromkeys(("eval", "evaluation"), INFERENCE)
OPTIMIZERS = {
    "EXACT_SGD": Optimizer.EXACT_SGD,
    "SGD": Optimizer.EXACT_SGD,
    "EXACT_ADAGRAD": Optimizer.ADAGRAD,
    "EXACT_ROWWISE_ADAGRAD": Optimizer.ROWWISE_ADAGRAD,
    "EXACT_ROW_WISE_ADAGRAD": Optimizer.ROWWISE_ADAGRAD,
    "ADAM": Optimizer.ADAM,
    "PARTIAL_ROWWISE_ADAM": Optimizer.PARTIAL_ROWWISE_ADAM,
}
MODELS = {"": "test_sparse_nn", "test_sparse_nn": "test_sparse_nn", "mixed_embedding": "mixed"}
DATA_TYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16"}
SHARDING_TYPES: dict[str, ShardingType | None] = {"": None, **{t.value: t for t in ShardingType}}
KERNELS: dict[str, ComputeKernel | None] = {"": None, **{k.value: k for k in ComputeKernel}}
EBC, WEIGHTED, EC = "ebc", "weighted_ebc", "ec"
"""Modules, in the order in which the model runs them."""
_LOAD_FACTOR = re.compile(r"cache_load_factor\s+([0-9.]+)")
_KERNEL = re.compile(r"(\w+)\s+(fused_uvm_caching|fused_uvm|fused)\b")


@dataclass(frozen=True)
class Run:
    """Run of one row.

    Args:
        steady: the time is that of a steady loop, not of a cold one.
        batches: batches of that loop.
        key: equal for runs of one configuration.
        profile: profile of its GPU.
        unlike: features of the run that the predictor does not model; empty if none.
        allocated_bytes, reserved_bytes: peaks of the fullest rank, if the row has them.
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
    key: tuple[str, ...]
    unlike: str
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None

    @property
    def part(self) -> str:
        return UNLIKE if self.unlike else STEADY if self.steady else COLD


def parse_run(row: Row) -> Run:
    """Parse the run of a row.

    Raises:
        ValueError: a cell cannot be used.
    """
    steady_text = row["steady_ms_per_batch"].strip()
    steady = bool(steady_text) or _whole(row, "num_benchmarks", 1) > 1
    measured = number(row, "steady_ms_per_batch" if steady_text else "ms_per_batch")
    notes = " ".join((row["run"], row["extra"], row["model"])).lower().replace("-", "_")
    unlike = (word for word in UNKNOWN if re.search(rf"(?<![a-z]){word}(?![a-z])", notes))
    return Run(
        row["commit"],
        row["run"],
        row["gpu"],
        row["gpu_certainty"],
        profile_of_row(row).name,
        count(row, "world_size", MOST_RANKS),
        steady,
        _whole(row, "n_batches", 0),
        measured,
        row["plan_commit"].strip(),
        _workload(row),
        tuple(row[column].strip() for column in CONFIGURATION),
        ", ".join(unlike),
        _peak(row, "peak_alloc_GB"),
        _peak(row, "peak_reserved_GB"),
    )


def _peak(row: Row, column: str) -> float | None:
    """Return a peak in bytes; the table's GB are the harness's MiB over a thousand."""
    return number(row, column) * 1000 * MIB if row.get(column, "").strip() else None


def _whole(row: Row, column: str, default: int) -> int:
    """Return a whole number of at least 0; the default where the cell is empty."""
    text = row[column].strip()
    if not text:
        return default
    return 0 if text == "0" else count(row, column, LARGEST)


def _workload(row: Row) -> Workload:
    pipeline, mixed = known(row, "pipeline", PIPELINES), known(row, "model", MODELS) == "mixed"
    mode = known({"mode": row["mode"].lower()}, "mode", MODES)
    tables = tuple(_tables(row))
    if not tables:
        raise ValueError("n_unweighted and n_weighted are 0 and extra_tables is empty: no tables")
    hidden = row["dense_hidden"].strip().split("-")
    widths = (count({"dense_hidden": text}, "dense_hidden") for text in hidden if text)
    over = _whole(row, "over_out", OVER_OUT)
    dense = DenseArch(
        _whole(row, "float_features", FLOAT_FEATURES),
        (*widths, _whole(row, "dense_out", DENSE_OUT)),
        (over,) * (1 + _whole(row, "over_layers", OVER_LAYERS)),
        "concat",
        "fp32",
        "sgd",
    )
    if mixed:
        dense = _mixed(dense, tables)
    else:
        # both modules' outputs are put side by side, then again with the dense part's
        width = sum(table.embedding_dim for table in tables)
        dense = replace(dense, activation="swish_layer_norm", copies=(2.0 * width, 0.0))
    name = row["yaml"] if "yaml" in row else row["run"]
    workload = Workload(name, count(row, "batch_per_rank"), tables, dense, pipeline)
    return replace(workload, mode=mode)


def _mixed(dense: DenseArch, tables: tuple[Table, ...]) -> DenseArch:
    """Return a dense part of one linear layer over pooled outputs and padded sequences.

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
    return replace(
        dense,
        bottom_mlp=(),
        top_mlp=(),
        linears=layers,
        copies=(max(0.0, moved), 2.0 * padded),
    )


def _tables(row: Row) -> Iterator[Table]:
    pooling = number(row, "pooling")
    optimizer = _optimizer(row["sparse_optimizer"])
    required = _asked(row)
    match = _LOAD_FACTOR.search(row["extra"])
    load_factor = number({"extra": match[1]}, "extra") if match else None

    def table(name: str, size: int, dim: int, module: str, data_type: str = "fp32") -> Table:
        kind, kernel = required.get(name, required[""])
        cached = kernel is ComputeKernel.FUSED_UVM_CACHING
        return Table(
            name,
            size,
            dim,
            (Feature(f"{name}_ids", pooling),),
            module,
            data_type,
            "none" if module == EC else "sum",
            module == WEIGHTED,
            optimizer,
            Constraints(
                None if kind is None else (kind,),
                (kernel or ComputeKernel.FUSED,),
                cache_load_factor=load_factor if cached else None,
            ),
        )

    least, extra = count(row, "rows_per_table"), [*_extra_tables(row)]
    for column, module, prefix in (
        ("n_unweighted", EBC, "table"),
        ("n_weighted", WEIGHTED, "weighted_table"),
        (None, EC, ""),
    ):
        for i in range(_whole(row, column, 0) if column else 0):
            size = max(least, ROWS_STEP * (i + 1))
            yield table(f"{prefix}_{i}", size, count(row, "dim"), module)
        for name, size, dim, data_type, table_module in extra:
            if table_module == module:
                yield table(name, size, dim, module, data_type)


def _extra_tables(row: Row) -> Iterator[tuple[str, int, int, str, str]]:
    """Yield name, rows, dimension, data type and module of each further table."""
    for text in row["extra_tables"].split():
        name, *rest = text.split(":")
        shape = rest[0].split("x") if rest else []
        if len(rest) != 3 or len(shape) != 2 or rest[2] not in ("EBC", "EC"):
            raise ValueError(
                f"extra_tables has '{text}'; a table is name:rows x dim:data type:EBC or EC"
            )
        size, dim = (count({"extra_tables": n}, "extra_tables") for n in shape)
        data_type = {"data type": rest[1].upper()}
        yield name, size, dim, known(data_type, "data type", DATA_TYPES), rest[2].lower()


def _asked(row: Row) -> dict[str, tuple[ShardingType | None, ComputeKernel | None]]:
    """Return table -> required type and kernel, None where the row leaves them open.

    The key ``""`` holds for all other tables.
    """

    def kind_of(text: str) -> ShardingType | None:
        return known({"sharding type": text}, "sharding type", SHARDING_TYPES)

    required = {"": (kind_of(row["default_sharding"]), KERNELS[""])}
    for text in row["constraints"].split():
        name, _, rest = text.partition(":")
        kind, _, kernel = rest.partition("/")
        required[name] = kind_of(kind), known({"kernel": kernel}, "kernel", KERNELS)
    for name, kernel in _KERNEL.findall(row["extra"]):
        if name in required:
            required[name] = required[name][0], KERNELS[kernel]
    return required


def _optimizer(text: str) -> Optimizer:
    """Return the optimizer of the tables.

    A default never reached them: `generate_sharded_model_and_optimizer` (torchrec 1.4.0 and 1.5.0,
    distributed/test_utils/model_config.py) takes ``fused_params`` and shards with
    `get_default_sharders()`, which have none, so that FBGEMM's own default holds, SGD.
    """
    if not text.strip() or "default" in text.lower():
        return Optimizer.EXACT_SGD
    word = {"sparse_optimizer": text.split()[0].upper()}
    return known(word, "sparse_optimizer", OPTIMIZERS)


RULE = "TorchRec's rule"
TYPES = {kind.short: kind for kind in ShardingType}


@dataclass(frozen=True)
class Group:
    """Group of equal tables in a printed plan.

    Args:
        name: the module's path and the tables' name, ``*`` for a number.
        width: columns of a shard.
        placed: pairs of the ranks of a table's shards and the number of such tables.
    """

    commit: str
    date: str
    ranks: int
    name: str
    sharding_type: ShardingType
    kernel: ComputeKernel
    dim: int
    width: int
    rows: int
    placed: tuple[tuple[tuple[int, ...], int], ...]

    def holds(self, table: Table) -> bool:
        """Return true if a table may belong to the group, by module, name and size.

        Its name is ``prefix_*``, or ends so, because statistics of equal tables merge.
        """
        module, _, name = self.name.rpartition(".")
        alike = (table.num_embeddings, table.embedding_dim) == (self.rows, self.dim)
        if not (alike and module.split(".")[-1] == table.module):
            return False
        if not name.endswith("*"):
            return name == table.name
        return table.name.rstrip("0123456789").endswith(name[:-1])

    def places(self) -> list[tuple[int, ...]]:
        """Return the ranks of its tables, dealt in turn because a run may have fewer tables."""
        remaining = [[where] * number_of for where, number_of in self.placed]
        return [
            where.pop()
            for _ in range(max(map(len, remaining), default=0))
            for where in remaining
            if where
        ]

    def table_plan(self, table: Table, where: tuple[int, ...]) -> TablePlan:
        """Return the plan of one of its tables on some ranks."""
        rows, dim, kind = table.num_embeddings, table.embedding_dim, self.sharding_type
        shards = []
        block = -(-rows // len(where))
        for i, rank in enumerate(where):
            if kind is ShardingType.ROW_WISE:
                start = min(i * block, rows)
                shards.append(Shard(rank, (start, 0), (min(block, rows - start), dim)))
            elif kind is ShardingType.DATA_PARALLEL:
                shards.append(Shard(rank, (0, 0), (rows, dim)))
            else:
                start = i * self.width
                shards.append(Shard(rank, (0, start), (rows, min(self.width, dim - start))))
        return TablePlan(kind, self.kernel, tuple(shards), table.module)


def parse_group(row: Row) -> Group | None:
    """Parse the group of a row; None for the totals of a rank.

    Raises:
        ValueError: a cell cannot be used.
    """
    if not row["sharding"].strip():
        return None
    kind, kernel = known(row, "sharding", TYPES), known(row, "kernel", KERNELS)
    if kernel is None:
        raise ValueError("kernel is not given")
    dim, _, width = row["dim"].partition(" ")
    columns = count({"dim": dim}, "dim")
    return Group(
        row["commit"],
        row["date"],
        count(row, "ranks", MOST_RANKS),
        row["group"],
        kind,
        kernel,
        columns,
        count({"dim": width.strip("()")}, "dim") if width else columns,
        count(row, "rows"),
        tuple(_placed(row["placed_on"])),
    )


def _placed(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Parse placements: ``0:45 1:45`` (45 tables each), ``0,0,1,1:1`` (shards), ``0-1:10``."""
    for part in text.split():
        ranks, _, tables = part.partition(":")
        first, _, last = ranks.partition("-")
        try:
            where = range(int(first), int(last) + 1) if last else map(int, ranks.split(","))
            yield tuple(where), int(tables)
        except ValueError:
            raise ValueError(f"placed_on has '{part}'; it is ranks:number of tables") from None


def plan_of(
    workload: Workload, ranks: int, commit: str, groups: Sequence[Group], hardware: HardwareProfile
) -> tuple[str, ShardingPlan]:
    """Return the plan of a run, and the commit that printed it or `RULE`.

    Args:
        commit: commit whose plan is tried first, before the others, the latest first.
        groups: groups of all printed plans.

    Raises:
        ShardoptError: no plan was printed, and none fits by the rule.
    """
    latest = sorted(groups, key=lambda g: g.date, reverse=True)
    printed = grouped(latest, lambda g: g.commit)
    for name in sorted(printed, key=lambda name: name != commit):
        tables = _from_groups(workload, ranks, printed[name])
        if tables is not None:
            return f"printed in {name}", ShardingPlan(tables, ranks, ranks)
    machine = ranks_of(hardware, ranks, ranks)
    return RULE, torchrec_default_plan(workload, machine, hardware.device)[1]


def _from_groups(
    workload: Workload, ranks: int, groups: Sequence[Group]
) -> dict[str, TablePlan] | None:
    """Return every table's sharding, None where the groups do not match the run."""
    places = {group: group.places() for group in groups}
    plans = {}
    for key, table in zip(workload.keys, workload.tables, strict=True):
        group = next((g for g in groups if g.ranks == ranks and g.holds(table) and places[g]), None)
        if group is None:
            return None
        types, kernels = table.constraints.sharding_types, table.constraints.compute_kernels
        if not (types is None or group.sharding_type in types):
            return None
        if not (kernels is None or group.kernel in kernels):
            return None
        plans[key] = group.table_plan(table, places[group].pop(0))
    return plans


def validate_torchrec_steps(folder: Path) -> Report:
    table = read(folder, FILE, parse_run)
    printed = read(folder, STATS_FILE, parse_group)
    groups = [group for group in printed.rows if group is not None]
    skipped = [*table.problems, *printed.problems]
    pairs: list[tuple[Run, ComparedRow]] = []
    needs: list[tuple[Run, StepMemory]] = []
    for run in table.rows:
        try:
            hardware = load_hardware(run.profile)
            source, plan = plan_of(run.workload, run.ranks, run.plan_commit, groups, hardware)
            pairs.append((run, _compared(run, source, plan)))
            if run.reserved_bytes is not None:
                needs.append((run, memory_of(run.workload, run.profile, run.ranks, plan)))
        except ShardoptError as error:
            skipped.append(f"{run.commit} {run.name}: {error}")
    modelled = [pair for pair in pairs if not pair[0].unlike]
    noise = noise_of((run.key, run.measured_ms) for run, _ in modelled)
    suite = SUITES["torchrec-steps"]
    means, every = memory_rows(needs)
    return suite.report(
        [row for _, row in pairs],
        skipped,
        scores=(
            suite.table(
                "order within a commit",
                order_rows(modelled, noise),
                apart=math.expm1(_least(noise)),
            ),
            suite.table("excess of cold loops", _excess(pairs)),
            suite.table("peak memory", means),
            suite.table("peak memory of every row, GiB", every),
        ),
        noise={"repeats of one configuration": noise},
    )


Lines = list[tuple[Cell, ...]]


def memory_rows(needs: Sequence[tuple[Run, StepMemory]]) -> tuple[Lines, Lines]:
    """Return mean errors, and every row; both empty without rows."""
    every: Lines = []
    errors: tuple[list[float], list[float]] = ([], [])
    for run, memory in needs:
        cells: list[Cell] = []
        pairs = ((run.allocated_bytes, memory.allocated), (run.reserved_bytes, memory.reserved))
        for sizes, (measured, needed) in zip(errors, pairs, strict=True):
            error = None if measured is None else needed / measured - 1.0
            sizes += [] if error is None else [abs(error)]
            cells += [None if measured is None else measured / GIB, needed / GIB, error]
        every.append((run.commit, run.name, *cells))
    if not every:
        return [], []
    misfits = sum(memory.reserved > memory.capacity for _, memory in needs)
    means = (fmean(sizes) if sizes else None for sizes in errors)
    return [("all", len(needs), *means, misfits)], every


def _compared(run: Run, source: str, plan: ShardingPlan) -> ComparedRow:
    """Predict a run; a masked one computes no gradients of per-sample weights."""
    hw = load_hardware(run.profile)
    if "masked" in run.name:
        lookups = hw.embedding.model_copy(update={"weight_gradient": 0.0})
        hw = hw.model_copy(update={"embedding": lookups})
    prediction = predict(run.workload, ranks_of(hw, run.ranks), hw, plan)
    return ComparedRow(
        {
            "commit": run.commit,
            "run": run.name,
            "gpu": run.gpu,
            "certainty": run.certainty,
            "profile": run.profile,
            "ranks": run.ranks,
            "batch_per_rank": run.workload.batch_size,
            "pipeline": run.workload.train_pipeline,
            "plan": source,
            **({"not modelled": run.unlike} if run.unlike else {}),
        },
        run.measured_ms,
        prediction.iteration_ms,
        f"{run.profile}, {run.workload.name}",
        run.part,
        "meta-pytorch/torchrec, benchmark_train_pipeline",
        prediction.interval_ms,
    )


def _excess(pairs: Sequence[tuple[Run, ComparedRow]]) -> Iterator[tuple[Cell, ...]]:
    """Yield the time of cold loops beyond their predicted steady steps."""
    cold = [(run, row) for run, row in pairs if row.part == COLD]
    for kind, runs in grouped(cold, lambda pair: (pair[0].profile, pair[0].workload.name)).items():
        ratio = median(row.measured_ms / row.predicted_ms for _, row in runs)
        more_s = median(
            run.batches * (row.measured_ms - row.predicted_ms) / 1e3 for run, row in runs
        )
        yield (*kind, len(runs), ratio - 1.0, more_s)


SIGMAS = 2.0
"""Standard deviations of a ratio of repeats from which two runs differ."""
UNKNOWN_NOISE = 0.05
"""Mean error of repeats where the table has none."""

Pair = tuple[tuple[Run, ComparedRow], tuple[Run, ComparedRow]]


def order_rows(
    compared: Sequence[tuple[Run, ComparedRow]], noise: Summary
) -> list[tuple[Cell, ...]]:
    """Count pairs of runs of one commit on one GPU whose order was predicted.

    Args:
        noise: errors of repeats.
    """
    commits = grouped(
        compared,
        lambda compared_run: (compared_run[0].commit, compared_run[0].gpu, compared_run[0].steady),
    )
    pairs = [pair for members in commits.values() for pair in combinations(members, 2)]
    distinct = [pair for pair in pairs if pair[0][0].key != pair[1][0].key]
    alike = [pair for pair in pairs if pair[0][0].key == pair[1][0].key]
    every = _least(noise)
    # model -> noise of its own runs, or of all runs where it was not repeated
    of_kind = {}
    for name, runs in grouped(compared, lambda compared_run: compared_run[0].workload.name).items():
        own = noise_of((run.key, row.measured_ms) for run, row in runs)
        of_kind[name] = _least(own if own.n else noise)
    far = [p for p in distinct if _distance(p) > max(of_kind[run.workload.name] for run, _ in p)]
    kinds = {
        "apart by more than the noise of all repeats": [
            p for p in distinct if _distance(p) > every
        ],
        "apart by more than the noise of their own configurations": far,
        "all of unlike configuration": distinct,
    }
    cells: list[tuple[Cell, ...]] = []
    for name, members in kinds.items():
        right = sum(
            (a.measured_ms - b.measured_ms) * (a.predicted_ms - b.predicted_ms) > 0
            for (_, a), (_, b) in members
        )
        cells.append((name, len(members), right, right / len(members) if members else math.nan))
    unknown = sum(_distance(pair) > every for pair in alike)
    return [*cells, ("no column tells them apart, but their times do", unknown, 0, math.nan)]


def _least(noise: Summary) -> float:
    """Return the log ratio above which two times differ."""
    mean = UNKNOWN_NOISE if math.isnan(noise.mape) else noise.mape
    return SIGMAS * math.sqrt(2.0) * SIGMA_OVER_MEAN * mean


def _distance(pair: Pair) -> float:
    (_, a), (_, b) = pair
    return abs(math.log(a.measured_ms / b.measured_ms))
