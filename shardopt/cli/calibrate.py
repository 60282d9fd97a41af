"""``shardopt calibrate``: measure this machine into a hardware profile."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from shardopt.calibrate.profile import Calibrated


class Backend(StrEnum):
    """Who carries the collectives, and with it the device that is measured."""

    GLOO = "gloo"
    NCCL = "nccl"


DEFAULT_PROFILE = Path("calibrated.yaml")

BackendOption = Annotated[
    Backend, typer.Option("--backend", help="gloo measures CPU ranks, nccl GPUs.")
]
Ranks = Annotated[
    int, typer.Option("--ranks", metavar="N", help="Processes that collectives are measured among.")
]
LinkRate = Annotated[
    float | None,
    typer.Option(
        "--link",
        metavar="GBIT_S",
        help="Measure collectives between two hosts, over a link of so many Gbit/s each way; needs "
        "root and iproute2.",
        show_default=False,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Measure the lookups of this model's tables too, with the ids that it describes.",
        show_default=False,
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer points: within five minutes.")]
Rows = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FILE",
        help="Rows of measurements (CSV), saved one by one; what it holds is not measured again. "
        "Beside the profile unless given.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
Profile = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="PROFILE",
        help="Write the hardware profile to this file.",
        rich_help_panel=options.OUTPUT,
    ),
]


def calibrate(
    backend: BackendOption = Backend.GLOO,
    ranks: Ranks = 2,
    link: LinkRate = None,
    model: Model = None,
    quick: Quick = False,
    output: Profile = DEFAULT_PROFILE,
    rows: Rows = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure this machine into a hardware profile; interrupted, it continues from its rows."""
    from predictor.errors import InputError
    from shardopt.bench.hosts import Link
    from shardopt.calibrate import design
    from shardopt.cli.output import check_writable
    from shardopt.config.model import load_model
    from shardopt.torchrec.install import needs_torchrec

    kept = rows or output.with_suffix(".rows.csv")
    if kept == output:
        raise InputError(f"--rows {kept} is the profile's own file; choose another")
    check_writable(output)
    check_writable(kept)
    workload = None if model is None else load_model(model)
    # torch, fbgemm and the fits, once the files are known to be good
    with needs_torchrec():
        import fbgemm_gpu  # noqa: F401

        from shardopt.calibrate import run
    _check_scipy()
    between = None if link is None else Link(link)
    run.check(backend.value, ranks, between, workload)
    size = design.QUICK if quick else design.FULL
    asked = run.Asked(backend.value, ranks, size, kept, between, workload)
    measured = run.measure(asked, (lambda text: None) if quiet else run.progress)

    from predictor.hardware import load_hardware
    from shardopt.calibrate.profile import build_profile, profile_text
    from shardopt.files import atomic_write_text

    base = load_hardware("cpu-gloo" if backend is Backend.GLOO else "h100-sxm")
    found = build_profile(
        measured.rows, measured.origin, base, output.stem, ranks, run.memory_gib(), link
    )
    atomic_write_text(output, profile_text(found.profile))
    load_hardware(str(output) if output.parent != Path() else f"./{output}")
    if json:
        from shardopt.cli.output import print_json

        print_json(_object(found, output, kept))
        return
    _show(found, output, kept)


def _check_scipy() -> None:
    from predictor.errors import InputError

    try:
        import scipy  # noqa: F401
    except ImportError:
        raise InputError(
            "calibrate fits with scipy, which is not installed: pip install 'shardopt[calibrate]'"
        ) from None


def _object(found: Calibrated, output: Path, rows: Path) -> dict[str, object]:
    return {
        "profile": str(output),
        "rows": str(rows),
        "errors": {
            family: {"mape": e.mape, "geomean": e.gmae, "bias": e.bias, "n": e.n}
            for family, e in found.errors.items()
            if e.n
        },
        "notes": found.notes,
    }


def _show(found: Calibrated, output: Path, rows: Path) -> None:
    from shardopt.report.console import heading, line, make_console, show, table

    console = make_console()
    heading(console, "Held-out error", "rows that no fit has seen")
    made = table(
        [
            ("family", "left"),
            ("mean", "right"),
            ("geomean", "right"),
            ("bias", "right"),
            ("rows", "right"),
        ]
    )
    for family, e in found.errors.items():
        if e.n:
            made.add_row(family, f"{e.mape:.1%}", f"{e.gmae:.1%}", f"{e.bias:+.1%}", str(e.n))
    show(console, made)
    for text in found.notes:
        line(console, f"  {text}")
    line(console, f"  rows: {rows}")
    line(console, f"  profile: {output}; use it with --hardware {output}")
