"""Calibration from the first point to the profile: measure what is missing, save, fit."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from predictor.errors import InputError
from shardopt.bench.timing import machine
from shardopt.calibrate.design import Point, Size, collective_points, kernel_points
from shardopt.calibrate.ranks import Job, available_cores, run_ranks
from shardopt.calibrate.rows import Measured, Origin, RowsFile
from shardopt.calibrate.sampling import SETTINGS

MAX_RANKS = 1024
BUSY = 0.5
"""Load average before anything is measured, above which other work disturbs the times."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What to calibrate.

    Args:
        rows: where rows are kept; what it already holds is not measured again.
    """

    backend: str
    ranks: int
    size: Size
    rows: Path


def check(backend: str, ranks: int) -> None:
    """Refuse what cannot be measured here.

    Raises:
        InputError: says what is missing and what to do.
    """
    if not 2 <= ranks <= MAX_RANKS:
        raise InputError(
            f"--ranks is {ranks}; it must be at least 2 and at most {MAX_RANKS}: "
            "collectives need someone to talk to"
        )
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise InputError("this PyTorch has no torch.distributed; install one that has")
    if backend == "nccl":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < ranks:
            raise InputError(
                f"--backend nccl with {ranks} ranks needs as many GPUs, PyTorch sees {found}; "
                "give fewer --ranks, or --backend gloo to measure CPU ranks"
            )


def origin(backend: str) -> Origin:
    """Machine and versions, without anything that names the host."""
    about = machine()
    name = about["processor"] or about["machine"]
    if backend == "nccl":
        import torch

        name = f"{torch.cuda.get_device_name(0)}, {name}"
    memory = memory_gib()
    # the virtual machine's memory varies by a few pages from boot to boot
    said = f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    return Origin(said, f"torch {_version('torch')}, fbgemm {_fbgemm()}")


def _fbgemm() -> str:
    for package in ("fbgemm_gpu", "fbgemm_gpu-cpu", "fbgemm-gpu-cpu"):
        found = _version(package)
        if found != "none":
            return found
    return "none"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def memory_gib() -> float:
    """Main memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def measure(asked: Asked, say: Say) -> RowsFile:
    """Measure every point that the rows file lacks.

    Raises:
        InputError: the rows file is of another machine, or corrupt.
        MeasurementError: a rank failed; the rows measured before are in the file.
    """
    file = RowsFile.open(asked.rows, origin(asked.backend))
    load = os.getloadavg()[0]
    if load > BUSY:
        say(f"something else runs here (load average {load:.1f}): times will be too long")
    kernels = kernel_points(asked.size)
    exchanges = collective_points(asked.size, asked.ranks)
    total = len(kernels) + len(exchanges)
    for points, ranks in ((kernels, 1), (exchanges, asked.ranks)):
        missing = [point for point in points if not file.has(point)]
        done = total - len(kernels) - len(exchanges) if ranks == 1 else len(kernels)
        done += len(points) - len(missing)
        if not missing:
            say(f"{len(points)} points are already in {asked.rows}")
            continue
        job = Job(missing, asked.size, ranks, asked.backend, available_cores())
        if ranks > len(job.cores) and asked.backend == "gloo":
            say(f"{ranks} ranks share {len(job.cores)} cores: their times are no good for fits")
        run_ranks(job, _Saver(file, asked, done, total, say).save)
    return file


class _Saver:
    """Appends rows as they come, and says how far the measurement is."""

    def __init__(self, file: RowsFile, asked: Asked, done: int, total: int, say: Say) -> None:
        self.file, self.asked, self.total, self.say = file, asked, total, say
        self.done = done
        self._last: Point | None = None

    def save(self, row: Measured) -> None:
        """Write one row, with what it was measured under."""
        if row.point != self._last:
            self.done += 1
            self._last = row.point
        kept = dataclasses.replace(
            row,
            settings=f"{self.asked.backend}, {SETTINGS}",
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            load=round(os.getloadavg()[0], 2),
        )
        self.file.append(kept)
        verdict = "" if row.stable else "  unstable"
        what = " ".join(filter(None, (row.point.family, row.part, _named(row))))
        self.say(f"[{self.done}/{self.total}] {what}: {row.median_us / 1e3:.3f} ms{verdict}")


def _named(row: Measured) -> str:
    params = row.point.params
    if "tables" in params:
        rows = sum(table[4] for table in row.facts["tables"])
        return f"{len(params['tables'])} tables, {rows:.0f} distinct rows"
    return " ".join(str(value) for value in params.values())


def progress(text: str) -> None:
    """One line on stderr."""
    print(f"shardopt: {text}", file=sys.stderr, flush=True)
