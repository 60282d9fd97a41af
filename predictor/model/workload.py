"""The model as data: embedding tables with their features, and the dense architecture.

A `Workload` says what one rank trains on in one iteration. It does not depend on plans or hardware.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, PlainValidator

from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.dense_settings import (
    ComputedDense,
    DenseOptimizer,
    DensePart,
    ProductType,
)
from predictor.model.distribution import IndexDistribution, Uniform
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import ReplicaGroups, Topology
from predictor.section import (
    DISTINCT,
    MAX_COUNT,
    MAX_WIDTH,
    NOT_EMPTY,
    NOT_IN_FILE,
    Count,
    Flag,
    Name,
    Section,
    Width,
    choice,
    form,
    named,
    read_at,
    real,
    refuse,
    text,
    whole,
)
from predictor.units import gib, mib

MAX_ROWS = 10**12
Milliseconds = Annotated[float, real(0, 1e7)]


@dataclass(frozen=True)
class DenseTimes(Section):
    """Measured times of one rank's dense part, without lookups and collectives."""

    batch_size: Count
    """The samples per rank when it was measured."""
    forward_ms: Milliseconds
    """The time of its forward kernels."""
    backward_ms: Milliseconds
    """The time of its backward kernels."""
    optimizer_ms: Milliseconds
    """The time of its optimizer step."""
    gradient_mib: Annotated[float, real(0, 1e8)]
    """The MiB of all dense gradients, which are all-reduced."""
    activation_gib: Annotated[float, real(0, 1e5)] | None = None
    """GiB of activations at their peak; left out: not known."""


@dataclass(frozen=True)
class MeasuredDense(DensePart):
    """A dense part by what it took, as `shardopt trace FILE --dense OUT.yaml` writes it."""

    measured: DenseTimes
    """The times and sizes that were measured."""
    in_features: Annotated[int, whole(0, MAX_WIDTH)] = 0
    """Dense inputs of a sample, which are copied to the device."""
    optimizer: DenseOptimizer = "sgd"
    """Optimizer of data-parallel tables."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all dense gradients; the parameters are taken to be as large."""
        return mib(self.measured.gradient_mib)

    @property
    def activation_bytes(self) -> int | None:
        """Most that the forward leaves for the backward; None if it was not measured."""
        activations = self.measured.activation_gib
        return None if activations is None else gib(activations)

    def at_batch_size(self, batch_size: int) -> MeasuredDense:
        """Forward, backward and activations in proportion to the samples; parameters stay.

        An extrapolation: small kernels, whose time does not fall with the batch, are not known.
        """
        times = self.measured
        share = batch_size / times.batch_size
        activations = times.activation_gib
        scaled = replace(
            times,
            batch_size=batch_size,
            forward_ms=times.forward_ms * share,
            backward_ms=times.backward_ms * share,
            activation_gib=None if activations is None else activations * share,
        )
        return replace(self, measured=scaled)


class Optimizer(StrEnum):
    """Optimizers FBGEMM fuses into the embedding backward, by their `EmbOptimType` value."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAGRAD = "exact_adagrad"
    ADAM = "adam"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    LARS_SGD = "lars_sgd"


SYNCED_OPTIMIZERS = (
    Optimizer.SGD,
    Optimizer.EXACT_SGD,
    Optimizer.ROWWISE_ADAGRAD,
    Optimizer.ADAGRAD,
)
"""Optimizers whose states `DMPCollection._cache_sync_tensors` finds
(torchrec/distributed/model_parallel.py): it reads ``state["sum"]``, which only
Adagrad has, and SGD has no state."""

INDEX_BYTES = 8
"""TBE always takes 64-bit indices."""

DATA_TYPE_BYTES: dict[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
WEIGHT_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "nfp8": 8, "int8": 8, "int4": 4}
"""Types of tables by TorchRec's names -> bits of a weight (`DATA_TYPE_NUM_BITS` in
torchrec/modules/embedding_configs.py)."""
INTEGERS = ("int8", "int4")
"""Types of tables that are quantised for inference (torchrec/quant/embedding_modules.py)."""
SCALE_BIAS_BYTES = 4
"""Scale and bias of a row of integers, as halves (``DEFAULT_SCALE_BIAS_SIZE_IN_BYTES`` in
fbgemm_gpu's split_table_batched_embeddings_ops_common.py)."""
ROW_ALIGNMENT = 16
"""Bytes that a row of integers is padded to on GPUs (``row_alignment`` in TorchRec's
quant_embedding_kernel.py); on CPUs it is not padded."""


def row_bytes(data_type: str, columns: int) -> int:
    """Return the bytes of one row of a shard (`rounded_row_size_in_bytes` in fbgemm_gpu's
    split_table_batched_embeddings_ops_inference.py)."""
    size = columns * WEIGHT_BITS[data_type] // 8
    if data_type not in INTEGERS or not columns:
        return size
    return -(-(size + SCALE_BIAS_BYTES) // ROW_ALIGNMENT) * ROW_ALIGNMENT


EmbeddingOptimizer = Annotated[str, choice(Optimizer)]
WireType = Annotated[str, choice(["fp32", "fp16", "bf16"])]


@dataclass(frozen=True)
class Feature(Section):
    """A sparse feature that reads a table."""

    name: Name
    """The feature's key in the KeyedJaggedTensor."""
    pooling_factor: Annotated[float, real(0, 1e6)]
    """Mean ids per sample over the data; it is never assumed to be 1."""
    num_poolings: Annotated[float, real(0, 1e6, above=True)] = 1.0
    """Poolings per sample: objects of a sample that have ids of their own (VBE)."""
    distribution: Annotated[IndexDistribution, named("index_distribution")] = field(
        default_factory=Uniform
    )
    """Spread of ids over the rows of the table; left out: uniform."""
    id_order: Annotated[str, choice(["random", "frequency"])] = "random"
    """`frequency`: low ids are the hot ones, so the first row-wise shard is hot."""
    pooling_factor_std: Annotated[float, real(0, 1e9)] | None = None
    """Standard deviation of the ids per sample and pooling; left out: each sample has the floor or
    the ceiling of their mean, or what a stats file says."""
    pooling_factor_max: Annotated[float, real(0, 1e9, above=True)] | None = None
    """Most ids per sample and pooling, as where histories are cut; left out: no limit, or what a
    stats file says."""
    length_correlation: Annotated[float, real(0, 1)] = 0.0
    """Degree to which lengths of a sample's features go together: two of them correlate by the
    product of theirs; left out: not at all, or what a stats file says."""
    position_weights: Annotated[int, whole(0, MAX_COUNT)] = 0
    """Weights that a feature processor learns, one for each position in a bag (`max_feature_length`
    of TorchRec's `PositionWeightedModule`); 0: there is none."""

    def refuse_contradictions(self) -> None:
        """Numbers from 0 to a largest one that have a mean vary most at the two ends."""
        mean, most = self.pooling_factor, self.pooling_factor_max
        if most is None:
            return
        if most < mean:
            raise refuse(most, f"pooling_factor_max is below the pooling_factor, {mean:g}")
        largest = math.sqrt(mean * (most - mean))
        if (self.pooling_factor_std or 0.0) > largest * (1 + 1e-6):
            raise refuse(
                self.pooling_factor_std,
                f"ids between 0 and {most:g} with a mean of {mean:g} have a pooling_factor_std of "
                f"at most {largest:.6g}",
            )

    @property
    def lookups_per_sample(self) -> float:
        return self.pooling_factor * self.num_poolings


@dataclass(frozen=True)
class Constraints(Section):
    """Limits on the sharding of a table; every key may be left out."""

    sharding_types: (
        Annotated[tuple[Annotated[ShardingType, choice(ShardingType)], ...], NOT_EMPTY] | None
    ) = None
    """Types that the table may have."""
    compute_kernels: (
        Annotated[tuple[Annotated[str, choice(ComputeKernel)], ...], NOT_EMPTY] | None
    ) = None
    """Kernels that the table may have."""
    min_partition: Width | None = None
    """Columns of a column-wise shard, at least."""
    cache_load_factor: Annotated[float, real(0, 1, above=True)] | None = None
    """Share of a `fused_uvm_caching` table's rows in the device's cache."""
    enforce_hbm: Flag | None = None
    """FBGEMM's flag for tables in host memory."""
    ranks: (
        Annotated[tuple[Annotated[int, whole(0, MAX_COUNT)], ...], NOT_EMPTY, DISTINCT] | None
    ) = None
    """Ranks that the table's shards may lie on, from 0."""
    co_locate: Name | None = None
    """Tables with the same word lie on the same ranks."""
    device_group: Annotated[str, choice(["cuda", "cpu"])] | None = None
    """Kind of devices that the table lies on, where the model has both."""
    offered: Annotated[tuple[tuple[ShardingType, ComputeKernel], ...] | None, NOT_IN_FILE] = None
    """Pairs of sharding type and compute kernel that the table's sharder offers, where that is
    known; else those of TorchRec's own sharders."""
    max_l1_cache_size: Annotated[int, whole(0, MAX_COUNT)] | None = None
    """MiB on the device, at most, for the cache of a key-value table."""
    l2_cache_size: Annotated[int, whole(0, MAX_COUNT)] | None = None
    """GiB of the host for the cache of a key-value table."""

    @property
    def key_value_params(self) -> dict[str, int]:
        """Cache sizes that are set, in the form of a plan."""
        sizes = {"max_l1_cache_size": self.max_l1_cache_size, "l2_cache_size": self.l2_cache_size}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Table(Section):
    """An embedding table."""

    name: Annotated[str, text(forbidden={".": "a torch module cannot have such a name"})]
    """The table's name."""
    num_embeddings: Annotated[int, whole(1, MAX_ROWS)]
    """The table's rows."""
    embedding_dim: Width
    """The table's columns; a multiple of 4 for every kernel but dense."""
    features: Annotated[tuple[Feature, ...], NOT_EMPTY]
    """A list of the sparse features that read this table."""
    module: Name = "ebc"
    """Module that the table belongs to; each has its own lookups and all-to-alls."""
    data_type: Annotated[str, choice(WEIGHT_BITS)] = "fp32"
    """Type of the weights; rows of `int8` and `int4`, which are for `mode: inference`, have scale
    and bias, and are padded to 16 bytes."""
    pooling: Annotated[str, choice(["sum", "mean", "none"])] = "sum"
    """`none`: an EmbeddingCollection, which gives a row for each id."""
    weighted: Flag = False
    """Ids have weights of their own (per-sample weights)."""
    optimizer: EmbeddingOptimizer = Optimizer.ROWWISE_ADAGRAD
    """Optimizer of the table; left out: the model's optimizer."""
    constraints: Constraints = field(default_factory=Constraints)
    """Limits that the table's sharding must obey."""
    index_dedup: Flag = False
    """Every rank sends its distinct ids alone (`use_index_dedup` of TorchRec's
    `EmbeddingCollectionSharder`); for tables with pooling none."""
    storage: Annotated[str, choice(["torchrec", "dynamicemb"])] = "torchrec"
    """`dynamicemb`: a hash table of `num_embeddings` rows."""
    stash_weights: Flag = False
    """Weights are on the host between lookup and backward (`TrainPipelineSparseDistEmbStash` of
    TorchRec 1.8 and newer)."""

    @property
    def element_bytes(self) -> float:
        """Bytes of one weight, without the scale, bias and padding of its row."""
        return WEIGHT_BITS[self.data_type] / 8

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row with so many of its columns."""
        return row_bytes(self.data_type, columns)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole table without optimizer state."""
        return self.num_embeddings * self.row_bytes(self.embedding_dim)

    @property
    def is_pooled(self) -> bool:
        """False for an EmbeddingCollection's table, whose output is one row per id."""
        return self.pooling != "none"

    @property
    def lookups_per_sample(self) -> float:
        """Mean ids one sample draws from this table, over its features."""
        return sum(f.lookups_per_sample for f in self.features)

    @property
    def outputs_per_sample(self) -> float:
        """Output rows per sample: one per feature and pooling, or one per id when not pooled."""
        if self.is_pooled:
            return sum(f.num_poolings for f in self.features)
        return self.lookups_per_sample


@dataclass(frozen=True)
class DcnV2(Section):
    """The low-rank cross network of DCN v2: layers of two GEMMs each."""

    tag = "dcn_v2"

    layers: Annotated[int, whole(1, 1000)]
    """The number of cross layers."""
    low_rank_dim: Width
    """The rank of each cross layer."""


PADDED = 8
"""Columns: rows of halves are then multiples of 16 bytes, which tensor cores load in bulk."""


def _ends_in_one(widths: tuple[int, ...]) -> tuple[int, ...]:
    """the last is 1"""
    if widths[-1] != 1:
        raise refuse(list(widths), "the last layer must have width 1, the logit of the click")
    return widths


@dataclass(frozen=True)
class DenseArch(ComputedDense):
    """A DLRM by its layers; each is Linear then ReLU, but for the last of `top_mlp`."""

    refused: ClassVar = {
        "linears": "is no longer read: it counted each linear layer once a sample and nothing "
        "else; run to_yaml on the module again, which writes 'ops', or give in_features, "
        "bottom_mlp and top_mlp"
    }

    in_features: Width
    """The number of dense inputs of a sample."""
    bottom_mlp: Annotated[tuple[Width, ...], NOT_EMPTY]
    """A list of layer widths, e.g. [512, 256, 128]."""
    top_mlp: Annotated[tuple[Width, ...], NOT_EMPTY, AfterValidator(_ends_in_one)]
    """A list of layer widths that ends in 1, e.g. [512, 256, 1]."""
    interaction: Annotated[
        str | DcnV2,
        form(
            "dot, concat, {dcn_v2: {layers: 3, low_rank_dim: 512}}",
            {"dot": "dot", "concat": "concat"},
            [DcnV2],
        ),
    ] = "dot"
    """Operation that joins bottom output and embeddings."""
    data_type: ProductType = "fp32"
    """Type of the dense part's products; bf16 by autocast."""
    optimizer: DenseOptimizer = "sgd"
    """Optimizer of the dense part and data-parallel tables."""
    linears: Annotated[tuple[tuple[int, int], ...], NOT_IN_FILE] = ()
    """(in, out) of the linear layers of a module whose wiring is unknown; they run one after the
    other behind the lookups, in place of MLPs and interaction."""
    activation: Annotated[str, NOT_IN_FILE] = "relu"
    """Activation of the top MLP: ``relu``, or ``swish_layer_norm``, TorchRec's
    ``x * sigmoid(layer_norm(x))`` (modules/activation.py)."""
    copies: Annotated[tuple[float, float], NOT_IN_FILE] = (0.0, 0.0)
    """Elements per sample that the model's own code reads and writes between embeddings and layers,
    forward and backward, beyond one concatenation."""
    pairs: Annotated[str, choice(["index", "gather", "all"])] = "index"
    """Way `dot` takes pairs out of all products: by `index` as TorchRec's DLRM (`z[:, i, j]`), by
    `gather`, or `all` of them; the last two pad to a multiple of 8 columns."""

    def joined_width(self, bottom: int, vectors: int) -> int:
        """Return the columns of ``dot``: the bottom output and the products of so many vectors."""
        if self.pairs == "index":
            return bottom + vectors * (vectors - 1) // 2
        picked = vectors * (vectors - 1) // 2 if self.pairs == "gather" else vectors**2
        return -(-(bottom + picked) // PADDED) * PADDED


@dataclass(frozen=True)
class QComm(Section):
    """Precision of pooled embeddings and their gradients on the wire."""

    forward: WireType = "fp32"
    """Type of the embeddings that ranks exchange."""
    backward: WireType = "fp32"
    """Type of their gradients."""


Dense = DenseArch | CapturedDense | MeasuredDense
MODES = TRAINING, INFERENCE = ("training", "inference")
PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist", "semi_sync")


def _tables(value: object) -> object:
    """or `{csv: tables.csv}`"""
    if isinstance(value, list):
        return value
    raise refuse(value, "it must be a list of tables or {csv: tables.csv}")


def dense_form(value: object) -> type[Dense]:
    """Return the form of a dense part that the keys of a mapping show."""
    keys = value if isinstance(value, dict) else {}
    return CapturedDense if "ops" in keys else MeasuredDense if "measured" in keys else DenseArch


def _dense(value: object) -> Dense:
    """one of the three forms below"""
    return value if isinstance(value, Dense) else read_at(dense_form(value), value)


@dataclass(frozen=True)
class Workload(Section):
    """A DLRM and the batch one rank trains on per iteration."""

    name: str
    batch_size: int
    """Samples per rank per iteration."""
    tables: Annotated[tuple[Table, ...], BeforeValidator(_tables)]
    """A list of embedding tables, or {csv: tables.csv}."""
    dense: Annotated[Dense, PlainValidator(_dense)]
    """The dense layers: in_features, bottom_mlp, top_mlp."""
    train_pipeline: Annotated[str, choice(PIPELINES)] = "base"
    """TorchRec's train pipeline."""
    qcomm: QComm = field(default_factory=QComm)
    """Precision on the wire."""
    sha256: Annotated[str, NOT_IN_FILE] = ""
    """Digest of the file it came from, empty when built in code."""
    mode: Annotated[str, choice(MODES)] = TRAINING
    """`inference`: forward alone, without gradients and optimizer states; tables are sharded as
    TorchRec's inference sharding can, table-wise, column-wise and row-wise."""
    replica_groups: ReplicaGroups | None = None
    """2D sparse parallelism; left out: every table is sharded over all ranks."""
    stash_optimizer_state: Flag = False
    """States of the dense optimizer are on the host from its step to the next backward
    (`TrainPipelineSparseDistOptStash`)."""
    balance_batches: Flag = False
    """Samples are shared out so that every rank's batch has as many ids."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it must be at least 1")
        names: set[tuple[str, str]] = set()
        for table in self.tables:
            if (table.module, table.name) in names:
                raise InputError(f"table '{table.name}' appears twice in module '{table.module}'")
            names.add((table.module, table.name))

    @property
    def training(self) -> bool:
        """False where only the forward runs: no backward, no optimizer and no gradients."""
        return self.mode == TRAINING

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Plan key of every table, in order: its name, or ``module/name`` where names collide."""
        count = Counter(t.name for t in self.tables)
        return tuple(f"{t.module}/{t.name}" if count[t.name] > 1 else t.name for t in self.tables)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t.module for t in self.tables))

    @cached_property
    def batch_ids(self) -> tuple[tuple[str, float, float], ...]:
        """Module, ids and poolings of one rank's batch; tables that share a feature share both."""
        features = {module: dict[str, Feature]() for module in self.modules}
        for table in self.tables:
            features[table.module].update({feature.name: feature for feature in table.features})
        return tuple(
            (
                module,
                sum(f.lookups_per_sample for f in by_name.values()) * self.batch_size,
                sum(f.num_poolings for f in by_name.values()) * self.batch_size,
            )
            for module, by_name in features.items()
        )

    @cached_property
    def weighted(self) -> frozenset[str]:
        """Modules with a table that takes weights of ids."""
        return frozenset(t.module for t in self.tables if t.weighted)

    @property
    def dlrm(self) -> DenseArch:
        """Dense part, for callers that need it layer by layer."""
        if not isinstance(self.dense, DenseArch):
            raise InputError(
                f"model '{self.name}' gives its dense part in another form, but its layers are "
                "needed here; give in_features, bottom_mlp and top_mlp under 'dense' instead"
            )
        return self.dense

    @cached_property
    def processed(self) -> frozenset[str]:
        return frozenset(t.module for t in self.tables for f in t.features if f.position_weights)

    @property
    def position_weights(self) -> tuple[int, ...]:
        """Weights of each feature that has some by position."""
        weights = {(t.module, f.name): f.position_weights for t in self.tables for f in t.features}
        return tuple(count for count in weights.values() if count)

    @property
    def ids_per_sample(self) -> dict[tuple[str, str], float]:
        """Mean ids that a sample draws, by module and feature."""
        features = ((t.module, f) for t in self.tables for f in t.features)
        return {(module, feature.name): feature.lookups_per_sample for module, feature in features}

    @property
    def embedding_bytes(self) -> int:
        return sum(t.weight_bytes for t in self.tables)

    def sharding_group(self, job: Topology) -> Topology:
        """Return the ranks that one plan covers: those of a sharding group, or all."""
        if self.replica_groups is None:
            return job
        group = self.replica_groups.sharding_group(job)
        broken = [t for t in self.tables if t.optimizer not in SYNCED_OPTIMIZERS]
        if broken and group.job is not None:
            raise InputError(
                f"table '{broken[0].name}' has the optimizer {broken[0].optimizer}, but replica "
                "groups average the states of Adagrad only (DMPCollection reads 'sum'); allowed "
                f"are {', '.join(SYNCED_OPTIMIZERS)}, or no replica_groups"
            )
        return group

    def with_batch_size(self, batch_size: int) -> Workload:
        return replace(self, batch_size=batch_size)
