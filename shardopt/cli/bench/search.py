"""``shardopt bench search``: the search against TorchRec's planner, on one model."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import MAX_SEED, Machine, check_number
from shardopt.report.blocks import View

MAX_REPEAT = 1000


def search(
    model: Path,
    machine: Machine,
    seed: int = 0,
    effort: float = 1.0,
    time_limit: float | None = None,
    repeat: int = 3,
    quiet: bool = False,
) -> View:
    """Compare the search with TorchRec's planner: time to plan, and predicted plans.

    Search:
        repeat (N): Number of rounds; the medians are shown.
    """
    from search.stop import Stop
    from shardopt.api.cache import versions
    from shardopt.api.json_object import finite
    from shardopt.api.setting import resolve
    from shardopt.bench.job import check_layers
    from shardopt.cli.output import note, words_of

    check_number("seed", seed, 0, MAX_SEED)
    Stop(effort, time_limit)
    check_number("repeat", repeat, 1, MAX_REPEAT)
    setting = resolve(model, machine)
    check_layers(setting.workload)

    # torch, torchrec and the solvers, once the input is known to be good
    from shardopt.bench.planners import compare
    from shardopt.report.bench.planners import planners_view
    from shardopt.report.prediction import setting_facts

    options = {**vars(machine), "seed": seed, "effort": effort, "time_limit": time_limit}
    words = [str(model), *words_of(options)]
    note(setting.notes, quiet=quiet)
    comparison = compare(
        setting.problem(),
        words,
        lambda: Stop(effort, time_limit),
        seed,
        repeat,
        lambda name, at: note([f"round {at + 1} of {repeat}: {name}"], quiet=quiet),
    )
    view = planners_view(comparison)
    head = {**setting.facts(), "seed": seed, "effort": effort, "repeat": repeat}
    return View(
        {**head, **finite(view.data), "versions": versions()},
        [setting_facts(setting), *view.full],
        view.brief,
    )
