"""What `nvidia-smi topo -m` says of a host: its GPUs, which of them NVLink joins, and its NICs.

The matrix has a row and a column for every GPU and NIC; two GPUs with ``NV`` and a number between
them are joined by so many links. Lines of `nvidia-smi -L`, which name the GPUs, may stand in the
same file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictor.errors import InputError
from shardopt.files import decode, read_bytes

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
    lines = text.splitlines()
    head, columns = _header(path, lines)
    gpus = [name for name in columns if _GPU.fullmatch(name)]
    joined = {gpus[row]: _joined(path, lines, head, row, gpus) for row in range(len(gpus))}
    names = [match["name"] for line in lines if (match := _NAME.fullmatch(line.strip()))]
    if len(set(names)) > 1:
        raise InputError(
            f"{path}: names GPUs of {len(set(names))} kinds ({', '.join(sorted(set(names)))}); a "
            "cluster has one: give a file of one kind"
        )
    nics = sum(bool(_NIC.fullmatch(name)) for name in columns)
    return HostTopology(len(gpus), _domain(path, joined), nics, names[0] if names else None)


def _header(path: str | Path, lines: Sequence[str]) -> tuple[int, list[str]]:
    """Number of the line above the matrix, and its words."""
    for number, line in enumerate(lines):
        words = line.split()
        if words and words[0] == "GPU0" and "X" not in words:
            gpus = [word for word in words if _GPU.fullmatch(word)]
            if len(gpus) > MOST_GPUS or len(set(gpus)) < len(gpus):
                raise InputError(f"{path}:{number + 1}: got {len(gpus)} GPUs, or one twice; {HINT}")
            return number, words
    raise InputError(f"{path}: has no line that starts with GPU0 GPU1 ...; {HINT}")


def _joined(
    path: str | Path, lines: Sequence[str], head: int, row: int, gpus: Sequence[str]
) -> frozenset[str]:
    """The GPUs that NVLink joins to one of them, itself included."""
    number = head + 1 + row
    words = lines[number].split() if number < len(lines) else []
    cells = words[1 : len(gpus) + 1]
    if not words or words[0] != gpus[row] or len(cells) < len(gpus) or cells[row] != "X":
        given = repr(lines[number][:60]) if number < len(lines) else "the end of the file"
        raise InputError(
            f"{path}:{number + 1}: got {given}; here the row of {gpus[row]} is due, with a link to "
            f"each of {len(gpus)} GPUs and an X for itself; {HINT}"
        )
    linked = {gpu for gpu, cell in zip(gpus, cells, strict=True) if _NVLINK.fullmatch(cell)}
    return frozenset(linked | {gpus[row]})


def _domain(path: str | Path, joined: dict[str, frozenset[str]]) -> int:
    """GPUs of a group all of which NVLink joins; the topology knows groups of one size only."""
    sizes = set()
    for gpu, group in joined.items():
        if any(joined[other] != group for other in group):
            # a mesh, as of a DGX-1: every GPU reaches only some of the others directly
            raise InputError(
                f"{path}: NVLink joins {gpu} to {len(group) - 1} GPUs that it does not all join to "
                "each other; only groups in which each reaches each are modelled: write the "
                "cluster file by hand, with the nvlink_domain that comes nearest"
            )
        sizes.add(len(group))
    if len(sizes) > 1:
        raise InputError(
            f"{path}: NVLink joins groups of {', '.join(map(str, sorted(sizes)))} GPUs; groups "
            "must have one size: write the cluster file by hand"
        )
    return sizes.pop()
