"""cluster.yaml -> ClusterConfig: the machines that ``--cluster`` plans for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from predictor.cost.slowest import slowest
from predictor.csv_rows import MOST_RANKS
from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import NetworkLevel
from predictor.section import (
    NOT_EMPTY,
    Name,
    SchemaVersion,
    Section,
    as_number,
    check,
    choice,
    named,
    real,
    refuse,
    whole,
)
from predictor.units import gib
from shardopt.files import decode, read_bytes

MOST_LEVELS = 8
MAX_GIB = 1e6

RACK = "rack"
"""Level name for racks that are given only as numbers of hosts."""


def _one_number(value: object) -> object:
    """one for all parts"""
    if isinstance(value, list):
        raise refuse(
            value,
            "it is one number for all parts; for racks of different sizes give the hosts of each, "
            "such as 'hosts: [8, 16]', and leave this out",
        )
    return value


Ranks = Annotated[int, whole(1, MOST_RANKS)]
OneSize = Annotated[Ranks, BeforeValidator(_one_number)]


def _places(value: object) -> object:
    if isinstance(value, dict) and all(isinstance(part, str | int) for part in value.values()):
        return value
    raise refuse(value, "give the host's part of each level, such as {rail: a}")


def _hosts(value: object) -> object:
    """So many alike, the hosts of each rack, or a list of names or mappings."""
    if isinstance(value, list) and not _of_racks(value):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    items = value if isinstance(value, list) else [value]
    counts = [int(n) for n in map(as_number, items) if n is not None and n == int(n) >= 1]
    if len(counts) < len(items) or sum(counts) > MOST_RANKS:
        raise refuse(
            value,
            f"give the number of hosts, at least 1 and at most {MOST_RANKS}, or that of each rack, "
            "such as [8, 16], or a list of hosts",
        )
    if not isinstance(value, list):
        return [{"name": f"{number}"} for number in range(counts[0])]
    return [
        {"name": f"{rack}-{number}", "in": {RACK: rack}}
        for rack, count in enumerate(counts)
        for number in range(count)
    ]


def _of_racks(hosts: list[Any]) -> bool:
    """Tell if a list has numbers; in quotes they are names of hosts."""
    return any(isinstance(item, int | float) for item in hosts)


@dataclass(frozen=True)
class HostSection(Section):
    """One host of a list: its profile, if not the file's own, and its part of each level."""

    name: Name
    """The host's name."""
    hardware: Name | None = None
    places: Annotated[Mapping[str, Any], BeforeValidator(_places), named("in")] = field(
        default_factory=dict
    )
    """Its part of each level."""


@dataclass(frozen=True)
class LevelSection(Section):
    """One level: what it joins, and by what links."""

    name: Name
    """A word such as nvl72, rail or pod."""
    size: OneSize | None = None
    """Parts that it joins: ranks of the innermost level, parts of the level inside of others."""
    link: Annotated[str, choice(["nvlink", "network"])] = "network"
    oversubscription: Annotated[float, real(1, 1e4)] | None = None
    """Line rates of a part's NICs over the rate of its links to the others."""
    gbit_s: Annotated[float, real(0, 1e6, above=True)] | None = None
    """Rate of a rank's share of those links, in place of the oversubscription."""
    latency_us: Annotated[float, real(0, 1e6)] | None = None
    """Latency of a message between two parts beyond that of one within a part."""


@dataclass(frozen=True)
class ClusterSection(Section):
    """A cluster file."""

    schema_: SchemaVersion
    """The version of this file format: 'schema: 1'."""
    hosts: Annotated[tuple[HostSection, ...], BeforeValidator(_hosts), NOT_EMPTY]
    """The number of hosts, that of each rack in a list, or a list of hosts."""
    ranks_per_host: Ranks
    """The number of ranks (GPUs) of a host."""
    name: Name | None = None
    nvlink_domain: OneSize | None = None
    """Ranks that NVLink joins: they divide a host, or consist of whole hosts."""
    nics_per_host: Ranks | None = None
    """Network cards of a host, where a rank has none of its own."""
    hardware: Name | None = None
    """A profile's name, or its path relative to this file."""
    network: Network | None = None
    levels: Annotated[tuple[LevelSection, ...], Field(min_length=1, max_length=MOST_LEVELS)] = ()
    """Networks that join the hosts, the innermost first; without levels NVLink joins racks."""
    hbm_gib: Any = None
    """GiB of device memory of each rank: one number, or a list with one for each rank."""
    ddr_gib: Any = None
    """The same of host memory."""


@dataclass(frozen=True)
class ClusterConfig:
    """Hosts and their ranks, before any memory is reserved.

    Args:
        name: what the file calls it, or the file's name.
        hosts: >= 1.
        ranks_per_host: GPUs of one host, >= 1.
        nvlink_domain: ranks joined by NVLink; a host when the file does not say.
        hardware: name or path of a hardware profile, None when left open. A path is already
            relative to the working directory.
        hbm_bytes: device memory of each rank, None to take the profile's.
        ddr_bytes: host memory of each rank (its share of the host), None to take the profile's.
        network: levels of the network between hosts, or between NVLink domains that span hosts.
        fabric: what kind of network that is; None: the one of the profile.
        host_hardware: of each host, if they differ; as ``hardware``.
        notes: what the user should be told once.
    """

    name: str
    hosts: int
    ranks_per_host: int
    nvlink_domain: int
    hardware: str | None = None
    hbm_bytes: tuple[int, ...] | None = None
    ddr_bytes: tuple[int, ...] | None = None
    network: tuple[NetworkLevel, ...] = ()
    fabric: Network | None = None
    host_hardware: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    def joined(self, hardware: HardwareProfile) -> HardwareProfile:
        """A profile in these hosts, whoever named it."""
        return hardware if self.fabric is None else self.fabric.joins(hardware)


def load_cluster(path: str | Path) -> ClusterConfig:
    """Load the cluster that a file describes.

    Args:
        path: a YAML file with the keys of `ClusterSection`.

    Raises:
        InputError: the file cannot be read or used; has a line for every problem.
    """
    problems = Problems(str(path))
    raw = parse_yaml(decode(read_bytes(path, "cluster file"), path), problems)
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}:1: got {shown(raw)}; a cluster file is a mapping that starts with 'schema: 1'"
        )
    section = check(ClusterSection, raw, (), problems)
    if section is not None and isinstance(raw["hosts"], list):
        section = _with_racks(section, raw["hosts"])
    ranks = len(section.hosts) * section.ranks_per_host if section else 0
    if section is not None:
        _check_lists(section, problems)
    if ranks > MOST_RANKS:
        problems.add(("hosts",), f"hosts x ranks_per_host is {ranks}; at most {MOST_RANKS} ranks")
        ranks = 0
    hbm = _caps(raw.get("hbm_gib"), "hbm_gib", ranks, problems)
    ddr = _caps(raw.get("ddr_gib"), "ddr_gib", ranks, problems)
    problems.raise_if_any()
    assert section is not None
    hosts, levels, local = section.hosts, section.levels, section.ranks_per_host
    domain, note = _domain(section, ranks, problems)
    shared = max(1.0, local / (section.nics_per_host or local))
    if shared > 1 and ranks > domain and all(level.link == "nvlink" for level in levels):
        levels = (*levels, LevelSection("hosts"))
    network = _network_levels(levels, hosts, local, domain, shared, problems)

    def profile_of(name: str | None) -> str | None:
        """A profile's name as it is; a path made relative to the cluster file."""
        is_path = name is not None and name.endswith((".yaml", ".yml"))
        return str(Path(path).parent / name) if name and is_path else name

    own = profile_of(section.hardware)
    mixed: tuple[str, ...] = ()
    if any(host.hardware is not None for host in hosts):
        mixed = tuple(profile_of(host.hardware) or own or "" for host in hosts)
    if "" in mixed:
        advice = "other hosts name their hardware; name this one's, too, or one for the whole file"
        problems.fail(("hosts", mixed.index("")), advice)
    return ClusterConfig(
        name=section.name or Path(path).stem,
        hosts=len(hosts),
        ranks_per_host=local,
        nvlink_domain=domain,
        hardware=own,
        hbm_bytes=hbm,
        ddr_bytes=ddr,
        network=network,
        fabric=section.network,
        host_hardware=mixed,
        notes=(note,) if note else (),
    )


def _with_racks(section: ClusterSection, raw_hosts: list[Any]) -> ClusterSection:
    """Place hosts that were given as numbers per rack into parts of the innermost level."""
    if not _of_racks(raw_hosts):
        return section
    levels = section.levels or (LevelSection(RACK, link="nvlink"),)
    hosts = (replace(host, places={levels[0].name: host.places[RACK]}) for host in section.hosts)
    return replace(section, levels=levels, hosts=tuple(hosts))


def _check_lists(section: ClusterSection, problems: Problems) -> None:
    """Record what is wrong between the keys of a host or a level, and between several."""
    hosts, names = set[str](), [level.name for level in section.levels]
    for number, host in enumerate(section.hosts):
        if host.name in hosts:
            problems.add(("hosts", number), f"host '{host.name}' appears twice")
        hosts.add(host.name)
    for i, level in enumerate(section.levels):
        path = ("levels", i)
        if level.link == "nvlink":
            if i:
                problems.add((*path, "link"), "only the innermost level can be NVLink")
            for key in ("oversubscription", "gbit_s", "latency_us"):
                if getattr(level, key) is not None:
                    problems.add((*path, key), "the profile has the costs of NVLink; leave it out")
        elif level.oversubscription is not None and level.gbit_s is not None:
            problems.add(path, "has oversubscription and gbit_s; give one of them")
        if level.name in names[:i]:
            problems.add(("levels",), f"'{level.name}' appears twice; rename one")


def _domain(section: ClusterSection, world: int, problems: Problems) -> tuple[int, str]:
    """Ranks joined by NVLink, by the rule of `predictor.model.topology.Topology`, checked here to
    name file and line; and what to tell the user of domains of unlike size."""
    host, stated = section.ranks_per_host, section.nvlink_domain
    inner = next((level for level in section.levels if level.link == "nvlink"), None)
    size, note = (None, "") if inner is None else _nvlink_size(section, inner, world, problems)
    if stated is not None and inner and size and stated != size:
        problems.fail(("nvlink_domain",), f"got {stated}, but level '{inner.name}' has {size}")
    domain = stated or size or host
    if host % domain and (domain % host or world % domain):
        problems.fail(
            ("nvlink_domain",) if stated is not None else ("levels", 0, "size"),
            f"got {domain}; it must divide ranks_per_host ({host}), or be whole hosts that divide "
            f"all {world} ranks",
        )
    return domain, note


def _nvlink_size(
    section: ClusterSection, level: LevelSection, world: int, problems: Problems
) -> tuple[int | None, str]:
    """Ranks of a part of the NVLink level: as given, of the parts that hosts say they are in, or
    what the sizes of the levels around it leave; None where ``nvlink_domain`` says it.

    TorchRec splits tables within groups of one size (``Topology.intra_group_size``), so of parts of
    unlike size the domain is the largest group of whole hosts that divides them all, as TorchRec's
    ``resolve_pod_size`` has it (pull request 4768).
    """
    named = _named_parts(level, 0, section.hosts, problems)
    if named:
        host = section.ranks_per_host
        stretches = [len([*same]) * host for _, same in groupby(named)]
        domain, sizes = math.gcd(*stretches), sorted({*Counter(named).values()})
        if len(sizes) == 1 and domain == sizes[0] * host:
            return domain, ""
        ranks = ", ".join(str(size * host) for size in sizes)
        return domain, (
            f"{level.name}: NVLink joins parts of {ranks} ranks, but TorchRec splits tables within "
            f"groups of one size; planned with domains of {domain}, the largest that fit"
        )
    if level.size is not None or section.nvlink_domain is not None:
        return level.size, ""
    return _left_over(world, section.levels[1:], 0, "ranks that NVLink joins", problems), ""


def _left_over(
    count: int, outer: Sequence[LevelSection], number: int, parts: str, problems: Problems
) -> int:
    """The size of a level that follows from the sizes of all levels around it.

    Args:
        count: parts that these levels join in all.
        outer: the levels around it.
        number: of the level, for messages.
    """
    sizes = [level.size for level in outer]
    stated_sizes = [size for size in sizes if size is not None]
    if len(stated_sizes) < len(sizes):
        problems.fail(
            ("levels", number),
            f"size is missing; give the number of {parts}, or the size of every other level",
        )
    if count % math.prod(stated_sizes):
        problems.fail(
            ("levels", number),
            f"size is missing, and {count} does not divide by the sizes of the levels around it, "
            f"{' x '.join(map(str, stated_sizes))}",
        )
    return count // math.prod(stated_sizes)


def _named_parts(
    level: LevelSection, number: int, hosts: Sequence[HostSection], problems: Problems
) -> list[Hashable]:
    """The part of a level that each host says it is in; empty where no host says any."""
    named = [host.places.get(level.name) for host in hosts]
    if all(name is None for name in named):
        return []
    without = next((h.name for h, name in zip(hosts, named, strict=True) if name is None), "")
    if without or level.size is not None:
        why = f"host '{without}' says none" if without else "it has a size too"
        problems.fail(
            ("levels", number), f"hosts say which part of '{level.name}' they are in, but {why}"
        )
    return named


def _network_levels(
    levels: Sequence[LevelSection],
    hosts: Sequence[HostSection],
    local: int,
    domain: int,
    shared: float,
    problems: Problems,
) -> tuple[NetworkLevel, ...]:
    """Return the network levels between hosts, or between NVLink domains that span hosts.

    Args:
        local: ranks of a host.
        domain: ranks joined by NVLink.
        shared: ranks to a network card, of which a profile has one a rank.
    """
    first = sum(level.link == "nvlink" for level in levels)
    names = [level.name for level in levels]
    for number, host in enumerate(hosts):
        for name in host.places:
            if name not in names:
                words = ", ".join(names) or "none, as the file has no levels"
                problems.fail(("hosts", number, "in"), f"level '{name}' is unknown; known: {words}")
    together = max(1, domain // local)
    units: list[Hashable] = [i // together for i in range(len(hosts))]
    if first:
        units = _named_parts(levels[0], 0, hosts, problems) or units
    joined = []
    for i, level in enumerate(levels[first:], start=first):
        joined.append(
            NetworkLevel.of(
                level.name,
                units,
                local,
                oversubscription=shared * (level.oversubscription or 1.0),
                gbit_s=level.gbit_s,
                latency_us=level.latency_us or 0.0,
            )
        )
        units = _joined(levels, i, hosts, units, problems)
    return tuple(joined)


def _joined(
    levels: Sequence[LevelSection],
    number: int,
    hosts: Sequence[HostSection],
    units: Sequence[Hashable],
    problems: Problems,
) -> list[Hashable]:
    """The part of a level that each host is in, by the part inside it."""
    level, path, is_last = levels[number], ("levels", number), number == len(levels) - 1
    parts: dict[Hashable, Hashable] = {}
    named = _named_parts(level, number, hosts, problems)
    if named:
        for unit, name in zip(units, named, strict=True):
            if parts.setdefault(unit, name) != name:
                problems.fail(
                    path, f"hosts of one inner part are in both '{parts[unit]}' and '{name}'"
                )
    else:
        inner = list(dict.fromkeys(units))
        size = level.size or _left_over(
            len(inner), levels[number + 1 :], number, "parts that it joins", problems
        )
        if len(inner) % size or (is_last and size != len(inner)):
            problems.fail(
                (*path, "size"),
                f"got {size}; there are {len(inner)} parts for '{level.name}' to join, and size "
                f"must {'join all of them' if is_last else 'divide their number'}",
            )
        parts = {unit: index // size for index, unit in enumerate(inner)}
    if is_last and len(set(parts.values())) > 1:
        problems.fail(path, "the outermost level must join all hosts into one part")
    return [parts[unit] for unit in units]


def _caps(raw: object, key: str, ranks: int, problems: Problems) -> tuple[int, ...] | None:
    """GiB per rank as bytes of every rank; a single number holds for all."""
    if raw is None:
        return None
    several = isinstance(raw, list)
    values = raw if isinstance(raw, list) else [raw] * (ranks or 1)
    if several and ranks and len(values) != ranks:
        problems.add((key,), f"got {len(values)} numbers for {ranks} ranks; give one per rank")
    numbers = [as_number(value) for value in values]
    for i, number in enumerate(numbers):
        # 0 is a cap too: CPU ranks have no device memory, and hosts may have none to spare
        if number is None or not 0 <= number <= MAX_GIB:
            problems.add(
                (key, i) if several else (key,),
                f"got {shown(values[i])}; it must be GiB per rank, at least 0 and at most "
                f"{MAX_GIB:g}",
            )
            return None
    return tuple(gib(number) for number in numbers if number is not None)


def hardware_of(cluster: ClusterConfig) -> tuple[str, HardwareProfile] | None:
    """Return the cluster's profile, after its name or path; None where the file names none.

    Where hosts differ, the slowest decides, and the name is that of the one with its kernels.

    Raises:
        ProfileError: there is no such hardware profile.
        InputError: some hosts are of CPUs and some of GPUs.
    """
    if not cluster.host_hardware:
        return (cluster.hardware, load_hardware(cluster.hardware)) if cluster.hardware else None
    hosts = devices_of(cluster)
    profile = slowest(list(hosts.values()))
    return next(name for name in hosts if hosts[name].memory == profile.memory), profile


def devices_of(cluster: ClusterConfig) -> dict[str, HardwareProfile]:
    """The profiles of hosts that differ, by name or path, each read once.

    Raises:
        ProfileError: there is no such hardware profile.
    """
    return {name: load_hardware(name) for name in dict.fromkeys(cluster.host_hardware)}


def default_nvlink_domain(hardware: HardwareProfile, ranks: int, local: int) -> int:
    """Ranks joined by NVLink, when no cluster file says it.

    Inside a host: the largest group of at most the profile's domain that divides the host. Where
    the platform joins hosts by NVLink: the largest number of whole hosts that it allows and that
    divides all ranks.
    """
    domain = min(hardware.nvlink_domain, ranks)
    if hardware.nvlink_domain > hardware.gpus_per_host and domain >= local:
        hosts = ranks // local
        return local * max(n for n in _divisors(hosts) if n * local <= domain)
    return max(n for n in _divisors(local) if n <= domain)


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
