"""``shardopt bench``: commands that run something for real, or prepare what runs."""

from __future__ import annotations

import typer

from shardopt.cli.bench import generate, replay, run, search
from shardopt.cli.command import command

PLANS, TRACES = "Run plans", "Benchmarks made from traces"

app = typer.Typer(help="Run plans and benchmarks for real.")


@app.callback()
def _bench() -> None:
    pass


for function, panel in (
    (run.run, PLANS),
    (search.search, PLANS),
    (generate.generate, TRACES),
    (replay.replay, TRACES),
):
    app.command(function.__name__, rich_help_panel=panel)(command(function))
