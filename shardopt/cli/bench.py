"""``shardopt bench``: ``search`` times the planners, ``run`` runs plans, ``batch`` many tasks,
``transformers`` training steps of transformers; ``generate`` makes a benchmark of a trace, which
``replay`` runs, ``predict`` predicts, and ``mystique`` holds against the models it came from."""

from __future__ import annotations

import typer

from shardopt.cli import (
    bench_against,
    bench_batch,
    bench_generate,
    bench_mystique,
    bench_predict,
    bench_replay,
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
app.command("generate")(bench_generate.generate)
app.command("replay")(bench_replay.replay)
app.command("predict")(bench_predict.predict)
app.command("mystique")(bench_mystique.mystique)
