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
        help="Also choose these, separated by commas: batch_size, pipeline, qcomm, bucket, cw_min, "
        "cache_ratio, hosts, hbm. With values: batch_size=2048:16384 (doubling), "
        "batch_size=4096:16384:4096 (in steps) or qcomm=fp32/bf16 (these). See docs/tuning.md.",
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
        "(per sample). Several, separated by commas, give a Pareto front. time unless given; "
        "gpu_hours where hosts are tuned.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        "--trials",
        metavar="N",
        help="Settings to try, over all machines that share the study; 24 unless given.",
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
        "journal file (journal:PATH, or a path that ends in .journal or .log): to go on later, and "
        "for many machines to share.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
Study = Annotated[
    str | None,
    typer.Option(
        "--study",
        metavar="NAME",
        help="Name of the study in --storage; made from the model and the flags unless given.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
