"""What runs the iteration: TorchRec, or HugeCTR as MLPerf submissions ran it.

A runtime says what overlaps, in which precision the dense part computes and what a launch costs.
TorchRec's graph is in `predictor.iteration.torchrec.dlrm`; HugeCTR's is in
`predictor.iteration.hugectr.builder`, where the constants below enter. They were fitted on MLPerf
rounds up to v3.1 on A100-SXM and H100-SXM systems alone and are frozen: no later round and no other
accelerator had a say (`python -m tools.fit_runtime`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from predictor.iteration.hugectr.hybrid_embedding import HybridRule


@dataclass(frozen=True)
class Runtime:
    """How a framework runs the work that a plan asks for.

    Args:
        name: as reports show it.
        dense_type: data type of the dense part and of embeddings on the wire; None keeps the
            workload's own.
        graph_node_us: from the end of one kernel to the start of the next inside a CUDA graph.
        lookup_factor, update_factor: kernel times of embedding forward and backward over those of
            FBGEMM's TBE in the profile; the hybrid's update over streaming what it moves.
        gemm_factor: kernel times of dense layers over those of the profile.
        step_us: what one iteration takes beside its kernels and transfers: launching the graph,
            the data reader, and the barrier of all ranks.
        hybrid: HugeCTR's hybrid embedding of rounds v2.x
        (`predictor.iteration.hugectr.hybrid_embedding`), whose
            kernels and all-reduce load from and store to the other ranks themselves.
    """

    name: str
    dense_type: str | None = None
    graph_node_us: float = 0.0
    lookup_factor: float = 1.0
    update_factor: float = 1.0
    gemm_factor: float = 1.0
    step_us: float = 0.0
    hybrid: HybridRule | None = None


TORCHREC = Runtime("torchrec")

_HUGECTR = Runtime("hugectr", "fp16", 1.0, 1.046, 1.308, 1.049)
HUGECTR_V20 = replace(
    _HUGECTR,
    name="hugectr v2.0",
    update_factor=3.334,
    step_us=6.0,
    hybrid=HybridRule(duplicates=0.03, bandwidth_ratio=0.5 * 190 / 130),
)
"""One host: mlcommons/training_results_v2.0, NVIDIA, dlrm, dgx_a100.py; several:
training_results_v1.1, dgx_a100_14x8x640.py, as that of v2.0 was not found."""
HUGECTR_V21_PREVIEW = replace(
    HUGECTR_V20,
    name="hugectr v2.1 preview",
    hybrid=HybridRule(duplicates=0.03, bandwidth_ratio=23.75 / 130),
)
"""H100: mlcommons/training_results_v2.1, NVIDIA, hugectr-preview, dgx_h100{,_4x8x2240}.py."""
HUGECTR_V30 = replace(_HUGECTR, name="hugectr v3.0", step_us=763.0)
HUGECTR_V31 = replace(_HUGECTR, name="hugectr v3.1+", step_us=713.0)


def hugectr_of(version: tuple[int, ...], *, preview: bool = False) -> Runtime:
    """HugeCTR as of an MLPerf round, e.g. (3, 1).

    Args:
        preview: the code of v2.1 for hardware that was not sold yet.
    """
    if version < (3, 0):
        return HUGECTR_V21_PREVIEW if preview else HUGECTR_V20
    return HUGECTR_V30 if version < (3, 1) else HUGECTR_V31
