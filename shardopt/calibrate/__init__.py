"""Measures a machine into a hardware profile: the only code that times kernels to fit them.

Each family of ops has a module with its points, how one is run, and how rows become constants:
`lookups` (and `gpu_lookups`), `products`, `moves`, `collectives`, `host`. `run` measures what
`families` lists and keeps it in `rows`; `profile` makes a profile of rows, with what `fitting` has
for all families. Imports `measure` and `ranks`.
"""

from __future__ import annotations

from enum import StrEnum


class Group(StrEnum):
    """What can be calibrated by itself."""

    HOST = "host"
    EMBEDDING = "embedding"
    GEMM = "gemm"
    COLLECTIVES = "collectives"


FAMILIES = {
    Group.HOST: ("host", "iteration"),
    Group.EMBEDDING: ("clock", "lookup", "lookup_cached", "lookup_dense", "model_lookup"),
    Group.GEMM: ("clock", "gemm"),
    Group.COLLECTIVES: ("collective",),
}
"""Families of the rows that the constants of a group are fitted on."""
