"""``shardopt calibrate``: measure this machine into a hardware profile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardopt.calibrate import Group
from shardopt.ranks.realtime import Runtime
from shardopt.report.blocks import Heading, TextTable, View

if TYPE_CHECKING:
    from shardopt.calibrate.fitting import CalibratedProfile
    from shardopt.calibrate.points import CalibrationSettings
    from shardopt.calibrate.rows import CalibrationRows
    from shardopt.calibrate.run import Say
    from shardopt.ranks.rank import Rank


DEFAULT_PROFILE = Path("calibrated.yaml")
QUICK_MINUTES, MAX_MINUTES = 1.0, 10**5


def calibrate(
    backend: Literal["gloo", "nccl"] = "gloo",
    ranks: int | None = None,
    link: float | None = None,
    model: Path | None = None,
    runtime: Runtime = Runtime.PLAIN,
    quick: bool = False,
    minutes: float | None = None,
    only: Group | None = None,
    output: Path = DEFAULT_PROFILE,
    rows: Path | None = None,
    json: bool = False,
    quiet: bool = False,
) -> View | None:
    """Measure this machine into a hardware profile.

    Starts one process per rank on this machine, or joins the processes that torchrun started. After
    an interruption the same command continues with the rows that it has saved.

    Options:
        backend: gloo measures CPU ranks, nccl measures GPUs.
        ranks (N): Number of processes that run the collectives. The default is 2, or 1 on a machine
            with one GPU; under torchrun, the processes that it started.
        link (GBIT_S): Emulate two hosts on this machine and measure collectives over a link of this
            rate (Gbit/s each way); needs root and iproute2.
        model (MODEL): First measure the lookups of this model's tables, with the ids that the file
            describes, and on a GPU the matrix products of its dense part. The profile then prices
            these tables as measured; the kernel model prices tables that were not reached in time.
            The report has the errors on tables that were left out of the fit.
        quick: Measure fewer points, for one minute.
        minutes (M): Start no more points after this many minutes, and make a profile of the points
            measured; the same command continues later. The default is 1 with --quick, else no
            limit.
        only: Measure only this group and take all others from the base profile; the host takes less
            than a minute.

    Output:
        output (-o PROFILE): Write the hardware profile to this file.
        rows (FILE): File for the measured rows (CSV), which are saved one by one; rows that are
            already in it are not measured again. By default it lies next to the profile.
    """
    from predictor.errors import InputError
    from shardopt.api.request import check_number
    from shardopt.calibrate import points as design
    from shardopt.cli.output import check_writable, show
    from shardopt.cli.output import say as told
    from shardopt.config.model import load_model
    from shardopt.extras import needs_torchrec, require_packages
    from shardopt.ranks.hosts import Link
    from shardopt.ranks.rank import RankDiedError, end_process, host_count, rank_of_torchrun

    if minutes is not None:
        check_number("minutes", minutes, 1, MAX_MINUTES)
    elif quick:
        minutes = QUICK_MINUTES
    rows_file = rows or output.with_suffix(".rows.csv")
    if rows_file == output:
        raise InputError(f"--rows {rows_file} is the profile's own file; choose another")
    join = rank_of_torchrun()
    workload = None if model is None else load_model(model)
    if join is None or join.index == 0:
        check_writable(output)
        check_writable(rows_file)
    # torch, fbgemm and the fits, once the files are known to be good
    with needs_torchrec():
        import fbgemm_gpu  # noqa: F401

        from shardopt.calibrate import run
    require_packages("scipy")
    count = _ranks(ranks, join) or run.ranks_of_machine(backend, only)
    hosts = 1 if join is None else host_count(join)
    between = None if link is None else Link(link)
    if join is not None and between is not None:
        raise InputError("--link starts its own ranks; leave it out under torchrun")
    size = design.QUICK if quick else design.FULL
    if only is Group.HOST:
        size = design.BRIEF
    settings = design.CalibrationSettings(
        backend, count, size, rows_file, between, workload, hosts, runtime, only, minutes
    )
    run.check_calibration(settings)
    quiet = quiet or bool(join and join.index)
    say = _silent if quiet else told
    try:
        measured = run.measure(settings, say, join)
    except (KeyboardInterrupt, SystemExit, RankDiedError):
        if join is None or join.index == 0:
            with suppress(InputError):  # too few rows
                _write(settings, run.open_rows(settings, _silent), output, say)
                say(f"{output} is the profile of the points measured so far")
        raise
    view = None
    if measured is not None:
        view = _view(_write(settings, measured, output, say), output, settings.rows)
    if join is not None:
        if view is not None:
            show(view, json=json, quiet=False)
        end_process()
    return view


def _silent(_: str) -> None:
    pass


def _ranks(ranks: int | None, join: Rank | None) -> int | None:
    """Return the world size, torchrun's if there is one; None if none is given."""
    from predictor.errors import InputError

    if join is None:
        return ranks
    if ranks not in (None, join.world_size):
        raise InputError(
            f"--ranks is {ranks}, but torchrun has started {join.world_size}; leave --ranks out"
        )
    return join.world_size


def _write(
    settings: CalibrationSettings, measured: CalibrationRows, output: Path, say: Say
) -> CalibratedProfile:
    from predictor.hardware.loader import load_hardware
    from predictor.units import GIB
    from shardopt.calibrate import run
    from shardopt.calibrate.profile import build_profile, profile_text
    from shardopt.calibrate.rows import missing
    from shardopt.files import atomic_write_text
    from shardopt.measure.machine import memory_bytes

    base = "cpu-gloo" if settings.backend == "gloo" else run.base_of_gpu(say)
    points = [point for points in run.points_of(settings) for point in points]
    absent = len(missing(measured.rows, points))
    if absent:
        say(f"{absent} of {len(points)} points are not measured yet; the same command continues")
    profile = build_profile(
        measured.rows,
        measured.origin,
        load_hardware(base),
        output.stem,
        settings.ranks,
        memory_bytes() / GIB,
        settings.link_gbit_s,
        settings.hosts,
        settings.only,
        absent,
        settings.model,
    )
    whole = settings.backend == "gloo" and settings.only is None
    atomic_write_text(output, profile_text(profile, None if whole else base))
    load_hardware(str(output) if output.parent != Path() else f"./{output}")
    return profile


def _view(calibrated: CalibratedProfile, output: Path, rows: Path) -> View:
    verdict = calibrated.profile.verdict
    errors = {family: e for family, e in calibrated.errors.items() if e.n}
    data = {
        "profile": str(output),
        "rows": str(rows),
        "errors": {
            family: {"mape": e.mape, "geomean": e.gmae, "bias": e.bias, "n": e.n}
            for family, e in errors.items()
        },
        "verdict": verdict and verdict.model_dump(),
        "notes": list(calibrated.notes),
    }
    shown = [
        (family, f"{e.mape:.1%}", f"{e.gmae:.1%}", f"{e.bias:+.1%}", str(e.n))
        for family, e in errors.items()
    ]
    lines = [*calibrated.notes]
    if verdict is not None:
        lines.append(
            f"verdict: {': '.join(filter(None, [verdict.quality, '; '.join(verdict.why)]))}"
        )
    lines += [f"rows: {rows}", f"profile: {output}; use it with --hardware {output}"]
    return View(
        data,
        [
            Heading("Held-out error", "rows that no fit has seen"),
            TextTable(["<family", ">mean", ">geomean", ">bias", ">rows"], shown),
            *(f"  {text}" for text in lines),
        ],
    )
