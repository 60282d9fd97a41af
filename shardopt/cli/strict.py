"""Whether a prediction leaves the ranges that the profile's constants were fitted in."""

from __future__ import annotations

from collections.abc import Iterator

from predictor.errors import RangeError
from predictor.hardware import HardwareProfile
from predictor.topology import Topology


def outside(hardware: HardwareProfile, topology: Topology) -> list[str]:
    """A line for every group of collectives that is asked for ranks it was not fitted for."""
    found = []
    for name, ranks in _collective_ranks(topology):
        low, high = hardware.groups[name].provenance.range.get("ranks", (1.0, float("inf")))
        if not low <= ranks <= high:
            found.append(
                f"{name} of {hardware.name} is fitted for {low:g} to {high:g} ranks; "
                f"{ranks} are extrapolated"
            )
    return found


def _collective_ranks(topology: Topology) -> Iterator[tuple[str, int]]:
    """Group of the profile -> ranks that its collectives join."""
    joined = min(topology.nvlink_domain, topology.world_size)
    if joined > 1:
        yield "collectives.intra", joined
    if topology.groups > 1:
        yield "collectives.inter", topology.world_size


def refuse_outside(hardware: HardwareProfile, topology: Topology) -> None:
    """What ``--strict`` does.

    Raises:
        RangeError: some cost is asked outside its range; says which and what to do.
    """
    found = outside(hardware, topology)
    if found:
        raise RangeError(
            "; ".join(found) + " (refused by --strict); plan for fewer ranks, use a profile "
            "that covers them, or leave --strict out"
        )
