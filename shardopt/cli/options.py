"""The flags that commands share, each typed and described once.

Ranges are checked in `shardopt.api.setting` and `shardopt.cli.checks`, whose messages say what is
allowed and what to try.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
        help="GPUs of one host; min(8, gpus) unless given.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Hosts, ranks per host, NVLink domain, memory and hardware (YAML), "
        "instead of --gpus and --gpus-per-node.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="Hardware profile; 'shardopt hardware' lists them. h100-sxm unless given here, "
        "in the cluster or in the plan.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
HbmGib = Annotated[
    float | None,
    typer.Option(
        "--hbm-gib",
        metavar="GIB",
        help="Device memory per GPU; the profile's unless given.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
DdrGib = Annotated[
    float | None,
    typer.Option(
        "--ddr-gib",
        metavar="GIB",
        help="Host memory per GPU; the profile's unless given.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Reserve = Annotated[
    float,
    typer.Option(
        "--reserve",
        metavar="SHARE",
        help="Share of device memory kept free of tables.",
        rich_help_panel=MACHINE,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        help="Samples per rank and iteration; the model file's unless given.",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse to predict outside the ranges that the profile was measured in.",
        rich_help_panel=MACHINE,
    ),
]

Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="Same seed, same plan.", rich_help_panel=SEARCH),
]
Effort = Annotated[
    float,
    typer.Option(
        "--effort",
        metavar="X",
        help="Multiple of the default work budget of the search.",
        rich_help_panel=SEARCH,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        help="Ceiling on the search in seconds; a search that hits it is not repeatable.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
TopK = Annotated[
    int,
    typer.Option("--top-k", metavar="K", help="Plans to show, best first.", rich_help_panel=SEARCH),
]
Search = Annotated[
    Searchers,
    typer.Option("--search", help="Who proposes plans.", rich_help_panel=SEARCH),
]

From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Plan file (JSON) in use: the search starts from it and says what would move. Ranks "
        "and hardware are the plan's unless flags say otherwise.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]
MaxMoves = Annotated[
    int | None,
    typer.Option(
        "--max-moves",
        metavar="K",
        help="Tables that may differ from --from; 0 only rates it.",
        rich_help_panel=SEARCH,
        show_default=False,
    ),
]

Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on stdout, nothing else.", rich_help_panel=OUTPUT),
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
        "--quiet", help="Only the result in short; no progress, no notes.", rich_help_panel=OUTPUT
    ),
]
