"""A cluster file out of `nvidia-smi topo -m` of one host and a list of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from shardopt.config.clusters.host_list import read_hosts
from shardopt.config.clusters.nvidia_smi import HostTopology


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
