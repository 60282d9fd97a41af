"""A hardware profile: the groups of a device, and collectives on its wiring.

Each group of constants has its provenance.
Keys carry their unit (``..._gb_s`` is 10^9 bytes per second, ``..._us`` microseconds, ``..._gib``
2^30 bytes); properties convert to ms, bytes and bytes/ms. Load one with
`predictor.hardware.loader`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PrivateAttr, model_validator

from predictor import units
from predictor.hardware.learned import Learned

ProvenanceKind = Literal["measured", "learned", "published", "derived", "not validated"]
PROVENANCE_ORDER: tuple[ProvenanceKind, ...] = (
    "measured",
    "learned",
    "published",
    "derived",
    "not validated",
)
"""Kinds of provenance, from the most to the least trustworthy."""

MOST = 1e18
"""Bound above any constant of a device, in any unit; products of a few stay finite."""
Positive = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=2**31)]
Fraction = Annotated[float, Field(gt=0, le=1)]
SIGMA_OVER_MEAN = math.sqrt(math.pi / 2)
"""Standard deviation of a normal error over its mean absolute value."""


def weakest(kinds: tuple[ProvenanceKind, ...]) -> ProvenanceKind:
    """Return the weakest provenance among ``kinds``; ``measured`` if there are none."""
    return max(kinds, key=PROVENANCE_ORDER.index, default="measured")


class StrictModel(BaseModel):
    """Immutable model that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class KnownError(StrictModel):
    """Errors on measurements that no constant was fitted to.

    Args:
        suite: what computes it again: a suite of the laboratory, or what fitted the group.
        rows: which measurements.
        n: how many.
        mean: mean absolute relative error, a fraction.
        geomean: geometric mean of the same errors, which the literature reports.
        runtime: of whole iterations, the software that ran them, such as ``TorchRec``.
    """

    suite: str = Field(min_length=1)
    runtime: str | None = None
    rows: str = Field(min_length=1)
    n: Size
    mean: NonNegative
    geomean: NonNegative


class Verdict(StrictModel):
    """Quality of a profile's calibration, judged by its own rows.

    Args:
        quality: ``quiet``: nothing stands against it; ``worse than the shipped one``: the profile
            that it started from predicts the rows held out better.
        why: what stands against a better one.
    """

    quality: Literal["quiet", "usable", "worse than the shipped one"]
    why: tuple[str, ...] = ()


class Provenance(StrictModel):
    """Source of a group's constants, and how far they can be trusted.

    Args:
        kind: ``published`` figures are fits of, or quotes from, a public source; ``derived`` ones
            follow from published figures of other hardware by the rule that ``source`` states.
        n: rows behind the fit.
        range: quantity -> [low, high] that the rows cover, e.g. ``size_bytes: [32, 8.6e9]``;
            `predictor.iteration.ranges` says which are checked.
        error: of this group on rows held out; None if it was not validated.
    """

    kind: ProvenanceKind
    source: str = Field(min_length=1)
    versions: str | None = None
    date: str | None = None
    n: int | None = Field(default=None, ge=0, le=2**62)
    range: dict[str, tuple[FiniteFloat, FiniteFloat]] = {}
    error: KnownError | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        for quantity, (low, high) in self.range.items():
            if low > high:
                raise ValueError(f"range.{quantity} goes from {low:g} down to {high:g}")
        return self


class Group(StrictModel):
    """Constants of one origin.

    Args:
        rel_error: assumed 1-sigma relative error of times predicted from this group, for the 90 %
            interval: the held-out error of the fit if there is one, or what ``source`` states.
    """

    provenance: Provenance
    rel_error: float = Field(ge=0, le=2)


class Memory(Group):
    """Levels of memory and the link to the host."""

    hbm_gb_s: Positive
    """Bandwidth that streaming kernels achieve; on a CPU the rank's share of main memory."""
    l2_gb_s: Positive
    l2_mib: Positive
    sector_bytes: Size
    """Smallest unit that moves between the caches and HBM."""
    host_link_gb_s: Positive
    """Bandwidth of bulk copies over PCIe or C2C in one direction."""
    host_link_latency_us: NonNegative
    ddr_gb_s: Positive
    """Host memory bandwidth of one rank."""

    @property
    def hbm(self) -> float:
        return units.gb_per_s(self.hbm_gb_s)

    @property
    def l2(self) -> float:
        return units.gb_per_s(self.l2_gb_s)

    @property
    def l2_bytes(self) -> int:
        return units.mib(self.l2_mib)

    @property
    def host_link(self) -> float:
        """Host link bandwidth in bytes/ms, never more than host memory gives."""
        return units.gb_per_s(min(self.host_link_gb_s, self.ddr_gb_s))


BatchLayout = Literal["nn", "nt", "tn", "outer"]
"""Layout of the operands: ``t`` for columns that lie together; outer products have a depth of 1."""


class TensorKernels(StrictModel):
    """The kernels of one data type on tensor cores; see `predictor.cost.gemm`."""

    sm_gb_s: Positive | None = None
    """Rate at which one SM takes operands in; None where no measured row shows the limit."""
    l2_gb_s: Positive | None = None
    """Rate at which the L2 gives operands out to all SMs; None as above."""
    k_step: Size
    prologue_k: NonNegative
    """Filling and draining the pipeline costs as much as this many elements of K."""
    split_k: Size
    """Largest number of pieces that K is split into to fill the device."""
    split_cost_k: NonNegative
    """Adding the partial sums of a split K costs as much as this many elements of K."""
    split_share: Fraction = 1.0
    """Share of the type's rate that kernels reach which split K, as for gradients of weights: their
    tiles are small, and each SM loads its operands alone."""
    unaligned_share: Fraction = 1.0
    """The same, K split or not, where rows of an operand or of the result are no multiple of 16
    bytes: bulk copies cannot load these, so kernels of an older generation run."""
    unaligned_memory_share: Fraction = 1.0
    """Share of the HBM bandwidth that these kernels reach: they load elements one by one."""
    layout_rate: dict[BatchLayout, Positive] = {}
    """Layout of the operands -> rate over that of ``nn``. Hopper's wgmma reads 4-byte operands from
    shared memory only where K lies together (PTX ISA, wgmma.mma_async: transposed operands are for
    16-bit types); the others pass through registers."""
    exposed: float = Field(default=0.0, ge=0, le=1)
    """Share of one wave's HBM traffic that hides behind no arithmetic."""
    floor_us: NonNegative


TensorType = Literal["tf32", "fp16", "bf16", "fp8"]
DataType = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


class Gemm(Group):
    """Dense matrix multiplication; see `predictor.cost.gemm`."""

    tflops: dict[DataType, Positive]
    """Data type -> rate that large multiplications achieve."""
    tensor_cores: dict[TensorType, TensorKernels] = {}
    """Data type -> its kernels, where they were measured; other types run as fp32 does."""
    tensor_batched: dict[TensorType, TensorKernels] = {}
    """The same of batches, where these run by other kernels."""
    tiles: tuple[tuple[Size, Size], ...] = Field(min_length=1)
    """Output tiles the library chooses from."""
    tile_overhead: NonNegative
    """Cost of loading operands: a tile reaches ``1 / (1 + tile_overhead (1/rows + 1/cols))``."""
    k_step: Size
    """The K loop advances in steps of this many elements."""
    prologue_k: NonNegative
    """Filling and draining the pipeline costs as much as this many elements of K."""
    tiles_per_sm: Positive
    """Tiles that one SM must hold at once to reach its full rate."""
    split_k: Size
    """Largest number of pieces that K is split into to fill the device."""
    wide_cost: NonNegative = 0.0
    """Arithmetic slows by ``1 + wide_cost min(1, n / wide_columns)^wide_power`` as the tiles of a
    wave spread over more columns than the L2 holds; 0 where no measured row shows it."""
    wide_columns: Positive = 1.0
    wide_power: Positive = 1.0
    floor_us: NonNegative
    overlaps: bool = True
    """True if operands move while others are multiplied."""
    batched_us: NonNegative = 0.0
    """Overhead of each small product of a batch, where the products run one by one; 0 where a batch
    runs as one kernel."""
    batched_share: Fraction = 1.0
    """Share of ``tflops`` that small products reach where they run one by one."""
    batches: dict[BatchLayout, tuple[NonNegative, NonNegative, NonNegative, NonNegative]] = {}
    """Layout -> ns of each product of a batch for an element of the left and right operand and of
    the result, and for a multiplication; others cost what ``batched_us`` says."""
    attention_forward: Fraction = 0.72
    """Share of ``tflops`` that fused attention reaches; and the next in its backward. Of what
    FlashAttention-2 reaches on A100 at best, 73 % and 63 % of the peak (Dao 2023, arXiv 2307.08691,
    section 4.1), over the share of it that large products reach, with the middle of its figures for
    sequences of 512 to 16384."""
    attention_backward: Fraction = 0.6
    attention_tile: tuple[Size, Size] = (128, 64)
    """Queries and keys that a block of a fused attention takes at once (Dao-AILab flash-attention,
    flash_fwd_launch_template.h: 128 x 64 or 128 x 128 by head width; FlashAttention-4: two tiles of
    128 queries)."""
    attention_prologue: NonNegative = 0.0
    """Filling and draining a block costs as much as this many keys."""
    attention_head_us: tuple[NonNegative, NonNegative] = (0.0, 0.0)
    """Time of each sample's head of fused attention on a CPU, forward and backward, beyond its
    arithmetic."""
    vector_us: NonNegative | None = None
    """Shortest product with a side of 1, which a kernel of its own runs at the speed of memory;
    None where no measured row shows it."""
    outer_ns_per_element: NonNegative = 0.0
    """Time of an element of an outer product, where its bytes take less."""
    timing_floor_us: NonNegative = 0.0
    """Time that the timing method adds to each fitted row; used only to compare with them."""

    def cores(self, data_type: str, *, batched: bool = False) -> TensorKernels | None:
        """Return the tensor-core kernels of a data type; None if it has none of its own."""
        kernels = {str(key): value for key, value in self.tensor_cores.items()}
        if batched:
            kernels |= {str(key): value for key, value in self.tensor_batched.items()}
        return kernels.get(data_type)

    def floor_of(self, data_type: str) -> float:
        """Return the time in us of the smallest product of a data type."""
        cores = self.cores(data_type)
        return self.floor_us if cores is None else cores.floor_us


class Elementwise(Group):
    """Memory-bound kernels: ``floor + max((bytes - kept)/(hbm efficiency), bytes/l2)
    + ramp bytes/(bytes + half)``."""

    efficiency: Fraction
    """Share of ``memory.hbm_gb_s`` that large kernels reach."""
    floor_us: NonNegative
    ramp_us: NonNegative = 0.0
    ramp_half_mib: Positive = 1.0
    kept_mib: NonNegative = 0.0
    """MiB of a kernel's operands that the L2 still holds of the kernel before, or keeps of its
    result."""
    l2_gb_s: Positive | None = None
    """Rate of kernels whose operands all lie in the L2; None where ``kept_mib`` is 0."""
    strided_ns: NonNegative = 0.0
    """Time of an element on a GPU where operands lie apart, are broadcast or differ in type, if the
    bytes take less: such a kernel computes addresses one by one and loads no vectors
    (`gpu_kernel_impl` of aten's CUDALoops.cuh)."""
    strided_input_ns: NonNegative = 0.0
    """The same of each further input of another type: every load chooses by its type."""
    turned_ns: NonNegative = 0.0
    """Counterpart of ``strided_ns`` where an operand's columns lie together: lanes load apart."""
    index_add_ns: NonNegative = 0.0
    """Time of an element that is added to a place given by index, where no rows are added
    (`indexing_backward_kernel_stride_1` of aten's Indexing.cu)."""
    foreach_us: NonNegative = 0.0
    """Time of one block of a foreach kernel for its 65,536 elements, such as those of a dense
    optimizer, beyond the bytes of all: a model's few tensors are few blocks."""
    column_sum_us: NonNegative = 0.0
    """Shortest sum over the rows of a matrix; the next for each row: blocks walk down the rows."""
    column_sum_ns_per_row: NonNegative = 0.0
    columns: Fraction = 1.0
    """Share of that bandwidth that copies of columns reach: concatenation along the last dimension
    and its backward."""
    decode: Fraction = 1.0
    """Share of that bandwidth that kernels reach which unpack groups of quantised values."""
    permute_ns: NonNegative = 0.0
    """Time of a bag whose ids are moved to another place, beyond their bytes
    (`permute_2D_data_kernel`: a warp a bag)."""
    bucketize_ns_per_id: NonNegative = 0.0
    """Time to sort an id into the bucket of its row block, beyond the bytes moved."""
    fused_bias: bool = True
    """True if the multiplication of a linear layer adds the bias; if not, a copy does."""
    gather_ns_per_element: NonNegative = 0.0
    """Time to gather one element by its index, beyond the bytes moved."""
    math_ns_per_element: NonNegative = 0.0
    """Time of one exponential or the like, beyond the bytes moved; 0 where they hide it."""
    math_ns: dict[str, NonNegative] = {}
    """PyTorch's name of a function -> its time for one element beyond the bytes moved, where it was
    measured; others cost ``math_ns_per_element``."""
    sliced_ns_per_element: NonNegative = 0.0
    """Time to copy an element of columns of a wider matrix, beyond the bytes moved."""
    turned_ns_per_element: NonNegative = 0.0
    """The same where the elements of a row lie apart."""
    random_ns_per_element: NonNegative = 0.0
    """Time to draw one random number, beyond the bytes moved; 0 as above."""


class CudaEmbedding(Group):
    """FBGEMM's fused TBE on a GPU; see `predictor.cost.lookup.embedding`."""

    law: Literal["fbgemm_cuda"]
    forward_efficiency: Fraction
    """Share of ``memory.hbm_gb_s`` that gathering whole rows reaches, of weights or gradients."""
    backward_efficiency: Fraction
    """The same of reading and writing distinct rows and their states."""
    sort_efficiency: Fraction
    """The same of sorting the ids."""
    row_overhead_bytes: NonNegative
    """A very narrow row costs as much as a row of this many bytes."""
    l2_share: Fraction
    """Share of the L2 that holds rows."""
    index_bytes: Size
    bag_bytes: NonNegative
    """Offsets and metadata read per output row."""
    sort_item_bytes: Positive
    """Bytes of key and value of one lookup in the radix sort."""
    sort_digit_bits: Positive
    prepare_bytes: NonNegative
    """Bytes moved per lookup around the sort: linearising, histogram and run lengths."""
    segment_rows: Positive
    """Lookups of one row that a single thread block accumulates."""
    warps_per_sm: NonNegative = 0.0
    """Warps of the forward kernel that one SM holds; 0: tables never share the L2."""
    row_latency_us: NonNegative = 0.0
    """Time from one row of a bag to the next when only latency limits it."""
    l2_latency: Fraction = 1.0
    """Share of ``row_latency_us`` that a row in the L2 takes."""
    bag_ns: NonNegative = 0.0
    """Time of a bag in the forward where starting its warp decides, over all SMs; the next of an
    id. 0 where no measured row shows them."""
    id_ns: NonNegative = 0.0
    bounds_ns: NonNegative = 0.0
    """Time of a bag in the check of its ids (`bounds_check_indices`, a warp a bag) beyond their
    bytes; 0: TorchRec does not check."""
    linearize_ns: NonNegative = 0.0
    """Time to number the ids of a bag, over all SMs, beyond ``prepare_bytes``."""
    linearize_us: NonNegative = 0.0
    """Time to number up to 32 ids of each of a warp's bags, beyond ``kernel_us``."""
    segment_us: NonNegative = 0.0
    """Latency of one segment in the two update kernels, beyond ``kernel_us``."""
    block_loads: NonNegative = 8.0
    """Loads that wait for one another in a block that adds up a row of more than 32 ids: number of
    the run, its bounds, its first id, the columns of its table, ids, gradients, the table's offset,
    weights (embedding_backward_split_kernel_cta_template.cu); 0: another library without blocks."""
    update_latency_us: NonNegative = 0.0
    """Time that a warp spends on a distinct row beyond its bytes: the chain of loads to it."""
    gradient_latency_us: NonNegative = 0.0
    """The same of an id whose gradient it gathers; 0 where no measured row shows it."""
    kernel_us: NonNegative
    """Shortest time of one kernel of the sequence."""
    forward_kernels: Size
    backward_kernels: Size
    prefetch_kernels: Size
    prefetch_ns_per_lookup: NonNegative
    """Time to find an id in the UVM cache, its sort included."""
    prefetch_ns_per_row: NonNegative = 0.0
    """Time to find a distinct row in its set, whose ways a warp compares, and to note when
    (`lru_cache_find_uncached_kernel`, `lru_cache_insert_kernel`)."""
    uvm_efficiency: Fraction
    """Share of the host link that reading rows through unified memory reaches."""
    uvm_both_ways: Fraction = 1.0
    """Share of that which each direction keeps when rows are read and written back at once."""
    uvm_request_bytes: NonNegative = 0.0
    """A read of up to 128 bytes over the host link takes as long as this many bytes at least."""
    hash_us: NonNegative = 240.0
    """Time in which a lookup in hash tables (dynamicemb) waits for the host, which reads eight
    sizes back from the device. Derived: eight synchronisations. Not validated."""
    hash_ns_per_lookup: NonNegative = 1.0
    """Time to find the distinct ids of a lookup by hashing, by id. This and the next are derived
    from two rows of NVIDIA's (docs/model.md, chapter 6), good to a factor of 2."""
    hash_ns_per_row: NonNegative = 2.0
    """Time to find, score or insert a distinct id in a hash table."""
    hash_miss_ns: NonNegative = 134.0
    """Shortest time in which a row that a cache of hash tables misses is found in the table on the
    host and copied, and the one that it evicts written back. By NVIDIA's benchmark on an H100
    (docs/model.md, chapter 6); it hardly depends on the bytes of a row."""
    hash_caching: Positive = 3.3
    """Forward and backward of a hash table behind a cache over those of one on the device, at
    least: the ratio of TorchEasyRec's sweep on an A10, which hardly depends on the cache's size."""
    hash_hybrid: Positive = 6.8
    """The same of one that is part on the device, part on the host; taken to hold for forward and
    backward alike."""
    store_ns_per_row: NonNegative = 100.0
    """Time in which the host's threads find a row of a key-value table and copy it to pinned
    memory. Derived: a miss of the host's caches. Not validated, good to a factor of 5."""
    store_ssd_gb_s: Positive = 0.105
    """Rate at which its rows are read from SSD: TorchRec's ``SSD_MEM_BW``, 100 MiB/s
    (planner/constants.py). Not validated, good to a factor of 5."""
    weight_gradient: NonNegative = 1.0
    """Time of the gradients of per-sample weights over that of a forward of the same bags."""
    uvm_l1_kib: NonNegative = 0.0
    """Part of an SM's L1 that keeps rows read from host memory, which the L2 does not."""


class CpuEmbedding(Group):
    """FBGEMM's TBE on one CPU thread; see `predictor.cost.lookup.embedding`."""

    law: Literal["distinct_rows"]
    forward_us: NonNegative
    forward_table_us: NonNegative
    forward_ns_per_lookup: NonNegative
    forward_ns_per_lookup_dim: NonNegative
    forward_ns_per_row: NonNegative
    forward_ns_per_row_dim: NonNegative
    forward_ns_per_row_tlb: NonNegative
    forward_ns_per_output: NonNegative
    backward_us: NonNegative
    backward_table_us: NonNegative
    backward_ns_per_lookup: NonNegative
    backward_ns_per_lookup_dim: NonNegative
    backward_ns_per_lookup_pass: NonNegative
    backward_ns_per_row: NonNegative
    backward_ns_per_row_dim: NonNegative
    backward_ns_per_row_tlb: NonNegative
    backward_ns_per_output: NonNegative
    backward_dense_table_us: NonNegative = 0.0
    """The backward of a dense gradient, which is a kernel of its own: see
    `predictor.cost.lookup.cpu`."""
    backward_dense_ns_per_weight: NonNegative = 0.0
    """Time to write an element of the gradient with zero; 0: dense gradients were not measured, and
    cost a backward without optimizer state, and its bytes."""
    backward_dense_ns_per_lookup: NonNegative = 0.0
    backward_dense_ns_per_lookup_dim: NonNegative = 0.0
    backward_dense_ns_per_row_dim: NonNegative = 0.0
    forward_unpooled_table_us: NonNegative = 0.0
    """Lookups that give a row for each id, which have kernels of their own, and the next eight."""
    forward_unpooled_ns_per_lookup: NonNegative = 0.0
    forward_unpooled_ns_per_lookup_dim: NonNegative = 0.0
    forward_unpooled_ns_per_row: NonNegative = 0.0
    forward_unpooled_ns_per_row_dim: NonNegative = 0.0
    backward_unpooled_table_us: NonNegative = 0.0
    backward_unpooled_ns_per_lookup_dim: NonNegative = 0.0
    backward_unpooled_ns_per_row: NonNegative = 0.0
    """0: they were not measured, and cost what pooled ones do."""
    backward_unpooled_ns_per_row_dim: NonNegative = 0.0
    sort_digit_bits: Positive
    page_kib: Positive
    """Memory that the access to one distinct row makes the TLB cover."""
    tlb_mib: Positive
    """Working set beyond which the TLB misses."""
    backward_stateless: Positive = 1.0
    """Factor on a backward without optimizer state."""
    backward_weighted: Positive = 1.0
    """Factor on the backward of weighted lookups."""
    kernels: Size

    @property
    def forward_kernels(self) -> int:
        return self.kernels

    @property
    def backward_kernels(self) -> int:
        return self.kernels


class Overheads(Group):
    """Host-side costs."""

    op_us: NonNegative
    """Host time of one framework op without its launches."""
    layer_op_us: NonNegative | None = None
    """The same for ops of dense layers and their optimizer, where no TorchRec code runs; None:
    ``op_us``."""
    step_us: dict[str, NonNegative] = {}
    """Dense optimizer -> host time of its step for each parameter, where it was measured; others
    take ops of the dense part."""
    batch_us: NonNegative = 0.0
    """Host time that a step on a real batch takes beyond a near-empty one on a GPU: sizes of jagged
    tensors that are read back, and waiting for the device in between."""
    threads: Size | None = None
    """OpenMP threads of the process that was measured; torchrun sets one, a plain script starts as
    many as there are cores."""
    idle_threads_us: NonNegative = 0.0
    """Host time of a step that OpenMP threads beyond the first cost, however little they do."""
    iteration_us: NonNegative = 0.0
    """Host time of an iteration outside its stages: pipeline, DistributedDataParallel, autograd."""
    launch_us: NonNegative
    """Host time of one kernel launch."""
    launch_latency_us: NonNegative
    """Time from a launch to the start of its kernel on an idle stream."""
    sync_us: NonNegative
    """Time of a device-to-host synchronisation."""
    collective_us: NonNegative
    """Host time to issue one collective."""


GROUP_NAMES = (
    "memory",
    "gemm",
    "embedding",
    "elementwise",
    "overheads",
    "collectives.intra",
    "collectives.inter",
)


class Curve(StrictModel):
    """Time of one collective on one kind of link; evaluated in `predictor.cost.collectives`.

    ``latency_us + latency_per_doubling_us log2(n) + latency_per_rank_us (n - 1)`` plus the bus
    bytes at the marginal cost of each size band.

    Args:
        source: of this curve, where it differs from the group's.
        edge_mib: lower edges of the size bands, from 0 upwards.
        us_per_mib: marginal cost of a bus byte in each band.
        rank_cost: rank count -> factor on the marginal costs, where wiring makes rank counts
            unequal; interpolated between, constant beyond.
        own_part: cost of a byte of a rank's own part of the buffer, which it copies or reduces
            itself, over that of a bus byte.
    """

    source: str | None = None
    latency_us: NonNegative
    latency_per_doubling_us: NonNegative = 0.0
    latency_per_rank_us: NonNegative = 0.0
    edge_mib: tuple[NonNegative, ...]
    us_per_mib: tuple[NonNegative, ...]
    rank_cost: dict[Size, Positive] = Field(default_factory=dict)
    own_part: NonNegative = 0.0

    @model_validator(mode="after")
    def _check_bands(self) -> Self:
        edges = self.edge_mib
        if not edges or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError("edge_mib must start at 0 and increase")
        if len(self.us_per_mib) != len(edges):
            raise ValueError(f"us_per_mib needs one value per edge, {len(edges)}")
        if self.us_per_mib[-1] <= 0:
            raise ValueError("us_per_mib must end above 0: the largest sizes cost time")
        return self


class LinkCurves(Group):
    """Collectives among ranks joined by one kind of link.

    Args:
        small_rel_error: as ``rel_error``, of messages below 1 MiB, which latency bounds; None: no
            other than that.
        in_switch: an all-reduce that the switch does (NVLS), if it can; the faster of it and
            ``all_reduce`` counts.
    """

    small_rel_error: Annotated[float, Field(ge=0, le=2)] | None = None
    in_switch: Curve | None = None
    all_to_all: Curve
    all_reduce: Curve
    reduce_scatter: Curve
    all_gather: Curve


class Inter(LinkCurves):
    """Collectives between hosts, one NIC per rank.

    Args:
        nic_gbit_s: line rate of a NIC.
        tree_cost: factor on what bytes of an all-reduce cost within a domain while a tree joins the
            domains: a rank then also passes on what comes from the network.
        in_network: the switches between hosts reduce (SHARP).
        fill: share of the fill of the pipeline over the hosts, ``2 sqrt(latency x transfer)``, that
            a reduction or an all-gather waits for; None: its curve has it.
        peer_us_per_mib: cost in an all-to-all of the first chunk of a peer's message, which goes
            through one channel and is not pipelined; None: its curve has it.
        message_us: time of the host's thread behind a NIC for a message that it sends or receives;
            None: bytes take longer.
    """

    nic_gbit_s: Positive
    tree_cost: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    in_network: bool = False
    fill: Fraction | None = None
    peer_us_per_mib: Positive | None = None
    message_us: Positive | None = None

    def at(self, nic_gbit_s: float) -> Self:
        """Return the same hosts with NICs of another line rate.

        The time on the wire changes, at the share of the line rate that large messages reach. What
        bytes of small messages cost beyond that is latency of the protocol, and stays.
        """
        slower = self.nic_gbit_s / nic_gbit_s - 1.0
        curves = {}
        for name in ("all_to_all", "all_reduce", "reduce_scatter", "all_gather"):
            curve: Curve = getattr(self, name)
            wire = curve.us_per_mib[-1] * slower
            # a band without cost hides behind the latency
            costs = tuple(max(c + wire, 0.0) if c else 0.0 for c in curve.us_per_mib)
            curves[name] = curve.model_copy(update={"us_per_mib": costs})
        return self.model_copy(update={"nic_gbit_s": nic_gbit_s, **curves})


class CollectiveGroups(StrictModel):
    """Collectives by link: ``intra`` over NVLink (or shared memory), ``inter`` over the NIC."""

    intra: LinkCurves
    inter: Inter


class HardwareProfile(StrictModel):
    """A device and its wiring.

    Args:
        name: of a shipped profile, that of its file; of a user's file, whatever it says.
        execution: ``async``: kernels queue behind the host on streams; ``inline``: the host thread
            does the work itself (CPU).
        gpus_per_host: ranks per host as the platform is sold.
        nvlink_domain: ranks joined by NVLink; may be smaller or larger than a host.
        sms: streaming multiprocessors, or cores of one rank on a CPU.
        runtime: of the CPU ranks that measured it: ``plain``, as a training script starts them, or
            ``tuned``, with real-time threads and kept memory.
        known_error: errors of whole iterations predicted with this profile.
        verdict: of its calibration; None: nobody judged it.
        learned: factors on its costs, from a job that ran.
    """

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    title: str
    execution: Literal["async", "inline"]
    hbm_gib: Positive
    ddr_gib: Positive
    gpus_per_host: Size
    nvlink_domain: Size
    sms: Size
    runtime: Literal["plain", "tuned"] | None = None
    known_error: tuple[KnownError, ...] = ()
    verdict: Verdict | None = None
    learned: Learned | None = None
    memory: Memory
    gemm: Gemm
    embedding: Annotated[CudaEmbedding | CpuEmbedding, Field(discriminator="law")]
    elementwise: Elementwise
    overheads: Overheads
    collectives: CollectiveGroups
    _origins: dict[str, str] | None = PrivateAttr(default=None)

    @property
    def inline(self) -> bool:
        """True if the host thread does the work itself."""
        return self.execution == "inline"

    @property
    def streaming(self) -> float:
        """Bytes/ms that large memory-bound kernels move."""
        return self.elementwise.efficiency * self.memory.hbm

    @property
    def device(self) -> str:
        return "cpu" if self.inline else "cuda"

    @property
    def hbm_bytes(self) -> int:
        return units.gib(self.hbm_gib)

    @property
    def ddr_bytes(self) -> int:
        return units.gib(self.ddr_gib)

    @property
    def groups(self) -> dict[str, Group]:
        """Group name -> group; collectives as ``collectives.intra`` and ``collectives.inter``.

        Groups with learned factors carry the errors that remain after learning.
        """
        groups: dict[str, Group] = {name: attrgetter(name)(self) for name in GROUP_NAMES}
        if self.learned is not None:
            groups |= {n: _after(self.learned, n, groups[n]) for n in self.learned.errors}
        return groups

    @property
    def origins(self) -> dict[str, str]:
        """Group name -> the profile or file that gives it."""
        return self._origins or dict.fromkeys(GROUP_NAMES, self.name)

    def with_origins(self, origins: Mapping[str, str]) -> Self:
        """Return the profile with the file or profile that each group comes from."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy

    def with_nic(self, nic_gbit_s: float) -> Self:
        """Return the same device in hosts whose NICs have another line rate, per rank."""
        inter = self.collectives.inter.at(nic_gbit_s)
        links = self.collectives.model_copy(update={"inter": inter})
        return self.model_copy(update={"collectives": links})

    def group_kind(self, group: str) -> ProvenanceKind:
        """Return the provenance kind of one group of `groups`."""
        return self.groups[group].provenance.kind


def _after(learned: Learned, name: str, group: Group) -> Group:
    """Return the group with provenance and error after learning."""
    remaining, steps = learned.errors[name], learned.steps
    error = KnownError(
        suite="shardopt learn",
        rows=f"kernels of {learned.model} that were not told apart",
        n=steps,
        mean=remaining.own / SIGMA_OVER_MEAN,
        geomean=remaining.own / SIGMA_OVER_MEAN,
    )
    provenance = Provenance(
        kind="learned",
        source=f"{steps} steps of {learned.model} under {', '.join(learned.plans)} on "
        f"{learned.machine}, over: {group.provenance.source}",
        date=learned.date,
        n=steps,
        range=group.provenance.range,
        error=error,
    )
    return group.model_copy(update={"provenance": provenance, "rel_error": remaining.shared})
