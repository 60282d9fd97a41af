"""A hardware profile: the groups of a device, and collectives on its wiring.

Load one with `predictor.hardware.loader`; the groups are in `predictor.hardware.groups`.

Why: docs/decisions/0007.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from predictor import units
from predictor.hardware.groups import (
    CpuEmbedding,
    CudaEmbedding,
    Elementwise,
    Gemm,
    Group,
    KnownError,
    Memory,
    NonNegative,
    Overheads,
    Positive,
    ProvenanceKind,
    Size,
    StrictModel,
    Verdict,
)

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
    """Time of one collective on one kind of link; evaluated in `predictor.cost.link_curve`.

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
    """

    nic_gbit_s: Positive
    tree_cost: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    in_network: bool = False

    def at(self, nic_gbit_s: float) -> Self:
        """The same hosts with NICs of another line rate.

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
    memory: Memory
    gemm: Gemm
    embedding: Annotated[CudaEmbedding | CpuEmbedding, Field(discriminator="law")]
    elementwise: Elementwise
    overheads: Overheads
    collectives: CollectiveGroups
    _origins: dict[str, str] | None = PrivateAttr(default=None)

    @property
    def inline(self) -> bool:
        """Whether the host thread does the work itself."""
        return self.execution == "inline"

    @property
    def streaming(self) -> float:
        """Bytes/ms that large memory-bound kernels move."""
        return self.elementwise.efficiency * self.memory.hbm

    @property
    def device(self) -> str:
        """PyTorch's device type: ``cuda`` or ``cpu``."""
        return "cpu" if self.inline else "cuda"

    @property
    def hbm_bytes(self) -> int:
        """Device memory of one rank."""
        return units.gib(self.hbm_gib)

    @property
    def ddr_bytes(self) -> int:
        """Host memory of one rank."""
        return units.gib(self.ddr_gib)

    @property
    def groups(self) -> dict[str, Group]:
        """Group name -> group; collectives as ``collectives.intra`` and ``collectives.inter``."""
        return {
            "memory": self.memory,
            "gemm": self.gemm,
            "embedding": self.embedding,
            "elementwise": self.elementwise,
            "overheads": self.overheads,
            "collectives.intra": self.collectives.intra,
            "collectives.inter": self.collectives.inter,
        }

    @property
    def origins(self) -> dict[str, str]:
        """Group name -> the profile or file that gives it."""
        return self._origins or dict.fromkeys(GROUP_NAMES, self.name)

    def with_origins(self, origins: Mapping[str, str]) -> Self:
        """The same profile with the file or profile that each group comes from."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy

    def with_nic(self, nic_gbit_s: float) -> Self:
        """The same device in hosts whose NICs have another line rate, per rank."""
        inter = self.collectives.inter.at(nic_gbit_s)
        links = self.collectives.model_copy(update={"inter": inter})
        return self.model_copy(update={"collectives": links})

    def group_kind(self, group: str) -> ProvenanceKind:
        """Provenance kind of one group of `groups`."""
        return self.groups[group].provenance.kind
