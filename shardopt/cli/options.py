"""The flags that commands share, each typed and described once.

Ranges are checked in `shardopt.api.setting` and `shardopt.cli.checks`, whose messages say what is
allowed and what to try.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardopt.ranks.realtime import Runtime

MACHINE = "Machine"
SEARCH = "Search"
OUTPUT = "Output"


class Searchers(StrEnum):
    """Who proposes plans."""

    ROUNDING = "rounding"
    CPSAT = "cpsat"
    OPTUNA = "optuna"
    ALL = "all"

    @property
    def names(self) -> tuple[str, ...]:
        """As `search.solve.solve` takes them."""
        if self is Searchers.ALL:
            return tuple(s.value for s in Searchers if s is not Searchers.ALL)
        return (self.value,)


Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Model file (YAML).", show_default=False)
]
ModelOrReplay = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="Model file (YAML); not needed with --replay.", show_default=False
    ),
]
Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file (JSON).", show_default=False)]
Plans = Annotated[
    list[Path],
    typer.Argument(metavar="PLAN...", help="Plan files (JSON), one or more.", show_default=False),
]

Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", metavar="N", help="Number of GPUs.", rich_help_panel=MACHINE, show_default=False
    ),
]
GpusPerNode = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node",
        metavar="N",
        help="GPUs per host; the smaller of 8 and --gpus by default.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Cluster file (YAML) with hosts, ranks per host, NVLink domain, memory and hardware; "
        "replaces --gpus and --gpus-per-node.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="Hardware profile, by name or file; `shardopt hardware` lists the names. By default "
        "that of the cluster file or the plan, else h100-sxm.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
HbmGib = Annotated[
    float | None,
    typer.Option(
        "--hbm-gib",
        metavar="GIB",
        help="Device memory per GPU in GiB; that of the profile by default.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
DdrGib = Annotated[
    float | None,
    typer.Option(
        "--ddr-gib",
        metavar="GIB",
        help="Host memory per GPU in GiB; that of the profile by default.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Reserve = Annotated[
    float | None,
    typer.Option(
        "--reserve",
        metavar="SHARE",
        help="Share of the device memory to keep free, for what no prediction knows; 0.05 by "
        "default, 0.15 where activations are not known.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        help="Samples per GPU and iteration; that of the model file by default.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Stop with an error where a cost is outside the range that the profile covers.",
        rich_help_panel=MACHINE,
    ),
]

Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the search; the same seed gives the same plan.",
        rich_help_panel=SEARCH,
    ),
]
Effort = Annotated[
    float,
    typer.Option(
        "--effort",
        metavar="X",
        help="Work of the search, as a multiple of the default.",
        rich_help_panel=SEARCH,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        help="Stop the search after this many seconds; the plan may then differ from run to run.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="K", help="Number of plans to show, best first.", rich_help_panel=SEARCH
    ),
]
Search = Annotated[
    Searchers,
    typer.Option(
        "--search",
        help="The method that proposes plans; `all` uses every method.",
        rich_help_panel=SEARCH,
    ),
]


class Objectives(StrEnum):
    """What ``--objective`` takes: `search.choose.AIMS`."""

    NOMINAL = "nominal"
    MEAN = "mean"
    REGRET = "regret"


ObjectiveOption = Annotated[
    Objectives,
    typer.Option(
        "--objective",
        help="What to minimise: the predicted time, its mean over the scenarios, or the largest "
        "regret in them (how much slower the plan is than the best known of a scenario).",
        rich_help_panel=SEARCH,
    ),
]
ScenariosOption = Annotated[
    str | None,
    typer.Option(
        "--scenarios",
        metavar="N|none|FILE",
        help="What else could be true: N draws of the errors that the profile states (16 unless "
        "given), or the scenarios of a file (YAML, JSON). Windows of data come on top.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
Stats = Annotated[
    str | None,
    typer.Option(
        "--stats",
        metavar="FILE,FILE,...",
        help="Stats files of two or more windows of data; the first is what the plan is predicted "
        "for, and all are scenarios.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]

From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="The plan in use (JSON): the search starts from it, and the report says what would "
        "move. Ranks and hardware are those of this plan unless you set them.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
MaxMoves = Annotated[
    int | None,
    typer.Option(
        "--max-moves",
        metavar="K",
        help="Number of tables that may differ from the plan of --from; 0 only predicts that plan.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
MaxGib = Annotated[
    float | None,
    typer.Option(
        "--max-gib",
        metavar="GIB",
        help="GiB of weights and optimizer state that may move to other ranks, from the plan of "
        "--from.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
Horizon = Annotated[
    int | None,
    typer.Option(
        "--horizon",
        metavar="STEPS",
        help="Steps over which a move from the plan of --from must pay for itself; 10,000 unless "
        "given.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]

Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="FILE",
        help="Make this plan file again from all that it says made it, and compare byte for byte; "
        "give MODEL only if the model file has moved.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Search even if the answer to the same input is known, and do not keep this one.",
        rich_help_panel=SEARCH,
    ),
]

RuntimeOption = Annotated[
    Runtime,
    typer.Option(
        "--runtime",
        help="How CPU ranks run: plain as torchrun and a training script run them; tuned with "
        "real-time gloo threads and kept memory, which repeats better but is not what users run.",
        rich_help_panel="Measurement",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on stdout and nothing else.", rich_help_panel=OUTPUT
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the best plan to this file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        help="Print the result in a few lines, without progress and notes.",
        rich_help_panel=OUTPUT,
    ),
]
