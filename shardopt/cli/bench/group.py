"""``shardopt bench``: ``search`` times the planners, ``run`` runs plans, ``batch`` many tasks,
``transformers`` training steps of transformers; ``generate`` makes a benchmark of a trace, which
``replay`` runs, ``predict`` predicts, and ``compare`` times against the model that it came from."""

from __future__ import annotations

import typer

from shardopt.cli.bench import against as bench_against
from shardopt.cli.bench import batch as bench_batch
from shardopt.cli.bench import compare as bench_compare
from shardopt.cli.bench import generate as bench_generate
from shardopt.cli.bench import predict as bench_predict
from shardopt.cli.bench import replay as bench_replay
from shardopt.cli.bench import run as bench_run
from shardopt.cli.bench import score as bench_score
from shardopt.cli.bench import search as bench_search
from shardopt.cli.bench import transformers as bench_transformers

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
app.command("compare")(bench_compare.compare)
# the name that the command had at first
app.command("mystique", hidden=True)(bench_compare.compare)
