"""cluster.yaml -> ClusterConfig: the machines that ``--cluster`` plans for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import HardwareProfile
from predictor.units import gib
from shardopt.config.document import parse_yaml
from shardopt.config.host_list import read_hosts
from shardopt.config.nvidia_smi import HostTopology
from shardopt.config.problems import Problems, shown
from shardopt.config.schema import Name, SchemaVersion, Section, check
from shardopt.config.values import as_number, whole
from shardopt.files import decode, read_bytes

MAX_GIB = 1e6

Ranks = Annotated[int, whole(1, MOST_RANKS)]


class ClusterSection(Section):
    """The keys of a cluster file."""

    schema_: SchemaVersion = Field(
        alias="schema", description="the version of this file format: 'schema: 1'"
    )
    name: Name | None = None
    hosts: Ranks = Field(description="the number of hosts")
    ranks_per_host: Ranks = Field(description="the number of ranks (GPUs) of a host")
    nvlink_domain: Ranks | None = None
    hardware: Name | None = None
    hbm_gib: Any = None
    ddr_gib: Any = None


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
    """

    name: str
    hosts: int
    ranks_per_host: int
    nvlink_domain: int
    hardware: str | None = None
    hbm_bytes: tuple[int, ...] | None = None
    ddr_bytes: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host


def load_cluster(path: str | Path) -> ClusterConfig:
    """The cluster that a file describes.

    Args:
        path: a YAML file with ``schema: 1``, ``hosts``, ``ranks_per_host``; optional are ``name``,
            ``nvlink_domain`` (ranks; divides a host or consists of whole hosts), ``hardware``
            (profile name, or path relative to this file), ``hbm_gib`` and ``ddr_gib`` (GiB per
            rank: one number, or a list with one per rank).

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
    ranks = section.hosts * section.ranks_per_host if section else None
    if ranks is not None and ranks > MOST_RANKS:
        problems.add(("hosts",), f"hosts x ranks_per_host is {ranks}; at most {MOST_RANKS} ranks")
        ranks = None
    hbm = _caps(raw.get("hbm_gib"), "hbm_gib", ranks, problems)
    ddr = _caps(raw.get("ddr_gib"), "ddr_gib", ranks, problems)
    if section is not None:
        _check_domain(section, problems)
    problems.raise_if_any()
    assert section is not None
    return ClusterConfig(
        name=section.name or Path(path).stem,
        hosts=section.hosts,
        ranks_per_host=section.ranks_per_host,
        nvlink_domain=section.nvlink_domain or section.ranks_per_host,
        hardware=_hardware(section.hardware, Path(path).parent),
        hbm_bytes=hbm,
        ddr_bytes=ddr,
    )


def _check_domain(section: ClusterSection, problems: Problems) -> None:
    """The rule of `predictor.model.topology.Topology`, checked here to name file and line."""
    domain, host = section.nvlink_domain, section.ranks_per_host
    world = host * section.hosts
    if domain is None or host % domain == 0 or (domain % host == 0 and world % domain == 0):
        return
    problems.add(
        ("nvlink_domain",),
        f"got {domain}; it must divide ranks_per_host ({host}), or be whole hosts that divide all "
        f"{world} ranks",
    )


def _caps(raw: object, key: str, ranks: int | None, problems: Problems) -> tuple[int, ...] | None:
    """GiB per rank as bytes of every rank; a single number holds for all."""
    if raw is None:
        return None
    if isinstance(raw, list):
        if ranks is not None and len(raw) != ranks:
            problems.add((key,), f"got {len(raw)} numbers for {ranks} ranks; give one per rank")
        caps = [_cap(value, (key, i), problems) for i, value in enumerate(raw)]
    else:
        caps = [_cap(raw, (key,), problems)] * (ranks or 1)
    return tuple(caps)


def _cap(value: object, path: tuple[str | int, ...], problems: Problems) -> int:
    number = as_number(value)
    # 0 is a cap too: CPU ranks have no device memory, and hosts may have none to spare
    if number is None or not 0 <= number <= MAX_GIB:
        problems.add(
            path, f"got {shown(value)}; it must be GiB per rank, at least 0 and at most {MAX_GIB:g}"
        )
        return 0
    return gib(number)


def _hardware(given: str | None, directory: Path) -> str | None:
    """A profile's name as it is; a path made relative to the cluster file."""
    if given is None or not given.endswith((".yaml", ".yml")):
        return given
    return str(directory / given)


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


def hosts_of(text: str) -> list[tuple[str, int | None]]:
    """Hosts given by their number or in a file, with their GPUs where those are known.

    Raises:
        InputError: the number is out of range, or the file cannot be used.
    """
    if not text.isascii() or not text.isdigit():
        return read_hosts(text)
    if not 1 <= int(text) <= MOST_RANKS:
        raise InputError(
            f"hosts is {text}; give 1 to {MOST_RANKS}, or a file of names", inputs=("hosts",)
        )
    return [(str(number), None) for number in range(int(text))]


def describe(
    host: HostTopology, hosts: Sequence[tuple[str, int | None]], hardware: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The keys of a cluster file for hosts that are all like one, and what to tell the user.

    Args:
        hosts: name and GPUs, None where unknown; a scheduler may give fewer than a host has.
        hardware: name or path of the profile; None to take the one of the GPU's name.

    Raises:
        InputError: the hosts have different numbers of GPUs, more than there are, or numbers that
            no NVLink domains make up.
    """
    used = {host.gpus if slots is None else slots for _, slots in hosts}
    if len(used) > 1:
        few = next(name for name, slots in hosts if slots == min(used))
        raise InputError(
            f"hosts have {', '.join(map(str, sorted(used)))} GPUs; TorchRec's plans need as many "
            f"on every host: leave out '{few}', or use {min(used)} of each",
            inputs=("hosts",),
        )
    (ranks,) = used
    if not 1 <= ranks <= host.gpus:
        raise InputError(
            f"the list gives hosts {ranks} slots, but the host has {host.gpus} GPUs",
            inputs=("hosts", "from_nvidia_smi"),
        )
    domain = next(n for n in range(min(host.nvlink_domain, ranks), 0, -1) if ranks % n == 0)
    notes = []
    profile = hardware or (profile_of_device(host.gpu_name) if host.gpu_name else None)
    if profile is None:
        why = f"no profile ships for {host.gpu_name}" if host.gpu_name else "no line names the GPU"
        notes.append(f"{why}: the default profile will be taken unless one is named")
    if len(hosts) > 1 and host.nics < ranks:
        notes.append(
            f"{host.nics} network cards for {ranks} GPUs: profiles count one a GPU, so exchanges "
            "between hosts will take longer; give a profile with the nic_gbit_s of a GPU's share"
        )
    found = {
        "schema": 1,
        "hosts": len(hosts),
        "ranks_per_host": ranks,
        "nvlink_domain": domain,
        **({"hardware": profile} if profile else {}),
    }
    return found, notes


def write_cluster(keys: Mapping[str, Any]) -> str:
    """The text of a cluster file."""
    return yaml.safe_dump(dict(keys), sort_keys=False)
