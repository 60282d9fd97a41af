"""``python -m lab score``: how many plans a second the predictor scores."""

from __future__ import annotations

from typing import Annotated

import typer

from shardopt.cli import options

MAX_COUNT = 1_000_000
MAX_REPEAT = 1000

Count = Annotated[
    int,
    typer.Option(
        "--count",
        metavar="N",
        help="Plans to score per round and kind.",
        rich_help_panel=options.SEARCH,
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        help="Number of rounds; the medians are shown.",
        rich_help_panel=options.SEARCH,
    ),
]


def score(
    model: options.Model,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    count: Count = 5000,
    repeat: Repeat = 5,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how many plans per second the predictor scores."""
    from shardopt.api.setting import Machine
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import note
    from shardopt.cli.setting import resolve

    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    check_number("--count", count, 1, MAX_COUNT)
    check_number("--repeat", repeat, 1, MAX_REPEAT)
    setting = resolve(model, machine)

    from lab.planners.score import measure

    note(setting.notes, quiet=quiet)
    found = measure(setting.problem(), count, repeat, seed)
    if json:
        from shardopt.api.plan_file import versions
        from shardopt.cli.output import print_json
        from shardopt.measure.machine import machine as this_machine

        kinds = {
            name: {"per_second": found.per_second(name), "samples_s": [*samples.seconds]}
            for name, samples in found.times.items()
        }
        head = {**setting.facts(), "seed": seed, "count": count, "repeat": repeat}
        cost = {"scenarios_cost": found.scenarios_cost}
        print_json(
            {**head, "kinds": kinds, **cost, "machine": this_machine(), "versions": versions()}
        )
        return
    for name in found.times:
        typer.echo(f"{found.per_second(name):12,.0f} a second: {name}")
    typer.echo(f"{found.scenarios_cost:12.1f} times the time of a plan: the same in all scenarios")
