"""``python -m lab score``: how many plans a second the predictor scores."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import Machine, check_number

MAX_COUNT = 1_000_000
MAX_REPEAT = 1000


def score(
    model: Path,
    machine: Machine,
    seed: int = 0,
    count: int = 5000,
    repeat: int = 5,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Measure how many plans per second the predictor scores.

    Search:
        count (N): Plans to score per round and kind.
        repeat (N): Number of rounds; the medians are shown.
    """
    from shardopt.api.setting import resolve
    from shardopt.cli.output import note

    check_number("count", count, 1, MAX_COUNT)
    check_number("repeat", repeat, 1, MAX_REPEAT)
    setting = resolve(model, machine)

    from lab.planners.score import measure

    note(setting.notes, quiet=quiet)
    found = measure(setting.problem(), count, repeat, seed)
    if json:
        from shardopt.api.cache import versions
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
        print(f"{found.per_second(name):12,.0f} a second: {name}")
    print(f"{found.scenarios_cost:12.1f} times the time of a plan: the same in all scenarios")
