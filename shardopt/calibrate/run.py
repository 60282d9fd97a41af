"""Measures a machine: runs the missing points in ranks, and saves each row as it comes.

Ranks are processes started here, or those that torchrun has started, perhaps on several hosts. The
first rank measures the kernels and leads; the others wait, and join the measurements of all ranks.
Points whose rows are doubtful are measured once more, at the end. A calibration with a limit stops
at it, and the same command goes on from there.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from predictor import units
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import DEFAULT_HARDWARE
from predictor.units import GIB, format_bytes
from shardopt.calibrate import Group, families
from shardopt.calibrate.points import TOGETHER, CalibrationSettings, Device, Point
from shardopt.calibrate.rows import (
    UNSTEADY,
    CalibrationRows,
    Measurement,
    Origin,
    key_of,
    missing,
    points_again,
    runtime_words,
)
from shardopt.measure.machine import available_bytes, environment, memory_bytes
from shardopt.measure.sampling import BRIEF_FLUSH_BYTES, CUDA_SETTINGS, FLUSH_BYTES, SETTINGS
from shardopt.ranks.hosts import HOSTS, check_hosts
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import (
    Rank,
    RankDiedError,
    Report,
    available_cores,
    check_gpus,
    joined_ranks,
)
from shardopt.ranks.realtime import Runtime, may_be_realtime

MAX_RANKS = 1024
BUSY = 0.5
"""Load average before the measurement, above which other work disturbs the times."""
SILENCE_S = 600.0
"""Time without a row after which the ranks count as hung."""
PATIENCE = timedelta(hours=12)
"""Time that ranks of torchrun wait for the kernels of the first; a full design takes under 1 h."""
ALONE_SHARE = 0.6
"""Share of the time limit after which one rank leaves the rest to all of them."""
Points = tuple[list[Point], list[Point]]
"""Points that one rank measures alone, and those that need all ranks."""
Say = Callable[[str], None]


def check_calibration(settings: CalibrationSettings) -> None:
    """Refuse settings that cannot be measured here.

    Raises:
        InputError: says what is missing and what to do.
    """
    backend, ranks, link, model = settings.backend, settings.ranks, settings.link, settings.model
    # one GPU has kernels and a host
    fewest = 1 if settings.only is not Group.COLLECTIVES and backend == "nccl" else 2
    if not fewest <= ranks <= MAX_RANKS:
        raise InputError(
            f"the number of ranks is {ranks}; it must be at least {fewest}, because collectives "
            f"need a partner, and at most {MAX_RANKS}",
            inputs=("ranks",),
        )
    if link is not None:
        if ranks != HOSTS:
            raise InputError(
                f"a link joins {HOSTS} hosts of one rank, not {ranks} ranks; choose {HOSTS}",
                inputs=("link", "ranks"),
            )
        check_hosts(link, backend)
    if model is not None and backend == "gloo":
        largest, free = max(model.tables, key=lambda table: table.weight_bytes), available_bytes()
        if largest.weight_bytes > free:
            raise InputError(
                f"table '{largest.name}' of the model has {format_bytes(largest.weight_bytes)}, "
                f"but only {format_bytes(free)} are free here; choose a model with smaller tables",
                inputs=("model",),
            )
    import torch.distributed as dist

    if not dist.is_available():
        raise InputError("this PyTorch has no torch.distributed; install one that has")
    if backend == "nccl":
        check_gpus(ranks // settings.hosts, inputs=("ranks", "backend"))


def origin(backend: str) -> Origin:
    """Describe machine and versions, without anything that names the host."""
    about = environment(backend)
    name = about["processor"] or about["machine"]
    if backend == "nccl":
        name = f"{about['gpu']}, {name}"
    memory = about["memory_bytes"] / GIB
    # the virtual machine's memory varies by a few pages from boot to boot
    machine = f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {about['system']}"
    fbgemm = next((about[p] for p in ("fbgemm-gpu", "fbgemm-gpu-cpu") if p in about), "none")
    return Origin(machine, f"torch {about.get('torch', 'none')}, fbgemm {fbgemm}")


def ranks_of_machine(backend: str, only: Group | None) -> int:
    """Return the default number of ranks: two, or one on a single GPU without collectives."""
    import torch

    alone = backend == "nccl" and torch.cuda.device_count() == 1
    return 1 if alone and only is not Group.COLLECTIVES else 2


def base_of_gpu(say: Say) -> str:
    """Return the name of the shipped profile of this GPU, or of the default with a message.

    The written profile holds the measured groups, and takes all others from this one.
    """
    import torch

    name = torch.cuda.get_device_name(0)
    profile = profile_of_device(name)
    if profile is None:
        say(
            f"no profile ships for {name}: what is not measured comes from {DEFAULT_HARDWARE}, and "
            "may be far off"
        )
        return DEFAULT_HARDWARE
    return profile


def points_of(settings: CalibrationSettings) -> Points:
    """Return the points of a calibration."""
    gpu = None
    if settings.backend == "nccl":
        import torch

        about = torch.cuda.get_device_properties(0)
        gpu = Device(about.total_memory, units.gib(round(memory_bytes() / GIB)))
    size, ranks = settings.size, settings.ranks
    kernels = families.alone(size, settings.model, ranks, gpu)
    exchanges = families.together(size, ranks, settings.link_gbit_s, settings.hosts)

    def needed(points: Sequence[Point]) -> list[Point]:
        return [point for point in points if families.needs(settings.only, point.family)]

    return needed(kernels), needed(exchanges)


@dataclass(frozen=True)
class Stretch:
    """A stretch of time on the clock `time.monotonic`, possibly without an end."""

    start: float = 0.0
    end: float = math.inf

    def part(self, share: float) -> Stretch:
        """Return the stretch from now until a share of this one is over."""
        return Stretch(time.monotonic(), self._until(share))

    def lasts(self, share: float = 1.0) -> bool:
        """Return True while less than a share of it is over."""
        return time.monotonic() < self._until(share)

    def _until(self, share: float) -> float:
        return self.start + share * (self.end - self.start)


def measure(
    settings: CalibrationSettings, say: Say, join: Rank | None = None
) -> CalibrationRows | None:
    """Measure every point that the rows file lacks, then once more those whose rows are doubtful.

    Args:
        join: this process among the ranks that torchrun has started; None to start all of them.

    Returns:
        All rows; None on ranks of torchrun other than the first.

    Raises:
        InputError: the rows file is of another machine, or corrupt.
        RankDiedError: a rank failed; the rows measured before are in the file.
    """
    start = time.monotonic()
    limit = Stretch(start, math.inf if settings.minutes is None else start + 60 * settings.minutes)
    if join is not None and join.index:
        run_ranks(take_part, settings.ranks, settings, ([], []), [], limit, join=join)
        return None
    file, points = open_rows(settings, say), points_of(settings)
    ranks, cores = settings.ranks if points[1] else 1, len(available_cores())
    save = saver(settings, file, [*points[0], *points[1]], say)
    if join is None:
        if next(turns(points, file.rows, limit), None) is None:
            return file
        if ranks > cores and settings.backend == "gloo":
            say(f"{ranks} ranks share {cores} cores: their times are not good enough to fit")
    try:
        run_ranks(
            take_part,
            ranks,
            settings,
            points,
            file.rows,
            limit,
            join=join,
            link=settings.link if points[1] else None,
            on_report=lambda _, row: save(row),
            silence_s=SILENCE_S,
        )
    except RankDiedError as error:
        raise RankDiedError(
            f"{error}\n{settings.rows} keeps what was measured; run the same command again to "
            "continue from there",
            error.exit_code,
            error.inputs,
        ) from None
    return file


def turns(
    points: Points, rows: Sequence[Measurement], limit: Stretch
) -> Iterator[tuple[list[Point], Stretch]]:
    """Yield points to measure next, of one rank or of all ranks, and the time for them.

    Missing points come first, then doubtful ones until none is left. A point that turns out faster
    may make a neighbour doubtful; each is repeated at most once.

    Args:
        rows: those measured so far; grows between the turns.
    """
    kernels, exchanges = (missing(rows, part) for part in points)
    first = True
    while limit.lasts() and (first or kernels or exchanges):
        first = False
        if kernels:
            yield kernels, limit.part(ALONE_SHARE if exchanges else 1.0)
        if exchanges and limit.lasts():
            yield exchanges, limit.part(1.0)
        again = points_again(rows)
        kernels, exchanges = ([point for point in again if point in part] for part in points)


def take_part(
    rank: Rank,
    report: Report,
    settings: CalibrationSettings,
    points: Points,
    rows: Sequence[Measurement],
    limit: Stretch,
) -> None:
    """Take part as one rank; the first measures kernels alone, leads the others, and reports rows.

    Args:
        points: of one rank, and of all; used on the first rank alone, as are the rows so far.
    """
    # newer PyTorch deprecates names that TorchRec still calls, and both log about it
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = list(rows)
    with joined_ranks(rank, settings.backend, settings.runtime, PATIENCE) as (device, talk):
        # not before: threads that torch starts inherit the cores of the rank
        from shardopt.calibrate.kernels import measure_alone
        from shardopt.calibrate.together import measure_together

        def run(turn: Sequence[Point], stretch: Stretch = limit) -> None:
            together = turn[0].family in TOGETHER

            def lasts(share: float) -> bool:
                if settings.minutes is None or not together:
                    return stretch.lasts(share)
                return bool(talk.share(stretch.lasts(share)))  # the first rank's clock decides

            measure = partial(measure_together, talk=talk) if together else measure_alone
            for row in measure(turn, device, settings, lasts):
                if rank.index == 0:
                    rows.append(row)
                    report(row)

        if rank.index:
            talk.follow(run)
            return
        for turn, stretch in turns(points, rows, limit):
            if turn[0].family in TOGETHER:
                talk.share(turn)
            run(turn, stretch)
        talk.share(None)


def open_rows(settings: CalibrationSettings, say: Say) -> CalibrationRows:
    """Open the file of rows; says so if the machine is busy with other work."""
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


def saver(
    settings: CalibrationSettings, file: CalibrationRows, points: Sequence[Point], say: Say
) -> Callable[[Measurement], None]:
    """Return a function that saves rows of these points and reports progress.

    It adds settings, date and load to each row.
    """
    left = {key_of(point) for point in missing(file.rows, points)}
    total = len(points)
    if len(left) < total:
        say(f"{total - len(left)} points are already in {settings.rows}")
    tuned = settings.runtime is Runtime.TUNED and settings.backend == "gloo"
    realtime = tuned and may_be_realtime()
    last, place = "", ""

    def save(row: Measurement) -> None:
        nonlocal last, place
        if key_of(row.point) != last:
            last = key_of(row.point)
            again = last not in left
            left.discard(last)
            place = "again" if again else f"{total - len(left)}/{total}"
        saved = dataclasses.replace(
            row,
            settings=_settings(settings, row.point, realtime),
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            load=round(os.getloadavg()[0], 2),
        )
        file.append(saved)
        result = f"{row.median_us / 1e3:.3f} ms"
        result += "" if row.unevenness <= UNSTEADY else "  unsteady"
        subject = " ".join(map(str, row.point.params.values()))
        if "tables" in row.facts:
            tables = row.facts["tables"]
            subject = f"{len(tables)} tables, {sum(table[4] for table in tables):.0f} distinct rows"
        named = " ".join(filter(None, (row.point.family, row.part, subject)))
        say(f"[{place}] {named}: {row.failure or result}")

    return save


def _settings(settings: CalibrationSettings, point: Point, realtime: bool) -> str:
    """Describe the settings on which a row's time depends beside its point."""
    nccl, together = settings.backend == "nccl", point.family in TOGETHER
    words = [CUDA_SETTINGS if nccl else SETTINGS, runtime_words(settings.runtime)]
    if together:
        words.append(settings.backend)
    if together and realtime:
        words.append("its threads in real time")
    if point.family != "reference" and not nccl:
        flush = BRIEF_FLUSH_BYTES if together else FLUSH_BYTES
        words.append(f"{flush / 2**20:g} MiB read before a sample")
    if "link_gbit_s" in point.params:
        words.append(f"two hosts joined by {point.params['link_gbit_s']:g} Gbit/s")
    return ", ".join(words)
