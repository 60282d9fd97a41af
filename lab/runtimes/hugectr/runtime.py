"""What HugeCTR's software adds to a profile: precision, factors on kernel times, cost of a step.

`predictor/hardware/runtimes/hugectr.yaml` holds the constants with their sources; ``python -m
lab.tools.fit_runtime`` fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.runtimes.hugectr.hybrid_embedding import HybridRule
from predictor.hardware.loader import load_runtime


@dataclass(frozen=True)
class Runtime:
    """How HugeCTR runs the work of a plan.

    Args:
        name: as reports show it.
        dense_type: data type of the dense part and of embeddings on the wire.
        graph_node_us: from the end of one kernel to the start of the next inside a CUDA graph.
        lookup_factor, update_factor: kernel times of embedding forward and backward over those of
            FBGEMM's TBE in the profile; the hybrid's update over streaming what it moves.
        gemm_factor: kernel times of dense layers over those of the profile.
        step_us: time of an iteration besides its kernels and transfers: launching the graph,
            the data reader, and the barrier of all ranks.
        hybrid: the hybrid embedding of rounds v2.x, whose kernels and all-reduce load from and
            store to the other ranks directly; None in other rounds.
    """

    name: str
    dense_type: str
    graph_node_us: float
    lookup_factor: float
    update_factor: float
    gemm_factor: float
    step_us: float
    hybrid: HybridRule | None = None


@cache
def load_runtimes() -> Mapping[str, Runtime]:
    """Name -> runtime, of all that are shipped."""
    found: dict[str, Any] = load_runtime("hugectr")
    return {
        name: Runtime(
            **{"name": name, **found["shared"], **constants, "hybrid": _hybrid(constants)}
        )
        for name, constants in found["runtimes"].items()
    }


def _hybrid(constants: Mapping[str, Any]) -> HybridRule | None:
    given = constants.get("hybrid")
    if given is None:
        return None
    return HybridRule(given["duplicates"], given["all_to_all_gb_s"] / given["all_reduce_gb_s"])


def runtime_of_round(version: tuple[int, ...], *, preview: bool = False) -> Runtime:
    """HugeCTR as of an MLPerf round, e.g. (3, 1).

    Args:
        preview: the code of v2.1 for hardware that was not sold yet.
    """
    if version < (3, 0):
        release = "v2.1 preview" if preview else "v2.0"
    else:
        release = "v3.0" if version < (3, 1) else "v3.1+"
    return load_runtimes()[f"hugectr {release}"]
