"""``shardopt bench run``: runs plans for real, side by side, and keeps every sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from predictor.model.plan_json import plan_to_dict
from shardopt.bench.job import Job, check_job
from shardopt.bench.rows import (
    BenchRows,
    check_continues,
    drop_nulls,
    read_rows,
    round_times,
    write_rows,
)
from shardopt.bench.worker import run_rank
from shardopt.measure.machine import environment
from shardopt.measure.sampling import REFERENCE_VERSION
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import Rank, RankDiedError
from shardopt.ranks.realtime import Runtime, may_be_realtime

SILENCE_S = 600.0
"""Longer than a round of slow plans, or building their tables, takes."""


def run_bench(
    job: Job,
    path: Path | None = None,
    *,
    given_ranks: int | None = None,
    join: Rank | None = None,
    silence_s: float = SILENCE_S,
    say: Callable[[str], None] = lambda text: None,
) -> BenchRows | None:
    """Run the plans of a job for real.

    Args:
        path: the rows file. If it is there, the rounds that it lacks are measured.
        given_ranks: world size that the user asks for.
        join: the rank to be, instead of starting all of them.
        silence_s: without any report for so long, the ranks count as hung.
        say: called with what is going on, a line at a time.

    Returns:
        All rows; None on ranks of torchrun other than the first.

    Raises:
        ShardoptError: the job cannot run here (see `check_job`), the file holds something else,
            or a rank died; finished rounds are in the file by then.
    """
    ranks = join.world_size if join else given_ranks
    check_job(job, given_ranks=ranks, joined=join is not None)
    if join and join.index:
        run_ranks(run_rank, job.world_size, job, join=join)
        return None
    keeper = _Keeper(job, path, say)
    if keeper.done:
        say(f"{path} has {len(keeper.rows.rounds)} rounds already; ask for more to go on")
    job = replace(job, first_round=len(keeper.rows.rounds))
    try:
        if join or not keeper.done:
            run_ranks(
                run_rank,
                job.world_size,
                job,
                join=join,
                local_world_size=job.local_world_size,
                link=job.link,
                on_report=lambda _, message: keeper(message),
                silence_s=silence_s,
            )
    except RankDiedError as error:
        raise RankDiedError(
            f"{error}\n{keeper.left_words()}", error.exit_code, error.inputs
        ) from None
    return keeper.rows


class _Keeper:
    """Takes what rank 0 reports and writes it to the disk, round by round."""

    def __init__(self, job: Job, path: Path | None, say: Callable[[str], None]) -> None:
        self.job, self.path, self.say = job, path, say
        self.rows = new_rows(job)
        self.session: dict[str, Any] = {
            "environment": environment(job.backend),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": os.getloadavg()[0],
            "warmup": None,
        }
        if path is not None and path.exists():
            old = read_rows(path)
            new = replace(self.rows, sessions=[self.session])
            check_continues(path, old, new)
            self.rows = old

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return len(self.rows.rounds) >= self.job.rounds

    def left_words(self) -> str:
        """Say what is left of the run after a rank died."""
        count = len(self.rows.rounds)
        if not count:
            return "no round was finished"
        rounds = f"{count} of {self.job.rounds} rounds"
        if self.path is not None:
            return f"{rounds} are saved in {self.path}; run the same command again to go on"
        return f"{rounds} were finished; give a rows file to keep them"

    def __call__(self, report: Mapping[str, Any]) -> None:
        kind = report["kind"]
        message = round_times({key: value for key, value in report.items() if key != "kind"})
        if kind == "ready":
            self.say(f"{len(self.job.plans)} plans are built; warming up")
        elif kind in ("plan", "warming"):
            return
        elif kind == "warmup":
            self.session["warmup"] = message
            self.rows.sessions.append(self.session)
            self.say(warmup_words(message))
        else:
            message["session"] = len(self.rows.sessions) - 1
            self.rows.rounds.append(message)
            if self.path is not None:
                write_rows(self.path, self.rows)
            self.say(f"round {len(self.rows.rounds)} of {self.job.rounds}")


def warmup_words(warmup: Mapping[str, Any]) -> str:
    """Say how the warm-up ended."""
    rounds = f"{warmup['rounds']} round{'' if warmup['rounds'] == 1 else 's'} of warm-up"
    if warmup["settled"] is None:
        return f"{rounds}, as asked"
    if warmup["settled"]:
        return f"{rounds}: no plan became faster in the last"
    return f"{rounds}, and some plan still became faster: the machine is not steady"


def new_rows(job: Job) -> BenchRows:
    """Rows of a job without any round."""
    workload = job.workload
    tuned = job.runtime is Runtime.TUNED
    gloo = job.backend == "gloo"
    return BenchRows(
        model={
            "name": workload.name,
            "sha256": workload.sha256,
            "batch_size": workload.batch_size,
            "train_pipeline": workload.train_pipeline,
            **job.facts,
        },
        settings={
            **({} if job.link is None else {"link_gbit_s": job.link.gbit_s}),
            "backend": job.backend,
            "world_size": job.world_size,
            "local_world_size": job.local_world_size,
            "block": job.block,
            "warmup": "auto" if job.warmup is None else job.warmup,
            "seed": job.seed,
            "threads": 1,
            "pinned": True,
            "runtime": job.runtime.value,
            "gc": not tuned,
            "realtime": tuned and gloo and may_be_realtime(),
            "keeps_freed_memory": tuned and gloo,
            "reference_version": REFERENCE_VERSION,
        },
        plans=[
            {"name": name, "plan": drop_nulls(plan_to_dict(plan))}
            for name, plan in job.plans.items()
        ],
    )
