"""``python -m lab transformers``: training steps of small transformers, timed for real."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import check_number
from shardopt.cli.bench.run import MAX_ROUNDS


def transformers(
    *,
    output: Path,
    rounds: int = 8,
    ranks: str = "1,2",
    quiet: bool = False,
) -> None:
    """Measure training steps of transformers, for `python -m lab validate transformers-cpu`.

    After an interruption the same command continues with what is left.

    Measurement:
        output (-o DIR): Folder for the measurements; it is created, or continued.
        rounds (N): Number of rounds; each runs three steps of every shape.
        ranks (N,N): 1 for one process, 2 for DistributedDataParallel on two, 1,2 for both.
    """
    from lab.transformers.run import RANKS, run_transformers
    from predictor.errors import InputError
    from shardopt.cli.output import note

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    asked = tuple(dict.fromkeys(ranks.split(",")))
    if not set(asked) <= {str(count) for count in RANKS}:
        raise InputError(f"--ranks is {ranks!r}; give 1, 2 or 1,2")
    run_transformers(output, rounds, tuple(map(int, asked)), lambda text: note([text], quiet=quiet))
