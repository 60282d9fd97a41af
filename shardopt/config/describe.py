"""A cluster file out of what machines say: `nvidia-smi topo -m` of one host, and a list of hosts.

Lists are those of schedulers: a name a line, Slurm's ranges, or ``name slots=8``. nvidia-smi's
matrix has a row and a column for every GPU and NIC; two GPUs with ``NV`` and a number between them
are joined by so many links. Lines of `nvidia-smi -L`, which name the GPUs, may stand in the same
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from shardopt.files import decode, read_bytes

_HOST = re.compile(r"(?P<names>\S+?)(?::(?P<colon>\d{1,6})|\s+slots\s*=\s*(?P<slots>\d{1,6}).*)?")
_PART = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\]([^\[\],]*))?(?:,|\Z)")
"""One name of a line, or one with ranges in brackets, and the comma behind it."""
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_hosts(path: str | Path) -> list[tuple[str, int | None]]:
    """Name and GPUs of every host, in order; None where the list does not say how many.

    Args:
        path: lines such as ``node[01-04,07]``, ``node1 slots=8`` (MPI, DeepSpeed) or ``node1:8``;
            empty lines and those that start with ``#`` say nothing.

    Raises:
        InputError: a line is none of these, or a host appears twice; names the line.
    """
    return _read_lines(decode(read_bytes(path, "list of hosts"), path).splitlines(), path)


def _read_lines(lines: Sequence[str], path: str | Path) -> list[tuple[str, int | None]]:
    slots_of: dict[str, int | None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].strip()
        if not words:
            continue
        match = _HOST.fullmatch(words)
        if match is None:
            raise _refuse(path, number, words)
        slots = match["colon"] or match["slots"]
        for name in _names(match["names"], path, number):
            if name in slots_of:
                raise InputError(f"{path}:{number}: host '{name}' appears twice")
            if len(slots_of) == MOST_RANKS:
                raise InputError(f"{path}:{number}: more than {MOST_RANKS} hosts")
            slots_of[name] = None if slots is None else int(slots)
    if not slots_of:
        raise InputError(f"{path}: names no host; give one a line")
    return list(slots_of.items())


def _names(text: str, path: str | Path, number: int) -> Iterator[str]:
    """The hosts of Slurm's short form, such as ``a[1-3],b7``, one by one: a short text may name
    more than memory holds."""
    at = 0
    while at <= len(text):
        part = _PART.match(text, at)
        if part is None or part.end() - at == text.startswith(",", at):
            raise _refuse(path, number, text[at:])
        at = part.end() + (not part[0].endswith(","))
        before, spans, after = part.groups()
        if spans is None:
            yield before
            continue
        for span in spans.split(","):
            bounds = _SPAN.fullmatch(span)
            if bounds is None or int(bounds[1]) > int(bounds[2] or bounds[1]):
                raise _refuse(path, number, span)
            numbers = range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
            yield from (f"{before}{n:0{len(bounds[1])}d}{after}" for n in numbers)


def _refuse(path: str | Path, number: int, words: str) -> InputError:
    return InputError(
        f"{path}:{number}: got {words[:60]!r}; allowed: a host's name, node[01-04,07], or a name "
        "with slots=8"
    )


HINT = "give the output of `nvidia-smi topo -m` on one host"
MOST_GPUS = 1024
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_NIC = re.compile(r"NIC\d+|mlx\d\S*|(?:roce|irdma|efa|hns|bnxt_re|qedr)\S*")
_NAME = re.compile(r"GPU \d+: (?P<name>.+?)(?: \(UUID: .*)?")
_NVLINK = re.compile(r"NV\d+")


@dataclass(frozen=True)
class HostTopology:
    """One host.

    Args:
        gpus: how many, >= 1.
        nvlink_domain: GPUs that NVLink joins, in groups of equal size; 1 where it joins none.
        nics: network cards that the matrix names.
        gpu_name: of all GPUs; None where the file does not say.
    """

    gpus: int
    nvlink_domain: int
    nics: int
    gpu_name: str | None


def read_host(path: str | Path) -> HostTopology:
    """The host that a file describes.

    Raises:
        InputError: it cannot be read, has no matrix, or one that contradicts itself; names the
            line.
    """
    text = _COLOUR.sub("", decode(read_bytes(path, "output of nvidia-smi"), path))
    lines = [line.split() for line in text.splitlines()]
    heads = (i for i, words in enumerate(lines) if words[:1] == ["GPU0"] and "X" not in words)
    head = next(heads, None)
    if head is None:
        raise InputError(f"{path}: has no line that starts with GPU0 GPU1 ...; {HINT}")
    gpus = [word for word in lines[head] if _GPU.fullmatch(word)]
    if len(gpus) > MOST_GPUS or len(set(gpus)) < len(gpus):
        raise InputError(f"{path}:{head + 1}: got {len(gpus)} GPUs, or one twice; {HINT}")
    # the GPUs that NVLink joins to each, itself included
    joined: dict[str, set[str]] = {}
    for row, gpu in enumerate(gpus):
        words = lines[head + 1 + row] if head + 1 + row < len(lines) else []
        cells = words[1 : len(gpus) + 1]
        if words[:1] != [gpu] or len(cells) < len(gpus) or cells[row] != "X":
            raise InputError(
                f"{path}:{head + 2 + row}: got {' '.join(words)[:60]!r}; expected the row of "
                f"{gpu}, with a link to each of {len(gpus)} GPUs and an X for itself; {HINT}"
            )
        linked = zip(gpus, cells, strict=True)
        joined[gpu] = {gpu, *(other for other, cell in linked if _NVLINK.fullmatch(cell))}
    names = {
        match["name"] for line in text.splitlines() if (match := _NAME.fullmatch(line.strip()))
    }
    if len(names) > 1:
        raise InputError(
            f"{path}: names GPUs of {len(names)} kinds ({', '.join(sorted(names))}); give a file "
            "with GPUs of one kind"
        )
    nics = sum(bool(_NIC.fullmatch(name)) for name in lines[head])
    return HostTopology(len(gpus), _domain(path, joined), nics, next(iter(names), None))


def _domain(path: str | Path, joined: Mapping[str, set[str]]) -> int:
    """GPUs of a group all of which NVLink joins; the topology knows groups of one size only."""
    for gpu, group in joined.items():
        if any(joined[other] != group for other in group):
            # a mesh, as of a DGX-1: every GPU reaches only some of the others directly
            raise InputError(
                f"{path}: NVLink joins {gpu} to {len(group) - 1} GPUs, but not all of these to "
                "each other; only fully connected groups are modelled: write the cluster file by "
                "hand, with the nearest nvlink_domain"
            )
    sizes = sorted({len(group) for group in joined.values()})
    if len(sizes) > 1:
        raise InputError(
            f"{path}: NVLink joins groups of {', '.join(map(str, sizes))} GPUs; groups must have "
            "one size: write the cluster file by hand"
        )
    return sizes[0]


def hosts_of(text: str) -> list[tuple[str, int | None]]:
    """Hosts given by number, by name or in a file, with their GPUs where those are known.

    Raises:
        InputError: the number is out of range, or the file cannot be used.
    """
    if not text.isascii() or not text.isdigit():
        # a list as a scheduler prints it, unless a file has that name
        is_list = not Path(text).exists() and ("[" in text or "," in text)
        return _read_lines([text], "hosts") if is_list else read_hosts(text)
    if len(text) > 9 or not 1 <= int(text) <= MOST_RANKS:
        raise InputError(
            f"hosts is {text}; give 1 to {MOST_RANKS}, a list such as node[01-04], or a file of "
            "names",
            inputs=("hosts",),
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
            f"the list gives each host {ranks} slots, but the host has {host.gpus} GPUs",
            inputs=("hosts", "from_nvidia_smi"),
        )
    domain = next(n for n in range(min(host.nvlink_domain, ranks), 0, -1) if ranks % n == 0)
    notes = []
    profile = hardware or (profile_of_device(host.gpu_name) if host.gpu_name else None)
    if profile is None:
        why = f"no profile ships for {host.gpu_name}" if host.gpu_name else "no line names the GPU"
        notes.append(f"{why}: the default profile will be taken unless one is named")
    if host.nics < ranks:
        cards = f"{host.nics} network cards for {ranks} GPUs"
        notes.append(
            f"{cards}: exchanges between hosts are priced at a GPU's share of a card"
            if host.nics
            else f"{cards}: nothing is known of the network between hosts, and one card a GPU is "
            "assumed; give nics_per_host if there are fewer"
        )
    keys = {
        "schema": 1,
        "hosts": len(hosts),
        "ranks_per_host": ranks,
        "nvlink_domain": domain,
        **({"nics_per_host": host.nics} if host.nics else {}),
        **({"hardware": profile} if profile else {}),
    }
    return keys, notes
