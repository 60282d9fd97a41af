"""Measures a machine into a hardware profile: the only code that times kernels to fit them.

Each family of ops has a module with its points, their measurement, and the fit of constants to
rows: `lookups` (and `gpu_lookups`), `products`, `moves`, `collectives`, `host`. `run` measures the
points of `families` and keeps the rows in `rows`; `profile` makes a profile of rows, with the
common code of `fitting`. Imports `measure` and `ranks`.
"""

from __future__ import annotations

from enum import StrEnum


class Group(StrEnum):
    """Group of constants that can be calibrated by itself."""

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
