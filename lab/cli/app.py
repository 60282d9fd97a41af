"""`python -m lab`: what shows that shardopt is right. Errors end as those of `shardopt` do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from lab.cli import against, batch, compare, score, search, transformers, validate
from shardopt.cli import app as product
from shardopt.cli.command import command

SUITES, TOOLS = "Measure and validate", "Pages, profiles and checks"

app = typer.Typer(
    name="lab",
    help="Suites, task sets and tools that show how right shardopt is; not shipped.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("validate", rich_help_panel=SUITES, epilog=validate.EPILOG)(command(validate.validate))
for function in (
    batch.batch,
    against.against,
    search.search,
    score.score,
    compare.compare,
    transformers.transformers,
):
    app.command(function.__name__, rich_help_panel=SUITES)(command(function))

PROGRAMS = {
    "lab.first_scores": "What new tables scored before anything was changed for them.",
    "lab.tools.ablation": "What each searcher is worth.",
    "lab.tools.derive": "Profiles of cards that no public table measures.",
    "lab.tools.figure": "The picture of the README.",
    "lab.tools.fit_op_models": "The kernel models of CPU ops that `shardopt bench predict` uses.",
    "lab.tools.fit_public_tables": "Prints constants fitted to the public tables.",
    "lab.tools.fit_runtime": "Fits the constants of HugeCTR's runtimes.",
    "lab.tools.fit_transformer": "Fits the constants of Megatron's software.",
    "lab.tools.known_errors": "How far the shipped profiles can be trusted.",
    "lab.tools.live_steps": "What a monitor costs a running job, and what a move saves.",
    "lab.pages.readme": "The README's tables of accuracy, from docs/accuracy.",
    "lab.tools.record_answers": "What shardopt answers in 100 cases, before and after a change.",
    "lab.tools.torchrec_own": "TorchRec's own tests of its planner, with ours in its place.",
    "lab.tools.try_wheel": "Every command of an installed wheel, without torch and scipy.",
}
"""Modules with parsers of their own -> what they do."""


def _program(module: str) -> None:
    # such a tool reads all words after its name itself, --help too
    free = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @app.command(
        module.rpartition(".")[2].replace("_", "-"),
        help=PROGRAMS[module],
        rich_help_panel=TOOLS,
        context_settings=free,
    )
    def run(context: typer.Context) -> None:
        raise typer.Exit(import_module(module).main(context.args))


for _module in PROGRAMS:
    _program(_module)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; nothing that a user can cause raises."""
    return product.main(argv, app, "python -m lab")
