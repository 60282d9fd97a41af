"""Lookups timed inside iterations, and predicted: ``python -m lab lookups-in-iterations FOLDER``.

FOLDER is a task set (`lab.tasks.task_set`). Some plans of every task are run again on
this machine, in the task set's runtime, with a clock around every fused lookup and its backward. A
line gives, for a plan and a rank, measured over predicted time of the lookups forward and backward,
and of all that is not lookups. An error that all plans of a task share changes no ranking. One that
differs between the ranks of a plan, or between plans, is what a search can pick.

Why: docs/decisions/0041.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.programs import existing_folder, make_parser
from lab.tasks.task_set import MeasuredTask, TaskSet, load_task_set
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.workload import Workload
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import Rank, Report, join_group, prepare
from shardopt.ranks.realtime import Runtime, hasten_gloo

Array = NDArray[np.float64]

ROUNDS, WARM_UP, BLOCK = 14, 4, 4
"""Rounds, those of them that do not count, and iterations of a plan in a round."""
MOST_PLANS = 6
PHASES = {"forward": "embedding_forward", "backward": "embedding_backward"}
PARTS = (*PHASES, "rest")


@dataclass(frozen=True)
class Clock:
    """Milliseconds that a rank has spent in fused lookups since `start`."""

    spent: dict[str, float]

    def start(self) -> None:
        """From zero."""
        self.spent.update(dict.fromkeys(PHASES, 0.0))

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A lookup that is timed, and whose backward will be."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            out = forward(*args, **kwargs)
            self.spent["forward"] += 1e3 * (time.perf_counter() - began)
            if out.grad_fn is not None:
                self._watch(out.grad_fn)
            return out

        return timed

    def _watch(self, node: Any) -> None:
        began: list[float] = []

        def end(*_: object) -> None:
            self.spent["backward"] += 1e3 * (time.perf_counter() - began.pop())

        node.register_prehook(lambda *_: began.append(time.perf_counter()))
        node.register_hook(end)


@contextmanager
def timed_lookups(clock: Clock) -> Iterator[None]:
    """FBGEMM's modules report to the clock."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops

    kinds = (ops.SplitTableBatchedEmbeddingBagsCodegen, ops.DenseTableBatchedEmbeddingBagsCodegen)
    forwards = [kind.forward for kind in kinds]
    for kind, forward in zip(kinds, forwards, strict=True):
        kind.forward = clock.wrap(forward)
    try:
        yield
    finally:
        for kind, forward in zip(kinds, forwards, strict=True):
            kind.forward = forward


def run_rank(
    rank: Rank,
    report: Report,
    workload: Workload,
    plans: Mapping[str, ShardingPlan],
    runtime: Runtime,
) -> None:
    """Report the median of every part of every plan, ms."""
    device = prepare(rank, "gloo", runtime)
    import torch.distributed as dist

    join_group(rank)
    from shardopt.training.batch import batch_ring
    from shardopt.training.loop import Training

    clock = Clock({})
    ring = batch_ring(workload, rank=rank.index)
    found: dict[str, dict[str, list[float]]] = {n: {p: [] for p in PARTS} for n in plans}
    with timed_lookups(clock):
        trainings = {n: Training(workload, plan, device, ring) for n, plan in plans.items()}
        for round_ in range(ROUNDS):
            for name, training in trainings.items():
                dist.barrier()
                if runtime is Runtime.TUNED:
                    hasten_gloo()
                training.step()
                for _ in range(BLOCK):
                    clock.start()
                    began = time.perf_counter()
                    training.step()
                    whole = 1e3 * (time.perf_counter() - began)
                    spent = {**clock.spent, "rest": whole - sum(clock.spent.values())}
                    for part in PARTS if round_ >= WARM_UP else ():
                        found[name][part].append(spent[part])
    report({n: {p: statistics.median(ms) for p, ms in of.items()} for n, of in found.items()})
    dist.barrier()


def predicted_parts(tasks: TaskSet, task: MeasuredTask, plan: ShardingPlan) -> dict[str, Array]:
    """Milliseconds of every part on every rank, ``[ranks]``; what is no lookup is the rest of the
    iteration."""
    scorer = PlanScorer(task.workload, tasks.ranks, tasks.made.profile)
    chosen = match_plan(task.workload, tasks.ranks, plan)
    graph = scorer.graph(scorer.totals(chosen)[None])
    parts = {part: np.zeros(tasks.ranks.world_size) for part in PARTS}
    for op in graph.ops:
        part = next((p for p, phase in PHASES.items() if op.phase == phase), None)
        if part is not None and (op.active is None or op.active.all()):
            parts[part] = parts[part] + op.cost_ms.reshape(-1) + op.host_ms
    parts["rest"] = float(scorer.score([chosen])[0]) - parts["forward"] - parts["backward"]
    return parts


def compare(tasks: TaskSet, task: MeasuredTask) -> Iterator[str]:
    """A line for each of some plans and each rank."""
    plans = dict(list(task.plans.items())[:MOST_PLANS])
    runtime = Runtime(tasks.made.profile.runtime or Runtime.TUNED)
    measured: dict[int, dict[str, dict[str, float]]] = {}
    run_ranks(
        run_rank,
        tasks.ranks.world_size,
        task.workload,
        plans,
        runtime,
        on_report=measured.__setitem__,
    )
    for name, plan in plans.items():
        predicted = predicted_parts(tasks, task, plan)
        for rank in sorted(measured):
            ratios = (
                f"{part} {measured[rank][name][part] / predicted[part][rank]:5.2f}"
                for part in PARTS
            )
            yield f"{task.name}  {name:24}  rank {rank}  {'  '.join(ratios)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print measured over predicted times."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument(
        "folder", type=existing_folder, help="a task set, such as bench batch makes"
    )
    tasks = load_task_set(parser.parse_args(argv).folder)
    for task in tasks.tasks:
        for line in compare(tasks, task):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
