"""The plans of a task in parts: what is built and run at once.

Each part begins with the first plan of the task, so that every other plan is timed in turns with
the plan that it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from predictor.model.plan import ShardingPlan
from predictor.model.workload import Workload
from shardopt.bench.job import rank_bytes

MEMORY_SHARE = 0.5
"""Of the machine's memory: what the plans of a part may need on all ranks."""
MAX_AT_ONCE = 25
"""Plans of a part, so that no plan is timed minutes from the first one."""


def split_plans(
    workload: Workload, plans: Mapping[str, ShardingPlan], memory_bytes: float
) -> tuple[list[dict[str, ShardingPlan]], list[str]]:
    """The parts, in the order of the plans, and the names of the plans that fit into none.

    Args:
        plans: the first is in every part.
        memory_bytes: of the machine.
    """
    limit = MEMORY_SHARE * memory_bytes
    first = next(iter(plans))
    needs = {name: _bytes(workload, plans[first], plan) for name, plan in plans.items()}
    # what a rank holds beside its plans, and the first plan, are counted once a part
    alone = needs.pop(first)
    parts: list[dict[str, ShardingPlan]] = []
    left_out: list[str] = []
    room = 0.0
    for name, extra in needs.items():
        if alone + extra > limit:
            left_out.append(name)
            continue
        if not parts or extra > room or len(parts[-1]) == MAX_AT_ONCE:
            parts.append({first: plans[first]})
            room = limit - alone
        parts[-1][name] = plans[name]
        room -= extra
    return parts or [{first: plans[first]}], left_out


def _bytes(workload: Workload, first: ShardingPlan, plan: ShardingPlan) -> int:
    """Of the first plan with all that a rank holds; of another, what it adds to that."""
    alone = sum(rank_bytes(workload, [first]))
    return alone if plan is first else sum(rank_bytes(workload, [first, plan])) - alone


def part_paths(folder: Path, name: str) -> list[Path]:
    """The rows files of a task that are there, first part first."""
    found = [path for path in [part_path(folder, name, 1)] if path.is_file()]
    while found and (path := part_path(folder, name, len(found) + 1)).is_file():
        found.append(path)
    return found


def part_path(folder: Path, name: str, number: int) -> Path:
    """``task-007.rows.json`` of the first part, ``task-007.part-2.rows.json`` of the second."""
    return folder / (f"{name}.rows.json" if number == 1 else f"{name}.part-{number}.rows.json")
