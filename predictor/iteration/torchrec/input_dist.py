"""From the host's batch to ids on the ranks that look them up (TorchRec's dist_data.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.cost.elementwise import copy_h2d_ms
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.host_ops import HOST_OPS
from predictor.cost.ops.position_weights import PREPARE_OPS
from predictor.iteration.graph import Dep, Graph, Mask
from predictor.iteration.torchrec.sparse import LENGTH_BYTES, ROW_SPLIT, Exchange
from predictor.model.reservation import INDEX_BYTES
from predictor.units import us


class InputDist:
    """Adds the stages of the input distribution to a graph.

    Each stage takes the exchanges that send ids, in the order in which TorchRec runs them; with one
    rank there are none (`KJTAllToAll` returns early).
    """

    def __init__(self, graph: Graph, costs: FixedCosts) -> None:
        self.graph = graph
        self.costs = costs

    def copy(self) -> int:
        """The batch from host to device memory, on its own stream, ahead of its use."""
        batch = self.costs.workload.batch_size
        ids = sum(t.lookups_per_sample for t in self.costs.workload.tables)
        lengths = sum(f.num_poolings for t in self.costs.workload.tables for f in t.features)
        dense = self.costs.workload.dense.in_features + 1
        per_sample = ids * INDEX_BYTES + lengths * LENGTH_BYTES + dense * 4
        return self.graph.add(
            "input copy",
            phase="input_copy",
            resource="memory",
            stream="copy",
            cost_ms=float(copy_h2d_ms(self.costs.hardware, batch * per_sample)),
            host_ms=self.costs.host_ms(HOST_OPS.copy, kernels=4),
            kernels=4,
        )

    def announce(self, exchanges: Sequence[Exchange], stream: str, *deps: Dep) -> list[Dep]:
        """Permute ids and announce their numbers, in one all-to-all for all exchanges given.

        This is how pipelines fuse them (`FusedKJTListSplitsAwaitable`).
        """
        permutes = [Dep(self._permute(exchange, stream, deps)) for exchange in exchanges]
        if not exchanges:
            return []
        count = np.sum([e.active for e in exchanges], axis=0)[:, None]
        splits = self.graph.add(
            f"{_name(exchanges)} splits all-to-all",
            phase="input_dist",
            resource="collectives",
            stream="comm",
            cost_ms=exchanges[0].splits_ms(count),
            host_ms=self.costs.host_ms(HOST_OPS.splits, collectives=1),
            deps=permutes,
            scope="world",
            active=_any_active(exchanges),
        )
        return [Dep(splits)]

    def _permute(self, exchange: Exchange, stream: str, deps: Sequence[Dep]) -> int:
        return self.graph.add(
            f"{exchange.name} permute ids",
            phase="input_dist",
            resource="elementwise",
            stream=stream,
            cost_ms=exchange.permute_ms(),
            host_ms=self.costs.host_ms(HOST_OPS.permute, kernels=7) + self._prepare_ms(exchange),
            kernels=7,
            deps=deps,
            active=exchange.active,
        )

    def _prepare_ms(self, exchange: Exchange) -> float:
        """Host time of the positions that a feature processor sends where rows are split."""
        prepares = exchange.processed and exchange.sharding_type in ROW_SPLIT
        return self.costs.layer_host_ms(HOST_OPS.op * PREPARE_OPS, PREPARE_OPS) * prepares

    def read(self, exchanges: Sequence[Exchange], splits: Sequence[Dep] = ()) -> list[Dep]:
        """The host must know the sizes before it can allocate: a device-to-host sync."""
        if not exchanges:
            return []
        sync = self.graph.add(
            f"{_name(exchanges)} read splits",
            phase="input_dist",
            resource="overheads",
            stream="host",
            cost_ms=us(self.costs.hardware.overheads.sync_us),
            deps=splits,
            active=_any_active(exchanges),
        )
        return [Dep(sync)]

    def send(self, exchanges: Sequence[Exchange], read: Sequence[Dep]) -> dict[str, int]:
        """Send lengths, ids and weights; returns exchange name -> op."""
        ids = {}
        for exchange in exchanges:
            ids[exchange.name] = self.graph.add(
                f"{exchange.name} ids all-to-all",
                phase="input_dist",
                resource="collectives",
                stream="comm",
                cost_ms=exchange.ids_ms(),
                host_ms=self.costs.host_ms(HOST_OPS.ids, collectives=exchange.tensors_sent),
                kernels=exchange.tensors_sent,
                deps=read,
                scope="world",
                active=exchange.active,
            )
        return ids

    def recat(self, exchange: Exchange, stream: str, deps: Sequence[Dep]) -> int:
        """Reorder the received ids by feature."""
        return self.graph.add(
            f"{exchange.name} permute received ids",
            phase="input_dist",
            resource="elementwise",
            stream=stream,
            cost_ms=exchange.recat_ms(),
            host_ms=self.costs.host_ms(HOST_OPS.recat, kernels=7),
            kernels=7,
            deps=deps,
            active=exchange.active,
        )


def _name(exchanges: Sequence[Exchange]) -> str:
    return exchanges[0].name if len(exchanges) == 1 else "fused"


def _any_active(exchanges: Sequence[Exchange]) -> Mask:
    return np.asarray(np.any([exchange.active for exchange in exchanges], axis=0))
