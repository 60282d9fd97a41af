"""``shardopt bench``: ``search`` times the planners, ``run`` runs plans, ``batch`` many tasks,
``transformers`` training steps of transformers."""

from __future__ import annotations

import typer

from shardopt.cli import (
    bench_against,
    bench_batch,
    bench_run,
    bench_score,
    bench_search,
    bench_transformers,
)

app = typer.Typer(help="Measure for real: the planners themselves, and plans in training.")


@app.callback()
def _bench() -> None:
    pass


app.command("search")(bench_search.search)
app.command("run")(bench_run.run)
app.command("batch")(bench_batch.batch)
app.command("against")(bench_against.against)
app.command("score")(bench_score.score)
app.command("transformers")(bench_transformers.transformers)
