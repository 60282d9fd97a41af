"""``shardopt bench search``: the search against TorchRec's planner, on one model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from shardopt.api.request import MAX_SEED, Machine, check_number

MAX_REPEAT = 1000


def search(
    model: Path,
    machine: Machine,
    seed: int = 0,
    effort: float = 1.0,
    time_limit: float | None = None,
    repeat: int = 3,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Compare the search with TorchRec's planner: time to plan, and predicted plans.

    Search:
        repeat (N): Number of rounds; the medians are shown.
    """
    from search.stop import Stop
    from shardopt.api.cache import versions
    from shardopt.api.setting import resolve
    from shardopt.cli.output import note, print_json

    check_number("seed", seed, 0, MAX_SEED)
    Stop(effort, time_limit)
    check_number("repeat", repeat, 1, MAX_REPEAT)
    setting = resolve(model, machine)

    # torch, torchrec and the solvers, once the input is known to be good
    from shardopt.bench.planners import compare
    from shardopt.report.bench.planners import bench_object, show_bench, show_headline
    from shardopt.report.console import make_console
    from shardopt.report.prediction import show_setting

    words = [str(model)]
    options = {of.name: getattr(machine, of.name) for of in fields(machine)}
    options |= {"seed": seed, "effort": effort, "time_limit": time_limit}
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    note(setting.notes, quiet=quiet)
    found = compare(
        setting.problem(),
        words,
        lambda: Stop(effort, time_limit),
        seed,
        repeat,
        lambda name, at: note([f"round {at + 1} of {repeat}: {name}"], quiet=quiet),
    )
    if json:
        head = {**setting.facts(), "seed": seed, "effort": effort, "repeat": repeat}
        print_json({**head, **bench_object(found), "versions": versions()})
        return
    console = make_console()
    if quiet:
        show_headline(console, found)
        return
    show_setting(console, setting)
    show_bench(console, found)
