"""The price of `ParameterConstraints`: what the best plan without them saves, and the lines that
allow it.

The search space of the hook is what TorchRec's enumerator offers, constraints included. Without
types, kernels and widths in the constraints the enumerator offers more. Only options under which a
table keeps its optimizer count: one of the dense kernel is stepped by the script's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from predictor.model.plan import ShardingPlan, TablePlan
from search.constraint_costs import ConstraintCosts, price_constraints
from search.problem import Problem
from search.stop import Stop
from shardopt.extras import needs_torchrec
from shardopt.formatting import ms, percent
from shardopt.torchrec.offered import DENSE, Options, runnable
from shardopt.torchrec.options import group_by_table
from shardopt.torchrec.read_module import UserInputs, by_module, tables_of

with needs_torchrec():
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ParameterConstraints

RELAXED = ("sharding_types", "compute_kernels", "min_partition")
"""Fields of `ParameterConstraints` that are dropped."""


def price_torchrecs_constraints(
    problem: Problem,
    plan: ShardingPlan,
    request: tuple,
    inputs: UserInputs,
    topology: TorchRecTopology,
    stop: Stop,
    seed: int,
) -> ConstraintCosts | None:
    """Search without the user's constraints; None where they cost nothing.

    Args:
        plan: the one that is returned.
        request: module and sharders.
        inputs: the user's, with the constraints.
        topology: of the planner, before its reservation.
    """
    loose = {
        name: replace(constraint, **dict.fromkeys(RELAXED))
        for name, constraint in inputs.constraints.items()
    }
    if loose == dict(inputs.constraints):
        return None
    offered = EmbeddingEnumerator(topology, inputs.batch_size, loose).enumerate(*request)
    usable = _with_their_optimizer(runnable(offered, topology), problem, plan)
    free_inputs = inputs._replace(constraints=loose)
    read = [table.read(free_inputs) for table in tables_of(usable, by_module(request[1]))]
    free = {(table.module, table.name): table.constraints for table in read}
    tables = tuple(
        replace(table, constraints=free.get((table.module, table.name), table.constraints))
        for table in problem.workload.tables
    )
    relaxed = replace(problem, workload=replace(problem.workload, tables=tables))
    rating = problem.scorer.score([tuple(plan.tables[key] for key in problem.workload.keys)])
    return price_constraints(problem, plan, float(rating[0]), stop, seed, relaxed)


def _with_their_optimizer(options: Options, problem: Problem, plan: ShardingPlan) -> Options:
    """The options of tables in the plan that have the dense kernel where the plan has it."""
    pairs = zip(problem.workload.keys, problem.workload.tables, strict=True)
    dense = {(t.module, t.name): plan.tables[key].compute_kernel == DENSE for key, t in pairs}
    return [
        option
        for key, of_table in group_by_table(options).items()
        for option in of_table
        if dense.get((key[0] or "ebc", key[1])) == (option.compute_kernel == DENSE)
    ]


def price_lines(
    costs: ConstraintCosts, problem: Problem, constraints: Mapping[str, ParameterConstraints]
) -> str:
    """Say what the constraints cost, with `ParameterConstraints` to paste into the script that
    allow the faster plan."""
    lines = [
        f"constraints cost {percent(costs.gain)} of the iteration: a plan without them takes "
        f"{ms(costs.iteration_ms)}; to allow it, give the planner",
        "constraints={**constraints,",
        *_entries(costs, problem, constraints),
        "}",
    ]
    return "\n    ".join(lines[:-1]) + "\n" + " " * 4 + lines[-1]


def _entries(
    costs: ConstraintCosts, problem: Problem, constraints: Mapping[str, ParameterConstraints]
) -> Iterator[str]:
    """A line for each table whose constraint binds."""
    names = dict(zip(problem.workload.keys, (t.name for t in problem.workload.tables), strict=True))
    saved = {cost.table: f"saves {percent(cost.gain)}" for cost in costs.costs}
    together = saved.pop(None, "")
    for key in costs.binding:
        name, why = names[key], saved.get(key, f"{together} with the others" if together else "")
        allowed = _allowing(constraints[name], costs.plan.tables[key])
        yield f"    {name!r}: {_written(allowed)}," + (f"  # {why}" if why else "")


def _allowing(constraint: ParameterConstraints, table: TablePlan) -> ParameterConstraints:
    """A user's constraint that also allows a sharding."""
    kind, kernel = table.sharding_type.value, table.compute_kernel.value
    narrowest = min(shard.size[1] for shard in table.shards)
    types, kernels = constraint.sharding_types, constraint.compute_kernels
    widest = constraint.min_partition if constraint.min_partition is None else narrowest
    return replace(
        constraint,
        sharding_types=types and [*dict.fromkeys([*types, kind])],
        compute_kernels=kernels and [*dict.fromkeys([*kernels, kernel])],
        min_partition=widest and min(widest, constraint.min_partition or widest),
    )


def _written(constraint: ParameterConstraints) -> str:
    """The call that makes a constraint, with what is not TorchRec's default; pooling factors are
    told from the default by identity, as a user's 1.0 is one that was given."""
    usual = vars(ParameterConstraints())
    usual["pooling_factors"] = None
    values = {f.name: getattr(constraint, f.name) for f in fields(constraint)}
    if values["pooling_factors"][:1] == [POOLING_FACTOR]:
        first = values["pooling_factors"][0]
        values["pooling_factors"] = None if first is POOLING_FACTOR else values["pooling_factors"]
    words = [f"{name}={value!r}" for name, value in values.items() if value != usual[name]]
    return f"ParameterConstraints({', '.join(words)})"
