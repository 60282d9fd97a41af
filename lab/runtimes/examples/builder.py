"""One iteration of DLRM in NVIDIA's DeepLearningExamples: whole tables on ranks, top MLP on all.

Every rank reads the ids of its own tables from disk, so none are exchanged. Where the bottom MLP is
not data-parallel, one rank runs it for the whole batch and its outputs travel with those of the
lookups. Kernels, exchanges and the order of the backward are those of TorchRec's graph.

Why: docs/decisions/0046.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from predictor.cost.dense import Bucket, LookupCall, Segment, Step, TableUpdate
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import Load
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import Collective, Exchange, Transfer
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.workload import Workload


class SharedLinkExchange(Exchange):
    """An exchange whose outputs all cross one link, so that their sum counts, not the busiest."""

    def _transfer(self, name: str, scope: str, collective: Collective, width: float) -> Transfer:
        cost = self.cost(
            partial(collective, scope=scope),
            lambda load: width * load[..., Load.OUTPUTS].mean(axis=-1, keepdims=True),
        )
        return Transfer(f"{self.name}.{name}", scope, cost)


class ExamplesBuilder(DlrmBuilder):
    """Adds the operations of one iteration to a graph.

    Args:
        scorer: of the workload, its topology and hardware.
        first_gpu: the first rank runs the bottom MLP of all samples.
        shared_link: one link carries what all ranks exchange.
    """

    def __init__(
        self,
        scorer: PlanScorer,
        plan: ShardingPlan,
        *,
        first_gpu: bool,
        shared_link: bool = False,
    ) -> None:
        loads = scorer.totals(match_plan(scorer.workload, scorer.topology, plan))[None]
        make = SharedLinkExchange if shared_link else Exchange
        super().__init__(scorer.costs, scorer.groups, loads, make)
        ranks = scorer.topology.world_size
        self.bottom_ranks: tuple[int, ...] | None = None
        self.bottom = self.dense
        if first_gpu and ranks > 1:
            whole = replace(scorer.workload, batch_size=ranks * scorer.workload.batch_size)
            self.bottom_ranks = (0,)
            self.bottom = FixedCosts(whole, scorer.topology, scorer.hardware).dense

    def build(self) -> Graph:
        """Bottom MLP and lookups, the exchange, the top; backward the same way; one step."""
        copy = self._copy_input()  # of the next batch
        steps = self.bottom.forward
        for segment in _segments(steps[: _place(steps, LookupCall)]):
            self._bottom_segment(segment, backward=False, deps=[Dep(copy, lag=1)])
        for module in self.modules.values():
            self._lookups(module, {})
        self._unpack([*self.modules])
        steps = self.dense.forward
        for segment in _segments(steps[_place(steps, LookupCall) :]):
            self._segment(segment, backward=False)
        self._backward()
        self._optimizer_step()
        return self.graph

    def _backward(self) -> None:
        """Gradients of the top MLP leave while those of the embeddings return."""
        at = _place(self.dense.backward, TableUpdate)
        for step in self.dense.backward[:at]:
            if isinstance(step, Segment):
                self._segment(step, backward=True)
            elif isinstance(step, Bucket):
                self._reduce_bucket(step.bytes)
        split = self._copies("pack gradients", [*self.modules], [], backward=True)
        if self.bottom_ranks is not None:
            left = sum(step.bytes for step in self.dense.backward[at:] if isinstance(step, Bucket))
            self._reduce_bucket(left - _bottom_gradient_bytes(self.workload))
        arrived = {e.name: self._outputs(e, [split], backward=True) for e in self.exchanges}
        waits = [Dep(op) for ops in arrived.values() for op in ops] or [Dep(split)]
        for exchange in self.exchanges:
            for group in exchange.members:
                self._lookup(exchange, group, waits, backward=True)
        steps = self.bottom.backward
        for step in steps[_place(steps, TableUpdate) :]:
            if isinstance(step, Segment):
                self._bottom_segment(step, backward=True, deps=waits)
            elif isinstance(step, Bucket) and self.bottom_ranks is None:
                self._reduce_bucket(step.bytes)

    def _bottom_segment(self, segment: Segment, *, backward: bool, deps: Sequence[Dep]) -> None:
        op = self._segment(segment, backward=backward)
        self.graph.wait(op, *deps)
        self.graph.ops[op] = replace(self.graph.ops[op], ranks=self.bottom_ranks)


def _place(steps: Sequence[Step], kind: type[LookupCall | TableUpdate]) -> int:
    """Position of the first step of a kind."""
    return next((i for i, step in enumerate(steps) if isinstance(step, kind)), len(steps))


def _segments(steps: Sequence[Step]) -> Iterator[Segment]:
    return (step for step in steps if isinstance(step, Segment))


def _bottom_gradient_bytes(workload: Workload) -> int:
    dense = workload.dlrm
    return 4 * sum((a + 1) * b for a, b in pairwise((dense.in_features, *dense.bottom_mlp)))
