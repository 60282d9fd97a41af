"""Topology of ranks: hosts, NVLink domains, network levels, memory caps, replica groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Annotated, Any, ClassVar

from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError
from predictor.section import FLAG, MAX_COUNT, Section, choice, whole


@dataclass(frozen=True)
class NetworkLevel:
    """Parts of a cluster that a level of the network joins, each a set of ranks.

    Args:
        name: rail, pod or the like, for messages and reports.
        parts: number of parts that it joins.
        ranks: size of the smallest part. All ranks of a part share its links to the others, so
            these are the fullest links when every rank sends to all: `1 - ranks / world_size` of
            the bytes of each leave such a part.
        ring_ranks: least ranks of a part per exit of a ring over all ranks, in their order, from
            that part.
        crossings: number of times that this ring goes from one part to another.
        oversubscription: sum of the line rates of a part's NICs over the rate of its links to the
            others, above 0.
        gbit_s: rate of a rank's share of those links, if that is known instead.
        latency_us: extra latency of a message between two parts over one within a part.
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
        cls, name: str, places: Sequence[Hashable], ranks: int, **links: float | None
    ) -> NetworkLevel:
        """Build a level over equal hosts, or racks, in the order of the ranks.

        Args:
            places: the part that each host is in.
            ranks: number of ranks of one host.
            links: known figures of its links: oversubscription, gbit_s, latency_us.
        """
        sizes = {place: ranks * hosts for place, hosts in Counter(places).items()}
        stretches = [place for place, _ in groupby(places)]
        if len(stretches) > 1 and stretches[0] == stretches[-1]:
            stretches.pop()  # a ring goes on from the last host to the first
        times = Counter(stretches)
        ring_ranks = min(size / times[place] for place, size in sizes.items())
        crossings = len(stretches) if len(sizes) > 1 else 0
        return cls(name, len(sizes), min(sizes.values()), ring_ranks, crossings, **links)  # type: ignore[arg-type]

    def in_row(self, world_size: int, count: int) -> NetworkLevel | None:
        """Return the level as ranks in a row see it, fewer or more than all ranks of the cluster;
        None if they lie in one part.

        Args:
            world_size: number of ranks that the level joins.
            count: number of ranks in a row.

        Raises:
            InputError: they would fill parts unevenly.
        """
        if count == world_size:
            return self
        even = self.ranks * self.parts == world_size and self.crossings in (0, self.parts)
        if even and self.ranks % count == 0:
            return None
        if even and count % self.ranks == 0:
            parts = count // self.ranks
            return replace(self, parts=parts, crossings=parts)
        raise InputError(
            f"{count} ranks in a row lie unevenly on the parts of level '{self.name}', of which "
            f"the smallest has {self.ranks} ranks"
        )

    def rate(self, nic_gbit_s: float) -> float:
        """Return a rank's share of its part's links in Gbit/s, at most the rate of its NIC."""
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
        limit_bytes: share of that memory that a process may take; empty where the caps limit it.
        network: levels that join the hosts, or the NVLink domains that span hosts, the innermost
            first; empty: every NIC reaches every other at its full rate.
        job: where tables are copied, all ranks of the job, of which these are one sharding group
            (`ReplicaGroups`); None if these are all.
    """

    world_size: int
    local_world_size: int
    hbm_cap_bytes: tuple[int, ...]
    ddr_cap_bytes: tuple[int, ...]
    nvlink_domain: int = 0
    installed_bytes: tuple[int, ...] = ()
    limit_bytes: tuple[int, ...] = ()
    network: tuple[NetworkLevel, ...] = ()
    job: Topology | None = None
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
        """Build ranks with equal caps; ``local_world_size`` defaults to ``min(8, world_size)``."""
        local = local_world_size or min(8, world_size)
        return cls(
            world_size,
            local,
            (hbm_bytes,) * max(world_size, 0),
            (ddr_bytes,) * max(world_size, 0),
            nvlink_domain,
        )

    @property
    def whole(self) -> Topology:
        """All ranks that train and add up their dense gradients."""
        return self.job or self

    @property
    def intra_group_size(self) -> int:
        """Ranks among which TWRW, TWCW and GRID split a table.

        TorchRec's ``Topology.intra_group_size``: the host, or the NVLink domain if that is larger.
        """
        return max(self.local_world_size, self.nvlink_domain)

    @property
    def groups(self) -> int:
        return self.world_size // self.intra_group_size

    def group_of(self, rank: int) -> int:
        return rank // self.intra_group_size


DEFAULT, FULLY_SHARDED = "default", "fully_sharded"
STRATEGIES = (DEFAULT, FULLY_SHARDED)
"""Strategies to synchronise copies: `ShardingStrategy` of torchrec/distributed/types.py."""


@dataclass(frozen=True)
class ReplicaGroups(Section):
    """2D sparse parallelism: tables are sharded over some ranks, and copied to the others.

    After `DMPCollection` of TorchRec 1.7 to 1.9 (torchrec/distributed/model_parallel.py): ids and
    outputs stay within a sharding group, every group holds all tables, and ranks that hold the same
    shards form a replica group, which averages them every ``sync_interval`` steps.
    """

    refused: ClassVar = {
        "modules": "a group size of its own for a module (DMPCollectionConfig) is not modelled; "
        "give one size for the whole model"
    }

    size: Annotated[int, whole(1, MOST_RANKS)]
    """The ranks that a copy of the tables is sharded over (`sharding_group_size`)."""
    sync_interval: Annotated[int, whole(1, MAX_COUNT)] = 1
    """Steps between two averagings of the copies."""
    use_inter_host_allreduce: Annotated[bool, FLAG] = False
    """`false`: ranks r, r + R, r + 2 R, ... of R groups shard, so that copies lie on neighbours;
    `true`: `size` ranks in a row do (`DMPCollection._create_process_groups`)."""
    sharding_strategy: Annotated[str, choice(STRATEGIES)] = DEFAULT
    """`fully_sharded`: weights are averaged in every step, between forward and backward;
    `sync_interval` is left out."""

    def __post_init__(self) -> None:
        for name in ("size", "sync_interval"):
            value = getattr(self, name)
            if not _is_count(value):
                raise InputError(f"replica_groups.{name} is {value!r}; give a whole number >= 1")
        if self.sharding_strategy not in STRATEGIES:
            raise InputError(
                f"replica_groups.sharding_strategy is {self.sharding_strategy!r}; allowed are "
                f"{', '.join(STRATEGIES)}"
            )
        if self.fully_sharded and self.sync_interval != 1:
            raise InputError(
                f"replica_groups.sync_interval is {self.sync_interval}, but {FULLY_SHARDED} "
                "averages weights in every step; leave it out"
            )

    @property
    def fully_sharded(self) -> bool:
        return self.sharding_strategy == FULLY_SHARDED

    def count(self, world_size: int) -> int:
        """Count the sharding groups of a job, each with a copy of every table."""
        return world_size // self.size

    def sharding_group(self, job: Topology) -> Topology:
        """Return the ranks of one sharding group, numbered as plans number them.

        A rank's caps are the least of all its copies. Where the group is the whole job, that is
        the job itself.
        """
        copies = self._copies(job)
        if copies == 1:
            return job
        stride = 1 if self.use_inter_host_allreduce else copies
        apart = self.size if self.use_inter_host_allreduce else 1
        group = _every(job, stride, self.size)
        ranks = [[r * stride + c * apart for c in range(copies)] for r in range(self.size)]
        return replace(
            group,
            hbm_cap_bytes=tuple(
                min(job.hbm_cap_bytes[i] for i in group_ranks) for group_ranks in ranks
            ),
            ddr_cap_bytes=tuple(
                min(job.ddr_cap_bytes[i] for i in group_ranks) for group_ranks in ranks
            ),
            job=job,
        )

    def replica_group(self, job: Topology) -> Topology:
        """Return the ranks that hold the same shards."""
        copies = self._copies(job)
        return _every(job, self.size if self.use_inter_host_allreduce else 1, copies)

    def _copies(self, job: Topology) -> int:
        if job.world_size % self.size:
            divisors = [n for n in range(1, job.world_size + 1) if job.world_size % n == 0]
            raise InputError(
                f"replica_groups.size is {self.size}, which does not divide {job.world_size} "
                f"ranks; allowed are {', '.join(map(str, divisors))}",
                inputs=("gpus",),
            )
        return self.count(job.world_size)

    def facts(self, job: Topology) -> dict[str, Any]:
        """Return the fields and the job that they divide, as plan files and JSON output hold them.

        ``node_group_size`` is the ranks of a sharding group within which TWRW and GRID split rows.
        `DMPCollection` takes it as it is up to TorchRec 1.9, and over its pod size since.
        """
        return {
            **asdict(self),
            "groups": self.count(job.world_size),
            "node_group_size": self.sharding_group(job).intra_group_size,
            "world_size": job.world_size,
            "local_world_size": job.local_world_size,
        }

    @classmethod
    def from_facts(cls, facts: object, where: str) -> tuple[ReplicaGroups, int, int]:
        """Read what `facts` wrote, with the job's ranks and ranks per host."""
        names = ("world_size", "local_world_size")
        if not isinstance(facts, Mapping) or not all(_is_count(facts.get(n)) for n in names):
            raise InputError(
                f"{where}: replica_groups must be an object with size, sync_interval, world_size "
                "and local_world_size, as `shardopt plan` writes it"
            )
        try:
            groups = cls(**{n: facts[n] for n in cls.__dataclass_fields__ if n in facts})
        except (InputError, TypeError) as error:
            raise InputError(f"{where}: {error}") from None
        return groups, facts["world_size"], facts["local_world_size"]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _every(job: Topology, stride: int, count: int) -> Topology:
    """Return ranks ``0, stride, 2 stride, ...`` of a job as a topology of their own."""
    local = _together(job.local_world_size, stride, count)
    domain = _together(job.nvlink_domain, stride, count)
    if local is None or domain is None or count % local:
        raise InputError(
            f"groups of {count} ranks, {stride} apart, lie unevenly on hosts of "
            f"{job.local_world_size} and NVLink domains of {job.nvlink_domain}; choose a "
            "replica_groups.size that fills hosts or divides them",
            inputs=("gpus_per_node",),
        )
    if domain > local:
        # a domain that ends within a group is parted: the largest pods of whole hosts that fit both
        # (TorchRec, pull request 4768)
        domain = local * math.gcd(domain // local, count // local)
    group = Topology.uniform(
        count,
        local,
        hbm_bytes=min(job.hbm_cap_bytes),
        ddr_bytes=min(job.ddr_cap_bytes),
        nvlink_domain=domain,
    )
    within = job.intra_group_size % (stride * count) == 0  # then no level joins them
    levels = () if within else job.network
    joined = (_level(level, job.world_size, stride, count) for level in levels)
    return replace(group, network=tuple(level for level in joined if level is not None))


def _level(level: NetworkLevel, world_size: int, stride: int, count: int) -> NetworkLevel | None:
    """Return a network level as a group sees it; None if the group lies in one part.

    All groups send at once, so a rank's share of the links stays what it is.
    """
    if stride * count == world_size:  # spread over all parts
        return replace(
            level,
            parts=min(level.parts, count),
            ranks=max(1, level.ranks // stride),
            ring_ranks=max(1.0, level.ring_ranks / stride),
            crossings=min(level.crossings, count),
        )
    try:
        return level.in_row(world_size, count)
    except InputError as error:
        raise InputError(f"in groups, {error}; choose another replica_groups.size") from None


def _together(width: int, stride: int, count: int) -> int | None:
    """Return how many of the ranks share a host or domain of ``width``; None if unequal."""
    if stride >= width:
        return 1 if stride % width == 0 else None
    return min(width // stride, count) if width % stride == 0 else None
