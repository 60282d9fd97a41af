"""The flags of ``shardopt plan --tune``."""

from __future__ import annotations

from typing import Annotated

import typer

TUNING = "Tuning"

Tune = Annotated[
    str | None,
    typer.Option(
        "--tune",
        metavar="KNOBS",
        help="Settings to choose as well, separated by commas: batch_size, pipeline, qcomm, "
        "bucket, cw_min, cache_ratio, hosts, groups, sync_interval, hbm. Values can be given: "
        "batch_size=2048:16384 doubles, batch_size=4096:16384:4096 goes in steps, qcomm=fp32/bf16 "
        "is a list. See docs/tuning.md.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
Objectives = Annotated[
    str | None,
    typer.Option(
        "--objectives",
        metavar="NAMES",
        help="What --tune minimises: time (per sample), memory (of the fullest rank) or gpu_hours "
        "(per sample). Several, separated by commas, give a Pareto front. The default is time, "
        "or gpu_hours if hosts are tuned.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        "--trials",
        metavar="N",
        help="Number of settings to try, over all machines that share the study; 24 by default.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        help="Keep the study in a database (postgresql://user@host/name, sqlite:///tune.db) or a "
        "journal file (journal:PATH, or a path that ends in .journal or .log), to continue it "
        "later or to share it between machines.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
Study = Annotated[
    str | None,
    typer.Option(
        "--study",
        metavar="NAME",
        help="Name of the study in --storage; by default it is made from the model and the flags.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
