"""From the host's batch to ids on the ranks that look them up (TorchRec's dist_data.py)."""

from __future__ import annotations

from collections.abc import Sequence

from predictor.costs import Costs
from predictor.graph import Dep, Graph
from predictor.kernels.elementwise import copy_h2d_ms
from predictor.sparse import INDEX_BYTES, LENGTH_BYTES, Exchange
from predictor.units import us

# Framework ops on the host per stage, as equivalents of the profile's op_us: host time of the stage
# in the 8-rank TorchRec trace of facebookresearch/param (et_replay/tests/inputs/dlrm_kineto.tar.gz),
# 2 us per recorded event taken off for the profiler, launches apart, over 21 us (Lin et al., T1).
# They stand for TorchRec's code, not for hardware.
OPS_COPY = 6
OPS_PERMUTE = 14
OPS_SPLITS = 18
OPS_IDS = 15
OPS_RECAT = 18


class InputDist:
    """Adds the stages of the input distribution to a graph.

    Args:
        exchanges: those that send ids, in the order in which TorchRec runs them.
    """

    def __init__(self, graph: Graph, costs: Costs, exchanges: Sequence[Exchange]) -> None:
        self.graph = graph
        self.costs = costs
        self.exchanges = exchanges

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
            host_ms=self.costs.host_ms(6, kernels=4),
        )

    def announce(self, stream: str, *deps: Dep) -> dict[str, int]:
        """Permute the ids and announce their numbers; returns exchange name -> splits op."""
        splits = {}
        for exchange in self.exchanges:
            permute = self.graph.add(
                f"{exchange.name} permute ids",
                phase="input_dist",
                resource="elementwise",
                stream=stream,
                cost_ms=exchange.permute_ms(),
                host_ms=self.costs.host_ms(OPS_PERMUTE, kernels=7),
                deps=deps,
                active=exchange.active,
            )
            splits[exchange.name] = self.graph.add(
                f"{exchange.name} splits all-to-all",
                phase="input_dist",
                resource="collectives",
                stream="comm",
                cost_ms=exchange.splits_ms(),
                host_ms=self.costs.host_ms(OPS_SPLITS, collectives=1),
                deps=[permute],
                scope="world",
                active=exchange.active,
            )
        return splits

    def send(self, splits: dict[str, int]) -> dict[str, int]:
        """Read the splits on the host, then send lengths and ids; returns name -> ids op."""
        ids = {}
        for exchange in self.exchanges:
            # the host must know the sizes before it can allocate: a device-to-host sync
            sync = self.graph.add(
                f"{exchange.name} read splits",
                phase="input_dist",
                resource="overheads",
                stream="host",
                cost_ms=us(self.costs.hardware.overheads.sync_us),
                deps=[splits[exchange.name]],
                active=exchange.active,
            )
            ids[exchange.name] = self.graph.add(
                f"{exchange.name} ids all-to-all",
                phase="input_dist",
                resource="collectives",
                stream="comm",
                cost_ms=exchange.ids_ms(),
                host_ms=self.costs.host_ms(OPS_IDS, collectives=2),
                kernels=2,
                deps=[sync],
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
            host_ms=self.costs.host_ms(OPS_RECAT, kernels=7),
            kernels=3,
            deps=deps,
            active=exchange.active,
        )
