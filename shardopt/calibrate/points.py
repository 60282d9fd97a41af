"""Points of a calibration: few, placed by a Sobol sequence over the range of real models.

The points of a quick calibration are the first ones of the full design, so that it can be extended.
Every fifth point is a test point: it is measured like the others and never fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from predictor.model.workload import Workload
from shardopt.calibrate import Group
from shardopt.ranks.hosts import Link
from shardopt.ranks.realtime import Runtime

TEST_EVERY = 5
REFERENCE_KERNELS = ("lookup_forward", "lookup_backward", "gemm", "all_to_all")
TOGETHER = ("reference", "collective", "iteration")
"""Families that need all ranks."""
Kind = TypeVar("Kind")
Coordinates = NDArray[np.float64]
"""Coordinates of a point in the unit cube."""


@dataclass(frozen=True)
class Size:
    """Extent of a calibration: points a family, and seconds a point (kernels) or rounds.

    Args:
        ops: points for each op around the lookups and the GEMMs.
        variants: lookups measured with each further optimizer.
        reference_calls: of the reference kernels, each time.
    """

    lookups: int
    gemms: int
    elementwise_octaves: tuple[int, int]
    collective_octaves: tuple[int, int]
    seconds: float
    rounds: int
    ops: int
    variants: int
    iteration_rounds: int
    reference_calls: int


QUICK = Size(112, 64, (12, 25), (8, 24), 0.5, 40, 10, 3, 30, 3)
FULL = Size(320, 128, (12, 27), (8, 26), 1.2, 60, 20, 6, 100, 6)
BRIEF = replace(QUICK, iteration_rounds=10)
"""Size for the host alone: ten rounds of each near-empty iteration, well under a minute."""
TINY = Size(8, 8, (14, 17), (10, 15), 0.02, 3, 2, 1, 1, 1)
"""Size for tests of the machinery: it takes seconds, and its constants mean nothing."""


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration.

    Args:
        rows: file of rows; points that it already holds are not measured again.
        link: emulated link of the collectives, each rank a host; None: within this machine.
        model: its tables are looked up too.
        hosts: number of hosts.
        runtime: of the ranks.
        only: the one group to measure; None: all.
        minutes: time after which no point is begun; None: no limit.
    """

    backend: str
    ranks: int
    size: Size
    rows: Path
    link: Link | None = None
    model: Workload | None = None
    hosts: int = 1
    runtime: Runtime = Runtime.PLAIN
    only: Group | None = None
    minutes: float | None = None

    @property
    def link_gbit_s(self) -> float | None:
        """Bandwidth of the link in Gbit/s, as in the params of points."""
        return None if self.link is None else self.link.gbit_s


@dataclass(frozen=True)
class Device:
    """Limits of the points of a GPU: bytes of its memory, and of its host's."""

    memory_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Point:
    """One configuration to measure.

    Args:
        family: such as lookup; determines the measurement and the parts of a point.
        params: identify the point within its family; JSON types only.
        test: held out of every fit.
    """

    family: str
    params: dict[str, Any]
    test: bool = False


@dataclass(frozen=True)
class Family:
    """Declaration of a family of points that one rank measures; `kernels` runs them.

    Args:
        groups: groups of constants that need its rows.
        cpu: points of a core.
        gpu: points of a GPU, within its memory.
    """

    name: str
    groups: tuple[Group, ...] = ()
    cpu: Callable[[Size], list[Point]] = lambda size: []
    gpu: Callable[[Size, Device], list[Point]] = lambda size, device: []


def sobol(count: int, dims: int) -> Coordinates:
    """Return the first points of a Sobol sequence in [0, 1), ``[count, dims]``; deterministic."""
    from scipy.stats import qmc

    # the sequence starts in the corner of the range, the least informative point
    exponent = int(np.ceil(np.log2(count + 1)))
    sequence = qmc.Sobol(dims, scramble=False).random_base2(exponent)
    return np.asarray(sequence)[1 : count + 1]


def sobol_points(
    family: str, count: int, dims: int, params: Callable[[Coordinates, int], dict[str, Any]]
) -> list[Point]:
    """Return points of a family; ``params`` maps coordinates and index to the params of a point."""
    return [Point(family, params(u, i), is_test(i)) for i, u in enumerate(sobol(count, dims))]


def is_test(index: int) -> bool:
    """Return True if the point with this index is held out."""
    return index % TEST_EVERY == TEST_EVERY - 1


def logarithmic(u: float, span: tuple[float, float]) -> float:
    """Map ``u`` in [0, 1) onto a logarithmic range."""
    low, high = span
    return float(low * (high / low) ** float(u))


def whole(u: float, span: tuple[float, float]) -> int:
    """Map ``u`` in [0, 1) onto a logarithmic range of whole numbers."""
    return round(logarithmic(u, span))


def choice(kinds: Sequence[Kind], u: float) -> Kind:
    """Choose by the point's own coordinate; the bits of its index belong to other coordinates."""
    return kinds[int(u * len(kinds))]
