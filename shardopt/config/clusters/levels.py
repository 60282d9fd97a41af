"""The hosts and levels of a cluster file: who sits where, and what joins them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from predictor.csv_rows import MOST_RANKS
from predictor.document import Problems, shown
from predictor.model.topology import NetworkLevel
from shardopt.config.schema import Name, Section, check
from shardopt.config.values import as_number, choice, real, whole

MOST_LEVELS = 8

Ranks = Annotated[int, whole(1, MOST_RANKS)]


class HostSection(Section):
    """One host of a list."""

    name: Name = Field(description="the host's name")
    hardware: Name | None = None
    in_: Any = Field(alias="in", default=None)


class LevelSection(Section):
    """One level: what it joins, and by what links."""

    name: Name = Field(description="a word such as nvl72, rail or pod")
    size: Ranks | None = None
    link: Annotated[str, choice(["nvlink", "network"])] = "network"
    oversubscription: Annotated[float, real(1, 1e4)] | None = None
    gbit_s: Annotated[float, real(0, 1e6, above=True)] | None = None
    latency_us: Annotated[float, real(0, 1e6)] | None = None


@dataclass(frozen=True)
class Host:
    """A host as a cluster file lists it.

    Args:
        hardware: its profile, None where the file's own holds.
        places: level -> the part of that level that it is in.
    """

    name: str
    hardware: str | None
    places: dict[str, Hashable]


def read_host_list(raw: object, problems: Problems) -> list[Host]:
    """The hosts of a file: so many alike, or a list of names or mappings."""
    if not isinstance(raw, list):
        count = as_number(raw)
        if count is None or count != int(count) or not 1 <= count <= MOST_RANKS:
            problems.add(
                ("hosts",),
                f"got {shown(raw)}; give the number of hosts, at least 1 and at most {MOST_RANKS}, "
                "or a list of hosts",
            )
            return []
        return [Host(str(number), None, {}) for number in range(int(count))]
    found: dict[str, Host] = {}
    for number, item in enumerate(raw):
        host = _host({"name": item} if isinstance(item, str) else item, number, problems)
        if host is not None and host.name in found:
            problems.add(("hosts", number), f"host '{host.name}' is there twice")
        if host is not None:
            found[host.name] = host
    if not raw:
        problems.add(("hosts",), "got an empty list; give at least one host")
    return list(found.values())


def _host(raw: object, number: int, problems: Problems) -> Host | None:
    section = check(HostSection, raw, ("hosts", number), problems)
    if section is None:
        return None
    places = section.in_ or {}
    if not isinstance(places, dict) or not all(isinstance(v, str | int) for v in places.values()):
        problems.add(
            ("hosts", number, "in"),
            f"got {shown(section.in_)}; give the host's part of each level, such as {{rail: a}}",
        )
        return None
    return Host(section.name, section.hardware, {str(k): v for k, v in places.items()})


def read_levels(raw: object, problems: Problems) -> list[LevelSection]:
    """The levels of a file, the innermost first; the first may be NVLink."""
    if raw is None:
        return []
    if not isinstance(raw, list) or not 1 <= len(raw) <= MOST_LEVELS:
        problems.add(("levels",), f"got {shown(raw)}; it must be a list of 1 to {MOST_LEVELS}")
        return []
    found = []
    for i, item in enumerate(raw):
        level = check(LevelSection, item, ("levels", i), problems)
        if level is None:
            return []
        if level.link == "nvlink":
            _check_nvlink(level, i, problems)
        elif level.oversubscription is not None and level.gbit_s is not None:
            problems.add(("levels", i), "has oversubscription and gbit_s; give one of them")
        found.append(level)
    names = [level.name for level in found]
    if len(set(names)) < len(names):
        problems.add(("levels",), f"names are {', '.join(names)}; each must be there once")
    return found


def _check_nvlink(level: LevelSection, number: int, problems: Problems) -> None:
    path = ("levels", number)
    if number:
        problems.add((*path, "link"), "only the innermost level can be NVLink; put it first")
    if level.size is None:
        problems.add(path, "size is missing; give the number of ranks that NVLink joins")
    for key in ("oversubscription", "gbit_s", "latency_us"):
        if getattr(level, key) is not None:
            problems.add((*path, key), "NVLink costs what the profile says; leave it out")


def network_levels(
    levels: Sequence[LevelSection],
    hosts: Sequence[Host],
    local: int,
    domain: int,
    problems: Problems,
) -> tuple[NetworkLevel, ...]:
    """What joins the hosts, or the NVLink domains that span hosts.

    Args:
        local: ranks of a host.
        domain: ranks joined by NVLink.
    """
    first = sum(level.link == "nvlink" for level in levels)
    known = [level.name for level in levels[first:]]
    for number, host in enumerate(hosts):
        for name in host.places:
            if name not in known:
                words = ", ".join(known) or "none, as the file has no levels of a network"
                problems.add(("hosts", number, "in"), f"level '{name}' is unknown; known: {words}")
                return ()
    together = max(1, domain // local)
    units: list[Hashable] = [i // together for i in range(len(hosts))]
    found = []
    for i, level in enumerate(levels[first:], start=first):
        found.append(
            NetworkLevel.of(
                level.name,
                units,
                local,
                oversubscription=level.oversubscription or 1.0,
                gbit_s=level.gbit_s,
                latency_us=level.latency_us or 0.0,
            )
        )
        joined = _joined(level, i == len(levels) - 1, hosts, units, (i, problems))
        if joined is None:
            return ()
        units = joined
    return tuple(found)


def _joined(
    level: LevelSection,
    is_last: bool,
    hosts: Sequence[Host],
    units: Sequence[Hashable],
    place: tuple[int, Problems],
) -> list[Hashable] | None:
    """The part of the level that each host is in, by the part inside it; None where that is wrong,
    which is recorded at its place in the list of levels."""
    number, problems = place
    path = ("levels", number)
    inner = list(dict.fromkeys(units))
    named = [host.places.get(level.name) for host in hosts]
    if any(name is not None for name in named):
        without = next((h.name for h, name in zip(hosts, named, strict=True) if name is None), "")
        if without or level.size is not None:
            why = f"host '{without}' says none" if without else "it has a size too"
            problems.add(path, f"hosts say which part of '{level.name}' they are in, but {why}")
            return None
        parts: dict[Hashable, Hashable] = {}
        for unit, name in zip(units, named, strict=True):
            if parts.setdefault(unit, name) != name:
                problems.add(path, f"hosts of one part inside are in '{parts[unit]}' and '{name}'")
                return None
    else:
        size = level.size or (len(inner) if is_last else 0)
        if not size:
            problems.add(path, "size is missing; only the outermost level may leave it out")
            return None
        if len(inner) % size or (is_last and size != len(inner)):
            must = "must join all of them" if is_last else "must divide that"
            problems.add(
                (*path, "size"),
                f"got {size}; there are {len(inner)} parts for '{level.name}' to join, and it "
                f"{must}",
            )
            return None
        parts = {unit: index // size for index, unit in enumerate(inner)}
    if is_last and len(set(parts.values())) > 1:
        problems.add(path, "the outermost level must join all hosts into one part")
        return None
    return [parts[unit] for unit in units]
