"""Description of the machine: processor, memory and versions, and its load by other work."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from shardopt.version import __version__

PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "numpy")

_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, irq, softirq, steal."""


@dataclass(frozen=True)
class Usage:
    """Seconds since some start.

    Args:
        busy_s: of all cores together, by anyone; None where the system does not tell.
        own_s: of this process with its threads.
    """

    wall_s: float
    busy_s: float | None
    own_s: float


def usage() -> Usage:
    spent = os.times()
    return Usage(time.monotonic(), _busy_seconds(), spent.user + spent.system)


def other_cores(before: Usage, after: Usage, own_s: float) -> float | None:
    """Return the mean number of cores that were busy with other work between two moments.

    Args:
        own_s: seconds that all ranks on this machine worked in between.
    """
    if before.busy_s is None or after.busy_s is None:
        return None
    other_s = after.busy_s - before.busy_s - own_s
    # interrupts for the ranks count as other work, and the kernel counts in ticks
    return round(max(0.0, other_s) / max(after.wall_s - before.wall_s, 1e-9), 3)


def _busy_seconds() -> float | None:
    with suppress(ValueError, IndexError):
        columns = _lines("/proc/stat")[0].split()[1:]
        return sum(int(columns[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    return None


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, Python, load average."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


def _processor() -> str | None:
    """Return the processor's own name, where the system tells."""
    lines = _lines("/proc/cpuinfo")
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor()) or None


def environment(backend: str) -> dict[str, Any]:
    """Describe machine and versions, on which times depend; names no host and no path."""
    about = {key: value for key, value in machine().items() if key != "load_average"}
    about["memory_bytes"] = memory_bytes()
    about["kernel"] = platform.release()
    about["shardopt"] = __version__
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    if backend == "nccl":
        import torch

        about["gpu"] = torch.cuda.get_device_name(0)
        about["cuda"] = torch.version.cuda
    return about


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Return the bytes of host memory free without swapping, also under a container's limit."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = [int(line.split()[1]) * 1024]
    limit = _lines("/sys/fs/cgroup/memory.max")
    # not memory.current, which counts cached files that are dropped when memory is short
    used = [ln.split()[1] for ln in _lines("/sys/fs/cgroup/memory.stat") if ln.startswith("anon ")]
    if limit and used and limit[0].strip().isdigit():
        free.append(int(limit[0]) - int(used[0]))
    return max(0, min(free))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
