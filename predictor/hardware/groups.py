"""The groups of constants in a hardware profile, each with its provenance.

Keys carry their unit (``..._gb_s`` is 10^9 bytes per second, ``..._us`` microseconds, ``..._gib``
2^30 bytes); properties convert to ms, bytes and bytes/ms. Load one with
`predictor.hardware.loader`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from predictor import units

ProvenanceKind = Literal["measured", "published", "derived", "not validated"]
PROVENANCE_ORDER: tuple[ProvenanceKind, ...] = (
    "measured",
    "published",
    "derived",
    "not validated",
)
"""From the strongest to the weakest."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def weakest(kinds: tuple[ProvenanceKind, ...]) -> ProvenanceKind:
    """The weakest provenance among ``kinds``; of nothing it is ``measured``."""
    return max(kinds, key=PROVENANCE_ORDER.index, default="measured")


class Model(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class KnownError(Model):
    """Absolute relative errors on measurements that no constant was fitted to.

    Args:
        suite: what computes it again: a suite of ``shardopt validate``, or what fitted the group.
        rows: which they are.
        n: how many.
        mean: of the absolute errors, a fraction.
        geomean: geometric mean of the same, a fraction; smaller, and what the literature reports.
    """

    suite: str = Field(min_length=1)
    rows: str = Field(min_length=1)
    n: int = Field(ge=1)
    mean: NonNegative
    geomean: NonNegative


class Provenance(Model):
    """Where a group's constants come from, and how far they can be trusted.

    Args:
        kind: ``published`` figures are fits of, or quotes from, a public source; ``derived`` ones
            follow from published figures of other hardware by the rule that ``source`` states.
        n: rows behind the fit.
        range: quantity -> [low, high] that the rows cover, e.g. ``size_bytes: [32, 8.6e9]``;
            `predictor.iteration.ranges` says which are checked.
        error: of the group alone on rows held out; None: not validated.
    """

    kind: ProvenanceKind
    source: str = Field(min_length=1)
    versions: str | None = None
    date: str | None = None
    n: int | None = Field(default=None, ge=0)
    range: dict[str, tuple[FiniteFloat, FiniteFloat]] = {}
    error: KnownError | None = None

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        for quantity, (low, high) in self.range.items():
            if low > high:
                raise ValueError(f"range.{quantity} goes from {low:g} down to {high:g}")
        return self


class Group(Model):
    """Constants of one origin.

    Args:
        rel_error: assumed 1-sigma relative error of times predicted from this group, for the 90 %
            interval: the held-out fit error where there is one, else what ``source`` states.
    """

    provenance: Provenance
    rel_error: float = Field(ge=0, le=2)


class Memory(Group):
    """Levels of memory and the link to the host."""

    hbm_gb_s: Positive
    """Achieved by streaming kernels; on a CPU the rank's share of main memory."""
    l2_gb_s: Positive
    l2_mib: Positive
    sector_bytes: int = Field(gt=0)
    """Smallest unit that moves between the caches and HBM."""
    host_link_gb_s: Positive
    """Bulk copies over PCIe or C2C, one direction."""
    host_link_latency_us: NonNegative
    ddr_gb_s: Positive
    """Host memory bandwidth of one rank."""

    @property
    def hbm(self) -> float:
        """Achieved HBM bandwidth in bytes/ms."""
        return units.gb_per_s(self.hbm_gb_s)

    @property
    def l2(self) -> float:
        """L2 bandwidth in bytes/ms."""
        return units.gb_per_s(self.l2_gb_s)

    @property
    def l2_bytes(self) -> int:
        """L2 capacity in bytes."""
        return units.mib(self.l2_mib)

    @property
    def host_link(self) -> float:
        """Host link bandwidth in bytes/ms, never more than host memory gives."""
        return units.gb_per_s(min(self.host_link_gb_s, self.ddr_gb_s))


class Gemm(Group):
    """Dense matrix multiplication; see `predictor.cost.gemm`."""

    tflops: dict[Literal["fp32", "tf32", "fp16", "bf16"], Positive]
    """Achieved by large multiplications, per data type."""
    tiles: tuple[tuple[int, int], ...] = Field(min_length=1)
    """Output tiles the library chooses from."""
    tile_overhead: NonNegative
    """Operand traffic of a tile: efficiency is ``1 / (1 + tile_overhead (1/rows + 1/cols))``."""
    k_step: int = Field(gt=0)
    """The K loop advances in steps of this many elements."""
    prologue_k: NonNegative
    """Filling and draining the pipeline costs as much as this many elements of K."""
    tiles_per_sm: Positive
    """Tiles that share one SM before its arithmetic is saturated."""
    split_k: int = Field(ge=1)
    """Largest number of pieces K is cut into to fill the device."""
    wide_cost: NonNegative = 0.0
    """Arithmetic slows by ``1 + wide_cost min(1, n / wide_columns)^wide_power`` as the tiles of a
    wave spread over more columns than the L2 holds; 0 where no rows show it."""
    wide_columns: Positive = 1.0
    wide_power: Positive = 1.0
    floor_us: NonNegative
    overlaps: bool = True
    """Whether operands move while others are multiplied."""
    batched_us: NonNegative = 0.0
    """Of each small product of a batch beyond its arithmetic, where they run one by one; 0: a batch
    runs as one multiplication."""
    batched_share: Fraction = 1.0
    """Of the rate of large multiplications, in small ones that run one by one."""
    timing_floor_us: NonNegative = 0.0
    """What the timing of the fitted rows adds to each; only for comparing with those rows."""


class Elementwise(Group):
    """Memory-bound kernels: ``floor + bytes/(hbm efficiency) + ramp bytes/(bytes + half)``."""

    efficiency: Fraction
    """Of the achieved HBM bandwidth."""
    floor_us: NonNegative
    ramp_us: NonNegative = 0.0
    ramp_half_mib: Positive = 1.0
    columns: Fraction = 1.0
    """Share of that bandwidth that copies of columns reach: concatenation along the last dimension
    and its backward."""
    bucketize_ns_per_id: NonNegative = 0.0
    """Sorting an id into the bucket of its row block, beyond moving it."""
    fused_bias: bool = True
    """Whether a linear layer's multiplication adds the bias; else it is copied to the output."""
    gather_ns_per_element: NonNegative = 0.0
    """Picking one element by its index, beyond moving it."""


class CudaEmbedding(Group):
    """FBGEMM's fused TBE on a GPU; see `predictor.cost.lookup.embedding`."""

    law: Literal["fbgemm_cuda"]
    forward_efficiency: Fraction
    """Of achieved HBM bandwidth, gathering whole rows."""
    backward_efficiency: Fraction
    sort_efficiency: Fraction
    row_overhead_bytes: NonNegative
    """A row is as costly as this many bytes when it is much narrower."""
    l2_share: Fraction
    """Of L2 that holds rows."""
    index_bytes: int = Field(gt=0)
    bag_bytes: NonNegative
    """Offsets and metadata read per output row."""
    sort_item_bytes: Positive
    """Key and value of one radix-sorted lookup."""
    sort_digit_bits: Positive
    prepare_bytes: NonNegative
    """Per lookup: linearising, histogram and run-length passes around the sort."""
    segment_rows: Positive
    """Lookups of one row that a single thread block accumulates."""
    warps_per_sm: NonNegative = 0.0
    """Warps of the forward kernel that one SM holds; 0: tables never share the L2."""
    row_latency_us: NonNegative = 0.0
    """From one row of a bag to the next, where nothing else holds the lanes up."""
    l2_latency: Fraction = 1.0
    """Of that, for a row found in the L2."""
    linearize_us: NonNegative = 0.0
    """Numbering up to 32 ids of each of a warp's bags, beyond the shortest kernel."""
    segment_us: NonNegative = 0.0
    """Dependent loads and sums of one segment in the two update kernels, beyond the shortest."""
    kernel_us: NonNegative
    """Shortest time of one kernel of the sequence."""
    forward_kernels: int = Field(ge=1)
    backward_kernels: int = Field(ge=1)
    prefetch_kernels: int = Field(ge=1)
    prefetch_ns_per_lookup: NonNegative
    """Finding, evicting and inserting in the UVM cache."""
    uvm_efficiency: Fraction
    """Of the host link, reading rows through unified memory."""


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
    sort_digit_bits: Positive
    page_kib: Positive
    """A distinct row drags this much of its table into the TLB's reach."""
    tlb_mib: Positive
    """Working set beyond which address translation misses."""
    backward_stateless: Positive = 1.0
    """Factor on the backward where it reads no optimizer state: SGD, and dense gradients."""
    backward_weighted: Positive = 1.0
    """Factor on the backward of weighted lookups."""
    kernels: int = Field(ge=1)


class Overheads(Group):
    """Host-side costs."""

    op_us: NonNegative
    """Host time of one framework op, its launches apart."""
    layer_op_us: NonNegative | None = None
    """The same around a dense layer or in its optimizer step, where TorchRec runs no code of its
    own; ``op_us`` unless given."""
    iteration_us: NonNegative = 0.0
    """Host time of an iteration outside its stages: pipeline, DistributedDataParallel, autograd."""
    launch_us: NonNegative
    """Host time of one kernel launch."""
    launch_latency_us: NonNegative
    """From launch to kernel start on an idle stream."""
    sync_us: NonNegative
    """Device-to-host synchronisation."""
    collective_us: NonNegative
    """Host time to issue one collective."""
