"""The model as data: embedding tables with their features, and the dense architecture.

A `Workload` says what one rank trains on in one iteration. It does not depend on plans or hardware.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Distribution, Uniform
from predictor.model.length_shares import LengthShares
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import ReplicaGroups, Topology


@dataclass(frozen=True)
class MeasuredDense:
    """Measured times of one rank's dense part, without lookups and collectives.

    Args:
        batch_size: samples of the rank when it was measured, >= 1.
        forward_ms, backward_ms, optimizer_ms: time of its kernels, >= 0.
        gradient_bytes: of all dense gradients that are all-reduced, >= 0; the parameters are taken
            to be as large.
        activation_bytes: most that the forward leaves for the backward; None if it was not
            measured.
        optimizer: of the dense parameters and of data-parallel tables.
        bucket_cap_mb: as in `DenseArch`.
        in_features: dense inputs of a sample, which are copied to the device.
        length_shares: None: no sample takes longer than another.
    """

    batch_size: int
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    gradient_bytes: int
    activation_bytes: int | None = None
    optimizer: str = "sgd"
    bucket_cap_mb: float = 25.0
    in_features: int = 0
    length_shares: LengthShares | None = None

    def at_batch_size(self, batch_size: int) -> MeasuredDense:
        """Forward, backward and activations in proportion to the samples; parameters stay.

        An extrapolation: small kernels, whose time does not fall with the batch, are not known.
        """
        share = batch_size / self.batch_size
        activations = self.activation_bytes
        return replace(
            self,
            batch_size=batch_size,
            forward_ms=self.forward_ms * share,
            backward_ms=self.backward_ms * share,
            activation_bytes=None if activations is None else round(activations * share),
        )


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
"""Those whose states `DMPCollection._cache_sync_tensors` (torchrec/distributed/model_parallel.py)
finds: it reads ``state["sum"]``, which only Adagrad has, and SGD has no state."""

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


DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Dense optimizer -> states as large as the parameters."""


@dataclass(frozen=True)
class Feature:
    """One sparse feature that looks up one table.

    Args:
        name: key in the KeyedJaggedTensor.
        pooling_factor: mean ids per sample and pooling, >= 0.
        num_poolings: objects per sample (VBE), >= 1 in ordinary models.
        distribution: how the ids spread over the table's rows.
        id_order: ``random`` (hot ids anywhere) or ``frequency`` (low ids are the hot ones).
        pooling_factor_std: standard deviation of the ids per sample and pooling, >= 0; None: they
            are the floor or the ceiling of their mean.
        pooling_factor_max: most ids per sample and pooling, as where histories are cut; None: there
            is no limit.
        length_correlation: how far the lengths of a sample's features go together, in [0, 1]: two
            features correlate by the product of theirs.
        position_weights: weights that a feature processor learns, one for each position in a bag
            (``max_feature_length`` of TorchRec's `PositionWeightedModule`); 0: there is none.
    """

    name: str
    pooling_factor: float
    num_poolings: float = 1.0
    distribution: Distribution = field(default_factory=Uniform)
    id_order: str = "random"
    pooling_factor_std: float | None = None
    pooling_factor_max: float | None = None
    length_correlation: float = 0.0
    position_weights: int = 0

    @property
    def lookups_per_sample(self) -> float:
        return self.pooling_factor * self.num_poolings


@dataclass(frozen=True)
class Constraints:
    """Constraints of the user on one table's sharding; `None` leaves the choice open.

    Args:
        offered: the pairs of sharding type and compute kernel that the table's sharder offers,
            where that is known; else those of TorchRec's own sharders.
        max_l1_cache_size, l2_cache_size: of a key-value table's caches, as in TorchRec's
            `KeyValueParams`: MiB on the device at most, and GiB on the host.
    """

    sharding_types: tuple[ShardingType, ...] | None = None
    compute_kernels: tuple[str, ...] | None = None
    min_partition: int | None = None
    cache_load_factor: float | None = None
    enforce_hbm: bool | None = None
    ranks: tuple[int, ...] | None = None
    co_locate: str | None = None
    device_group: str | None = None
    offered: tuple[tuple[ShardingType, ComputeKernel], ...] | None = None
    max_l1_cache_size: int | None = None
    l2_cache_size: int | None = None

    @property
    def key_value_params(self) -> dict[str, int]:
        """Cache sizes that are set, in the form of a plan."""
        sizes = {"max_l1_cache_size": self.max_l1_cache_size, "l2_cache_size": self.l2_cache_size}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Table:
    """An embedding table of ``[num_embeddings, embedding_dim]`` and the features that read it.

    Args:
        index_dedup: every rank sends the distinct ids of its batch only; of tables without
            pooling (``use_index_dedup`` of TorchRec's `EmbeddingCollectionSharder`).
        storage: ``torchrec``, or ``dynamicemb`` for hash tables of ``num_embeddings`` rows.
        stash_weights: they are on the host between lookup and backward, under a train pipeline that
            stashes them (`TrainPipelineSparseDistEmbStash` of TorchRec 1.8 and newer).
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    features: tuple[Feature, ...]
    module: str = "ebc"
    data_type: str = "fp32"
    pooling: str = "sum"
    weighted: bool = False
    optimizer: str = Optimizer.ROWWISE_ADAGRAD
    constraints: Constraints = field(default_factory=Constraints)
    index_dedup: bool = False
    storage: str = "torchrec"
    stash_weights: bool = False

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
class DcnV2:
    """Low-rank cross network: ``layers`` of two GEMMs of rank ``low_rank_dim``."""

    layers: int
    low_rank_dim: int


PADDED = 8
"""Columns: rows of halves are then multiples of 16 bytes, which tensor cores load in bulk."""


@dataclass(frozen=True)
class DenseArch:
    """Bottom MLP, interaction, top MLP; each layer is Linear then ReLU, except the last of the top.

    Args:
        linears: (in, out) of the linear layers of a module whose wiring is unknown; they run one
            after the other behind the lookups, in place of MLPs and interaction.
        activation: of the top MLP: ``relu``, or ``swish_layer_norm``, TorchRec's
            ``x * sigmoid(layer_norm(x))`` (modules/activation.py).
        copies: elements per sample that the model's own code reads and writes between embeddings
            and layers, forward and backward, beyond one concatenation.
        pairs: how ``dot`` takes the pairs out of all products: by ``index``, as TorchRec's DLRM
            does (``z[:, i, j]``), by ``gather``, or not: ``all`` of them go on. The last two pad
            the concatenation to a multiple of `PADDED` columns.
        bucket_cap_mb: MiB of dense gradients that one all-reduce carries, > 0; the
            ``bucket_cap_mb`` of TorchRec's `DefaultDataParallelWrapper` (model_parallel.py).
        compiled: forward and backward are compiled (torch.compile), which joins memory-bound ops.
        cuda_graphs: the device runs them as captured graphs, one launch each.
        length_shares: None: as the ops say.
    """

    in_features: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    interaction: str | DcnV2 = "dot"
    data_type: str = "fp32"
    optimizer: str = "sgd"
    linears: tuple[tuple[int, int], ...] = ()
    activation: str = "relu"
    copies: tuple[float, float] = (0.0, 0.0)
    bucket_cap_mb: float = 25.0
    compiled: bool = False
    cuda_graphs: bool = False
    pairs: str = "index"
    length_shares: LengthShares | None = None

    def joined_width(self, bottom: int, vectors: int) -> int:
        """Return the columns of ``dot``: the bottom output and the products of so many vectors."""
        if self.pairs == "index":
            return bottom + vectors * (vectors - 1) // 2
        picked = vectors * (vectors - 1) // 2 if self.pairs == "gather" else vectors**2
        return -(-(bottom + picked) // PADDED) * PADDED


@dataclass(frozen=True)
class QComm:
    """Precision of the pooled embeddings on the wire."""

    forward: str = "fp32"
    backward: str = "fp32"


@dataclass(frozen=True)
class Workload:
    """A DLRM and the batch one rank trains on per iteration.

    Args:
        batch_size: samples per rank per iteration.
        train_pipeline: ``base``, ``sparse_dist``, ``prefetch_sparse_dist`` or ``semi_sync``.
        sha256: digest of the file it came from, empty when built in code.
        training: False where only the forward runs: no backward, no optimizer and no gradients, in
            time and in memory.
        replica_groups: 2D sparse parallelism; None: one copy of every table, over all ranks.
        stash_optimizer_state: of the dense optimizer, which is on the host from its step to the
            next backward (`TrainPipelineSparseDistOptStash`).
        balance_batches: samples are shared out so that all ranks have batches of the same length.
    """

    name: str
    batch_size: int
    tables: tuple[Table, ...]
    dense: DenseArch | CapturedDense | MeasuredDense
    train_pipeline: str = "base"
    qcomm: QComm = field(default_factory=QComm)
    sha256: str = ""
    training: bool = True
    replica_groups: ReplicaGroups | None = None
    stash_optimizer_state: bool = False
    balance_batches: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it must be at least 1")
        names: set[tuple[str, str]] = set()
        for table in self.tables:
            if (table.module, table.name) in names:
                raise InputError(f"table '{table.name}' appears twice in module '{table.module}'")
            names.add((table.module, table.name))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Plan key of every table, in order: its name, or ``module/name`` where names collide."""
        count = Counter(t.name for t in self.tables)
        return tuple(f"{t.module}/{t.name}" if count[t.name] > 1 else t.name for t in self.tables)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t.module for t in self.tables))

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
