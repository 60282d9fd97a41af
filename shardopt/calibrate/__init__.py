"""Measures a machine into a hardware profile: the only code that times kernels to fit them.

A module a topic declares its families of points (`points.Family`) and fits constants to their rows:
`lookups` (and `gpu_lookups`), `products`, `moves`, `collectives`, `host`. `families` has all of
them in their order; `kernels` runs the points of one rank, `together` those of all ranks. `run`
starts or joins the ranks and keeps the rows in `rows`; `profile` makes a profile of rows, with the
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
