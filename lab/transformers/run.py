"""``python -m lab transformers``: training steps of transformers, timed for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from lab.transformers.files import MACHINE, OPS, calibrations, rounds_of, targets, write_ops
from lab.transformers.worker import record_step, step_calls, time_rounds
from predictor.iteration.op_graph import RankCalls
from shardopt.files import atomic_write_text
from shardopt.measure.machine import environment
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.realtime import may_be_realtime

RANKS = (1, 2)


def run_transformers(
    folder: Path,
    rounds: int,
    ranks: tuple[int, ...] = RANKS,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure until every number of ranks has its rounds; what is there already stays.

    Args:
        folder: made if it is not there.
        rounds: of each number of ranks.
        report: called with a line of text for each stage.

    Raises:
        RankDiedError: a rank failed; finished rounds are in the folder by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / OPS).exists():
        report("ops of every shape, without running them")
        write_ops(folder, list_steps())
        about = {"realtime": may_be_realtime(), **environment("gloo")}
        atomic_write_text(folder / MACHINE, json.dumps(about, indent=1) + "\n")
    for count in ranks:
        done = len(rounds_of(folder, count).rows)
        report(f"{count} rank{'' if count == 1 else 's'}: {done} of {rounds} rounds are there")
        if done < rounds:
            run_ranks(time_rounds, count, folder, rounds)


def list_steps() -> dict[str, RankCalls]:
    """The ops of every shape that is captured or predicted, none of them run."""
    shapes = {shape.name: shape for n in RANKS for shape in (*calibrations(n), *targets(n))}
    return {name: step_calls(record_step(shape)) for name, shape in shapes.items()}
