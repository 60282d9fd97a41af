"""A row of the table as what was trained: model, batch, pipeline, GPU.

The model is that of TorchRec's `benchmark_train_pipeline.py`: `TestSparseNN` (a dense MLP without
activations, pooled embeddings, `TestOverArchLarge`) or `TestMixedEmbeddingSparseArch` (sequences
padded to 20 ids beside pooled embeddings, one linear layer); torchrec/distributed/test_utils/
test_model.py. Ids are uniform. Cells that a row leaves empty have that file's defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from predictor.csv_rows import LARGEST, MOST_RANKS, Row, count, number
from predictor.errors import did_you_mean
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import list_hardware
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, DenseArch, Feature, Optimizer, Table, Workload
from predictor.units import MIB

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
