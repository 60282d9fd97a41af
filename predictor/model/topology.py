"""Where ranks sit: hosts, NVLink domains, levels of the network, memory caps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from predictor.errors import InputError


@dataclass(frozen=True)
class NetworkLevel:
    """Parts of a cluster that a level of the network joins, each a set of ranks.

    Args:
        name: rail, pod or the like, for messages and reports.
        parts: how many it joins.
        ranks: of the smallest part. All ranks of a part share its links to the others, so these are
            the fullest links when every rank sends to all: `1 - ranks / world_size` of what each
            sends leaves such a part.
        ring_ranks: the least number of ranks of a part for each time that a ring over all ranks, in
            their order, leaves it.
        crossings: how often that ring goes from a part to another.
        oversubscription: the line rates of the NICs of a part over what its links to the others
            carry, above 0.
        gbit_s: what a rank's share of those links carries, if that is known instead.
        latency_us: what a message between two parts waits beyond one within a part.
    """

    name: str
    parts: int
    ranks: int
    ring_ranks: float
    crossings: int
    oversubscription: float = 1.0
    gbit_s: float | None = None
    latency_us: float = 0.0

    @classmethod
    def of(
        cls,
        name: str,
        places: Sequence[Hashable],
        ranks: int,
        *,
        oversubscription: float = 1.0,
        gbit_s: float | None = None,
        latency_us: float = 0.0,
    ) -> NetworkLevel:
        """A level over equal hosts, or racks, in the order of the ranks.

        Args:
            places: the part that each host is in.
            ranks: of one host.
        """
        sizes = {place: ranks * places.count(place) for place in dict.fromkeys(places)}
        stretches = [place for place, _ in groupby(places)]
        if len(stretches) > 1 and stretches[0] == stretches[-1]:
            stretches.pop()  # a ring goes on from the last host to the first
        ring_ranks = min(size / stretches.count(place) for place, size in sizes.items())
        return cls(
            name,
            len(sizes),
            min(sizes.values()),
            ring_ranks,
            len(stretches) if len(sizes) > 1 else 0,
            oversubscription,
            gbit_s,
            latency_us,
        )

    def check(self, world_size: int) -> None:
        """Raises an error if the level cannot be one of so many ranks."""
        if not 1 <= self.ranks * self.parts <= world_size:
            raise InputError(
                f"level '{self.name}' joins {self.parts} parts of at least {self.ranks} ranks, "
                f"which {world_size} ranks do not make up"
            )
        positive = {"oversubscription": self.oversubscription, "gbit_s": self.gbit_s}
        for what, value in positive.items():
            if value is not None and not value > 0:
                raise InputError(f"level '{self.name}': {what} is {value:g}; it must be above 0")

    def rate(self, nic_gbit_s: float) -> float:
        """What a rank's share of its part's links carries, in Gbit/s, no more than its NIC."""
        shared = nic_gbit_s / self.oversubscription
        return min(nic_gbit_s, shared if self.gbit_s is None else min(shared, self.gbit_s))


@dataclass(frozen=True)
class Topology:
    """Ranks ``0..world_size-1``, host by host.

    Args:
        world_size: number of ranks (one GPU each).
        local_world_size: ranks per host.
        hbm_cap_bytes: usable device memory of each rank, after any reservation.
        ddr_cap_bytes: usable host memory of each rank.
        nvlink_domain: ranks joined by NVLink; a host unless given. It may be smaller than a host
            (NVLink pairs) or span hosts (GB200 racks), and is what TorchRec calls
            ``intra_group_size`` when it spans hosts.
        installed_bytes: memory of each rank's device, or of its host where it has none, before
            anything was reserved; empty if nothing was.
        limit_bytes: of that, what a process may take; empty where the caps say so.
        network: levels that join the hosts, or the NVLink domains that span hosts, the innermost
            first; empty: every NIC reaches every other at its full rate.
    """

    world_size: int
    local_world_size: int
    hbm_cap_bytes: tuple[int, ...]
    ddr_cap_bytes: tuple[int, ...]
    nvlink_domain: int = 0
    installed_bytes: tuple[int, ...] = ()
    limit_bytes: tuple[int, ...] = ()
    network: tuple[NetworkLevel, ...] = ()
    hosts: int = field(init=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InputError(f"world size is {self.world_size}; at least 1 GPU is needed")
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            raise InputError(
                f"{self.world_size} GPUs do not fill hosts of {self.local_world_size}; "
                "the number of GPUs must be a multiple of the GPUs per host",
                inputs=("gpus", "gpus_per_node"),
            )
        object.__setattr__(self, "hosts", self.world_size // self.local_world_size)
        if not self.nvlink_domain:
            object.__setattr__(self, "nvlink_domain", self.local_world_size)
        self._check_domain()
        for level in self.network:
            level.check(self.world_size)
        for what, caps in (("hbm", self.hbm_cap_bytes), ("ddr", self.ddr_cap_bytes)):
            if len(caps) != self.world_size:
                raise InputError(
                    f"{len(caps)} {what} caps for {self.world_size} ranks; give one per rank"
                )

    def _check_domain(self) -> None:
        domain, local = self.nvlink_domain, self.local_world_size
        fits = local % domain == 0 or (domain % local == 0 and self.world_size % domain == 0)
        if domain < 1 or not fits:
            raise InputError(
                f"an NVLink domain of {domain} ranks neither divides a host of {local} "
                f"nor consists of whole hosts that divide {self.world_size} ranks"
            )

    @classmethod
    def uniform(
        cls,
        world_size: int,
        local_world_size: int | None = None,
        *,
        hbm_bytes: int,
        ddr_bytes: int,
        nvlink_domain: int = 0,
    ) -> Topology:
        """Equal caps on every rank; ``local_world_size`` defaults to ``min(8, world_size)``."""
        local = local_world_size or min(8, world_size)
        return cls(
            world_size,
            local,
            (hbm_bytes,) * max(world_size, 0),
            (ddr_bytes,) * max(world_size, 0),
            nvlink_domain,
        )

    @property
    def intra_group_size(self) -> int:
        """Ranks among which TWRW, TWCW and GRID split a table.

        TorchRec's ``Topology.intra_group_size``: the host, or the NVLink domain if that is larger.
        """
        return max(self.local_world_size, self.nvlink_domain)

    @property
    def groups(self) -> int:
        """Number of intra groups."""
        return self.world_size // self.intra_group_size

    def group_of(self, rank: int) -> int:
        """Intra group that a rank belongs to."""
        return rank // self.intra_group_size
