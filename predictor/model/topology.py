"""Where ranks sit: hosts, NVLink domains, memory caps."""

from __future__ import annotations

from dataclasses import dataclass, field

from predictor.errors import InputError


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
    """

    world_size: int
    local_world_size: int
    hbm_cap_bytes: tuple[int, ...]
    ddr_cap_bytes: tuple[int, ...]
    nvlink_domain: int = 0
    installed_bytes: tuple[int, ...] = ()
    limit_bytes: tuple[int, ...] = ()
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
