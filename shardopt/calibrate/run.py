"""Calibration from the first point to the profile: measure what is missing, save, fit."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from predictor import units
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import DEFAULT_HARDWARE
from predictor.model.workload import Workload
from predictor.units import GIB, format_bytes
from shardopt.calibrate.accepted import points_again
from shardopt.calibrate.design import phases
from shardopt.calibrate.design.cuda import Device
from shardopt.calibrate.design.points import Point, Size
from shardopt.calibrate.rows import (
    UNSTEADY,
    CalibrationRows,
    Measurement,
    Origin,
    runtime_words,
)
from shardopt.calibrate.worker import Job, measure_points
from shardopt.measure.machine import available_bytes, machine, memory_bytes
from shardopt.measure.sampling import BRIEF_FLUSH_BYTES, CUDA_SETTINGS, FLUSH_BYTES, SETTINGS
from shardopt.ranks.hosts import HOSTS, Link, check_hosts
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import RankDiedError, available_cores
from shardopt.ranks.realtime import Runtime, may_be_realtime

MAX_RANKS = 1024
BUSY = 0.5
"""Load average before anything is measured, above which other work disturbs the times."""
SILENCE_S = 600.0
"""Without a row for so long, the ranks have hung."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationSettings:
    """What to calibrate.

    Args:
        rows: where rows are kept; what it already holds is not measured again.
        link: that collectives go over, each rank a host; None: within this machine.
        model: whose tables are looked up too.
        hosts: that the ranks lie on.
        runtime: of the ranks.
        only: the one group that is measured; None: all.
    """

    backend: str
    ranks: int
    size: Size
    rows: Path
    link: Link | None = None
    model: Workload | None = None
    hosts: int = 1
    runtime: Runtime = Runtime.PLAIN
    only: phases.Group | None = None

    @property
    def link_gbit_s(self) -> float | None:
        """As points carry it."""
        return None if self.link is None else self.link.gbit_s


def check_calibration(
    backend: str,
    ranks: int,
    link: Link | None = None,
    model: Workload | None = None,
    hosts: int = 1,
    only: phases.Group | None = None,
) -> None:
    """Refuse what cannot be measured here.

    Args:
        hosts: that the ranks lie on, of which this machine is one.
        only: the one group that is measured; one rank is enough for its own work on the host.

    Raises:
        InputError: says what is missing and what to do.
    """
    fewest = 1 if only is phases.Group.HOST and backend == "nccl" else 2
    if not fewest <= ranks <= MAX_RANKS:
        raise InputError(
            f"the number of ranks is {ranks}; it must be at least {fewest}, because collectives "
            f"need a partner, and at most {MAX_RANKS}",
            inputs=("ranks",),
        )
    if link is not None:
        _check_link(backend, ranks, link)
    if model is not None and backend == "gloo":
        _check_memory(model)
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise InputError("this PyTorch has no torch.distributed; install one that has")
    if backend == "nccl":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < ranks // hosts:
            raise InputError(
                f"nccl with {ranks // hosts} ranks on this host needs as many GPUs, but PyTorch "
                f"sees {found}; choose fewer ranks, or gloo to measure CPU ranks",
                inputs=("ranks", "backend"),
            )


def _check_link(backend: str, ranks: int, link: Link) -> None:
    if backend != "gloo":
        raise InputError(
            f"a link limits TCP, which gloo uses and {backend} may not; choose gloo",
            inputs=("link", "backend"),
        )
    if ranks != HOSTS:
        raise InputError(
            f"a link joins {HOSTS} hosts of one rank, not {ranks} ranks; choose {HOSTS}",
            inputs=("link", "ranks"),
        )
    check_hosts(link)


def _check_memory(model: Workload) -> None:
    largest = max(model.tables, key=lambda table: table.weight_bytes)
    free = available_bytes()
    if largest.weight_bytes > free:
        raise InputError(
            f"table '{largest.name}' of the model has {format_bytes(largest.weight_bytes)}, but "
            f"only {format_bytes(free)} are free here; choose a model with smaller tables",
            inputs=("model",),
        )


def origin(backend: str) -> Origin:
    """Machine and versions, without anything that names the host."""
    about = machine()
    name = about["processor"] or about["machine"]
    if backend == "nccl":
        import torch

        name = f"{torch.cuda.get_device_name(0)}, {name}"
    memory = memory_bytes() / GIB
    # the virtual machine's memory varies by a few pages from boot to boot
    said = f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    return Origin(said, f"torch {_version('torch')}, fbgemm {_fbgemm()}")


def ranks_for_host(backend: str) -> int:
    """Ranks that the host is measured with unless given: two, or one where there is but one GPU."""
    import torch

    return 1 if backend == "nccl" and torch.cuda.device_count() == 1 else 2


def base_of_gpu(say: Say) -> str:
    """Name of the shipped profile of this GPU; says so where there is none, and takes the default.

    A profile that is written holds the groups that were measured, and takes all others from it.
    """
    import torch

    name = torch.cuda.get_device_name(0)
    found = profile_of_device(name)
    if found is None:
        say(
            f"no profile ships for {name}: what is not measured comes from {DEFAULT_HARDWARE}, and "
            "may be far off"
        )
        return DEFAULT_HARDWARE
    return found


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


def points_of(settings: CalibrationSettings) -> tuple[list[Point], list[Point]]:
    """What one rank measures alone, and what needs all ranks."""
    gpu = None
    if settings.backend == "nccl":
        import torch

        about = torch.cuda.get_device_properties(0)
        gpu = Device(about.total_memory, units.gib(round(memory_bytes() / GIB)))
    kernels = phases.alone(settings.size, settings.model, settings.ranks, gpu)
    exchanges = phases.together(settings.size, settings.ranks, settings.link_gbit_s, settings.hosts)
    return phases.of_group(kernels, settings.only), phases.of_group(exchanges, settings.only)


def measure(settings: CalibrationSettings, say: Say) -> CalibrationRows:
    """Measure every point that the rows file lacks, then once more those whose rows are doubtful.

    Ranks are processes of their own.

    Raises:
        InputError: the rows file is of another machine, or corrupt.
        RankDiedError: a rank failed; the rows measured before are in the file.
    """
    file = open_rows(settings, say)
    _measure_those(missing, settings, file, say)
    # a point that turns out faster may make a neighbour doubtful; each is repeated once at most
    while _measure_those(doubtful, settings, file, say):
        pass
    return file


def _measure_those(
    wanted: Callable[[CalibrationRows, Sequence[Point]], list[Point]],
    settings: CalibrationSettings,
    file: CalibrationRows,
    say: Say,
) -> bool:
    """Measure the wanted ones of all points; whether there were any."""
    kernels, exchanges = points_of(settings)
    measured = False
    for points, ranks in ((kernels, 1), (exchanges, settings.ranks)):
        chosen = wanted(file, points)
        if chosen:
            link = settings.link if points is exchanges else None
            _measure_some(settings, chosen, ranks, link, saver_of(settings, file, chosen, say))
            measured = True
    return measured


def _measure_some(
    settings: CalibrationSettings, points: list[Point], ranks: int, link: Link | None, saver: Saver
) -> None:
    cores = len(available_cores())
    if ranks > cores and settings.backend == "gloo":
        saver.say(f"{ranks} ranks share {cores} cores: their times are not good enough to fit")
    job = Job(
        points, settings.size, ranks, settings.backend, link, settings.model, settings.runtime
    )
    try:
        run_job(job, saver.save)
    except RankDiedError as error:
        raise RankDiedError(
            f"{error}\n{settings.rows} keeps what was measured; run the same command again to "
            "continue from there",
            error.exit_code,
            error.inputs,
        ) from None


def missing(file: CalibrationRows, points: Sequence[Point]) -> list[Point]:
    """Those of the points that have no rows yet."""
    return [point for point in points if not file.has(point)]


def doubtful(file: CalibrationRows, points: Sequence[Point]) -> list[Point]:
    """Those of the points whose rows are not good enough, and which may be measured again."""
    return [point for point in points_again(file.rows) if point in points]


def run_job(job: Job, on_row: Callable[[Measurement], None]) -> None:
    """Measure the points of a job in ranks started here; ``on_row`` gets each row at once.

    Raises:
        RankDiedError: a rank failed.
    """
    run_ranks(
        measure_points,
        job.ranks,
        job,
        link=job.link,
        on_report=lambda _, row: on_row(row),
        silence_s=SILENCE_S,
    )


def open_rows(settings: CalibrationSettings, say: Say) -> CalibrationRows:
    """The rows that there are; says where the machine is too busy for more."""
    file = CalibrationRows(settings.rows, origin(settings.backend))
    other = next((row for row in file.rows if row.runtime is not settings.runtime), None)
    if other is not None:
        raise InputError(
            f"{settings.rows}: holds rows of the {other.runtime} runtime, but the "
            f"{settings.runtime} one is asked for; times of the two are never mixed: choose the "
            "other runtime, or another file of rows",
            inputs=("runtime",),
        )
    load = os.getloadavg()[0]
    if load > BUSY:
        say(f"other work runs on this machine (load average {load:.1f}): times will be too long")
    return file


class Saver:
    """Appends rows as they come, and says how far the measurement is."""

    def __init__(
        self, file: CalibrationRows, settings: CalibrationSettings, done: int, total: int, say: Say
    ) -> None:
        self.file, self.settings, self.total, self.say = file, settings, total, say
        self.done = done
        tuned = settings.runtime is Runtime.TUNED
        self.realtime = tuned and settings.backend == "gloo" and may_be_realtime()
        self._last: Point | None = None

    def _settings(self, point: Point) -> str:
        """What a row's time depends on apart from its point."""
        nccl = self.settings.backend == "nccl"
        said = [CUDA_SETTINGS if nccl else SETTINGS, runtime_words(self.settings.runtime)]
        said += [self.settings.backend] if point.family in phases.TOGETHER else []
        if point.family in phases.TOGETHER and self.realtime:
            said.append("its threads in real time")
        flush = BRIEF_FLUSH_BYTES if point.family in phases.TOGETHER else FLUSH_BYTES
        if point.family != "reference" and not nccl:
            said.append(f"{flush / 2**20:g} MiB read before a sample")
        gbit_s = point.params.get("link_gbit_s")
        return ", ".join(
            said + ([] if gbit_s is None else [f"two hosts joined by {gbit_s:g} Gbit/s"])
        )

    def save(self, row: Measurement) -> None:
        """Write one row, with what it was measured under."""
        if row.point != self._last:
            self.done += 1
            self._last = row.point
        kept = dataclasses.replace(
            row,
            settings=self._settings(row.point),
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            load=round(os.getloadavg()[0], 2),
        )
        self.file.append(kept)
        verdict = "" if row.unevenness <= UNSTEADY else "  unsteady"
        what = " ".join(filter(None, (row.point.family, row.part, _describe(row))))
        self.say(f"[{self.done}/{self.total}] {what}: {row.median_us / 1e3:.3f} ms{verdict}")


def saver_of(
    settings: CalibrationSettings, file: CalibrationRows, chosen: Sequence[Point], say: Say
) -> Saver:
    """What keeps the rows of these points, which are `missing` or `doubtful`; says what it is."""
    if file.has(chosen[0]):
        say(f"measuring {len(chosen)} points again, whose times differ or stand out")
        return Saver(file, settings, 0, len(chosen), say)
    everything = [point for points in points_of(settings) for point in points]
    done = len(everything) - len(missing(file, everything))
    if done:
        say(f"{done} points are already in {settings.rows}")
    return Saver(file, settings, done, len(everything), say)


def _describe(row: Measurement) -> str:
    if "tables" in row.facts:
        rows = sum(table[4] for table in row.facts["tables"])
        return f"{len(row.facts['tables'])} tables, {rows:.0f} distinct rows"
    return " ".join(str(value) for value in row.point.params.values())


def progress(text: str) -> None:
    """One line on stderr."""
    print(f"shardopt: {text}", file=sys.stderr, flush=True)
