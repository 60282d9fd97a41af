"""``python -m lab compare``: real models against their generated benchmarks, alternating."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import check_number

MAX_ROUNDS = 10_000


def compare(
    *,
    output: Path,
    models: list[str] | None = None,
    rounds: int = 5,
    work: Path | None = None,
    quiet: bool = False,
) -> None:
    """Compare CPU models with the benchmarks generated from their traces.

    Calibration models are measured as well: their calls are timed inside their replays, and the
    kernel models that `bench predict --data DIR` uses are fitted on them.

    Options:
        output (-o DIR): Folder for cpu.json (models and their replays) and calls.jsonl (timed
            calls, from which kernel models of ops are fitted).
        models (--model NAME): Only this model. Repeat for more.

    Measurement:
        rounds (N): Number of rounds; each runs every model and its replay in new processes.
        work (DIR): Keep benchmarks and finished rounds here, and continue from what is there.
    """
    from lab.replay.originals import MODELS
    from predictor.errors import InputError, did_you_mean
    from shardopt.ranks.scratch import scratch_folder

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    for name in models or ():
        if name not in MODELS:
            raise InputError(
                f"--model {name!r}: there are {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
            )
    for place in (output, work):
        if place is not None:
            _check_folder(place)
    names = list(models or MODELS)
    if work is not None:
        _run(names, output, rounds, work, quiet)
        return
    with scratch_folder() as here:
        _run(names, output, rounds, here, quiet)


def _check_folder(place: Path) -> None:
    from predictor.errors import InputError

    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place}: cannot be a folder: {error.strerror}") from None


def _run(names: list[str], output: Path, rounds: int, work: Path, quiet: bool) -> None:
    from lab.replay.calibrate import prepare, replays, side_by_side, time_rounds
    from lab.replay.side_by_side import summary
    from shardopt.api.cache import versions
    from shardopt.cli.output import note, write_json
    from shardopt.replay.calls import FILE, write_models

    for name in prepare(names, work):
        note([f"{name}: benchmark made"], quiet=quiet)
    for name, number in time_rounds(names, work, rounds):
        note([f"round {number + 1} of {rounds}: {name}"], quiet=quiet)
    write_models(output / FILE, replays(names, work))
    rows = side_by_side(names, work)
    if rows:
        write_json(
            output / "cpu.json", {"summary": summary(rows), "versions": versions(), "rows": rows}
        )
