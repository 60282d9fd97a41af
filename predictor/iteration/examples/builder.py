"""One iteration of DLRM in NVIDIA's DeepLearningExamples: whole tables on ranks, top MLP on all.

Every rank reads the ids of its own tables from disk, so none are exchanged. Where the bottom MLP is
not data-parallel, one rank runs it for the whole batch and its outputs travel with those of the
lookups. Kernels, exchanges and the order of the backward are those of TorchRec's graph.

Why: docs/decisions/0046.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from predictor.cost.dense import DenseLayers, Layer
from predictor.cost.loads import Load
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import Collective, Exchange, Transfer
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan


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
        self.bottom = self.dense.bottom
        if first_gpu and ranks > 1:
            whole = replace(scorer.workload, batch_size=ranks * scorer.workload.batch_size)
            self.bottom_ranks = (0,)
            self.bottom = DenseLayers(whole, scorer.hardware).bottom

    def build(self) -> Graph:
        """Bottom MLP and lookups, the exchange, the top; backward the same way; one step."""
        copy = self.input.copy()  # of the next batch
        for layer in self.bottom:
            self._bottom_layer(layer, backward=False, deps=[Dep(copy, lag=1)])
        for module in self._modules():
            self._lookups(module, {})
        self._interaction_and_top()
        self._backward()
        self._optimizer_step()
        return self.graph

    def _backward(self) -> None:
        """Gradients of the top MLP leave while those of the embeddings return."""
        self._layers_backward([*self.dense.top, self.dense.loss])
        self._layers_backward(self.dense.interaction)
        concat = self._concat("concat embeddings backward", [])
        if self.bottom_ranks is not None:
            self.gradients.flush()
        arrived = {e.name: self._outputs(e, [concat], backward=True) for e in self.exchanges}
        waits = [Dep(op) for ops in arrived.values() for op in ops] or [Dep(concat)]
        for exchange in self.exchanges:
            for group in exchange.members:
                self._lookup_backward(exchange, group, waits)
        for layer in reversed(self.bottom):
            self._bottom_layer(layer, backward=True, deps=waits)
        self.gradients.flush()

    def _bottom_layer(self, layer: Layer, *, backward: bool, deps: Sequence[Dep]) -> None:
        kernels = layer.backward_kernels if backward else layer.forward_kernels
        self.graph.add(
            f"{layer.name} backward" if backward else layer.name,
            phase="dense_backward" if backward else "dense_forward",
            resource="gemm",
            stream="compute",
            cost_ms=layer.backward_ms if backward else layer.forward_ms,
            host_ms=self._layer_host_ms(kernels),
            kernels=kernels,
            deps=deps,
            ranks=self.bottom_ranks,
        )
        if backward and self.bottom_ranks is None:
            self.gradients.add(layer.parameters)
