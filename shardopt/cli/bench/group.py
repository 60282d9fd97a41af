"""``shardopt bench``: commands that run something for real, or prepare and predict what runs."""

from __future__ import annotations

import typer

from shardopt.cli.bench import (
    against,
    batch,
    compare,
    generate,
    predict,
    replay,
    run,
    score,
    search,
    transformers,
)

PLANS, TRACES = "Run plans", "Benchmarks made from traces"
DEVELOPER = "Measure shardopt itself"

app = typer.Typer(help="Run plans and benchmarks for real, and measure shardopt itself.")


@app.callback()
def _bench() -> None:
    pass


app.command("run", rich_help_panel=PLANS)(run.run)
app.command("generate", rich_help_panel=TRACES)(generate.generate)
app.command("replay", rich_help_panel=TRACES)(replay.replay)
app.command("predict", rich_help_panel=TRACES)(predict.predict)
app.command("compare", rich_help_panel=DEVELOPER)(compare.compare)
app.command("mystique", hidden=True)(compare.compare)  # the former name
app.command("score", rich_help_panel=DEVELOPER)(score.score)
app.command("search", rich_help_panel=DEVELOPER)(search.search)
app.command("batch", rich_help_panel=DEVELOPER)(batch.batch)
app.command("against", rich_help_panel=DEVELOPER)(against.against)
app.command("transformers", rich_help_panel=DEVELOPER)(transformers.transformers)
