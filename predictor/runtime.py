"""What runs the iteration: TorchRec, or HugeCTR as MLPerf submissions ran it.

A runtime says what overlaps, in which precision the dense part computes and what a launch costs.
TorchRec's graph is in `predictor.dlrm`; HugeCTR's is in `predictor.hugectr`, where the constants
below enter. They were fitted on MLPerf rounds up to v3.1 on A100-SXM and H100-SXM systems alone and
are frozen: no later round and no other accelerator had a say (`python -m predictor.fit_runtime`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Runtime:
    """How a framework runs the work that a plan asks for.

    Args:
        name: as reports show it.
        dense_type: data type of the dense part and of embeddings on the wire; None keeps the
            workload's own.
        graph_node_us: from the end of one kernel to the start of the next inside a CUDA graph.
        lookup_factor, update_factor: kernel times of embedding forward and backward over those of
            FBGEMM's TBE in the profile.
        gemm_factor: kernel times of dense layers over those of the profile.
        step_us: what one iteration takes beside its kernels and transfers: launching the graph,
            the data reader, and the barrier of all ranks.
        hybrid: HugeCTR's hybrid embedding of rounds v2.x: rows that a batch needs often are on
            every rank, the others are spread over all ranks one by one (`predictor.hugectr`).
    """

    name: str
    dense_type: str | None = None
    graph_node_us: float = 0.0
    lookup_factor: float = 1.0
    update_factor: float = 1.0
    gemm_factor: float = 1.0
    step_us: float = 0.0
    hybrid: bool = False


TORCHREC = Runtime("torchrec")

_HUGECTR = Runtime("hugectr", "fp16", 1.0, 1.086, 1.662, 0.989)
HUGECTR_V20 = replace(_HUGECTR, name="hugectr v2.0", update_factor=1.984, hybrid=True)
HUGECTR_V30 = replace(_HUGECTR, name="hugectr v3.0", step_us=487.0)
HUGECTR_V31 = replace(_HUGECTR, name="hugectr v3.1+", step_us=449.0)


def hugectr_of(version: tuple[int, ...]) -> Runtime:
    """HugeCTR as of an MLPerf round, e.g. (3, 1)."""
    if version < (3, 0):
        return HUGECTR_V20
    return HUGECTR_V30 if version < (3, 1) else HUGECTR_V31
