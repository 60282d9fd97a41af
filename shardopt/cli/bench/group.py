"""``shardopt bench``: commands that run something for real, or prepare and predict what runs."""

from __future__ import annotations

import typer

from shardopt.cli.bench import generate, predict, replay, run, search

PLANS, TRACES = "Run plans", "Benchmarks made from traces"

app = typer.Typer(help="Run plans and benchmarks for real.")


@app.callback()
def _bench() -> None:
    pass


app.command("run", rich_help_panel=PLANS)(run.run)
app.command("search", rich_help_panel=PLANS)(search.search)
app.command("generate", rich_help_panel=TRACES)(generate.generate)
app.command("replay", rich_help_panel=TRACES)(replay.replay)
app.command("predict", rich_help_panel=TRACES)(predict.predict)
