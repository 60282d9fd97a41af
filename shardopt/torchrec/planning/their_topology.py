"""TorchRec's Topology as ours: ranks and caps are taken over, bandwidths are only looked at."""

from __future__ import annotations

from predictor import units
from predictor.errors import InputError
from predictor.hardware.loader import HardwareProfile
from predictor.model.topology import Topology
from shardopt.config.nvlink import nvlink_domain
from shardopt.extras import needs_torchrec

with needs_torchrec():
    from torchrec.distributed.planner import Topology as TorchRecTopology

MOST_GB_S = 100_000.0
"""No memory or link of a GPU comes near it (HBM3e: 8 000); bytes/s taken for bytes/ms go beyond."""


def read_topology(theirs: TorchRecTopology, hardware: HardwareProfile) -> Topology:
    """Ranks and memory caps of TorchRec's topology, as the reservation left them.

    The NVLink domain is the profile's, unless the topology joins hosts into pods.

    Raises:
        InputError: the ranks do not fill their hosts.
    """
    world, local = theirs.world_size, theirs.local_world_size
    group = theirs.intra_group_size
    domain = group if group > local else min(nvlink_domain(hardware, world, local), group)
    return Topology(
        world,
        local,
        tuple(int(device.storage.hbm) for device in theirs.devices),
        tuple(int(device.storage.ddr) for device in theirs.devices),
        domain,
    )


def check_bandwidths(theirs: TorchRecTopology) -> None:
    """Refuse a Topology in bytes/s: TorchRec's bandwidths are bytes/ms.

    Costs never come from the Topology, but who wrote it will plan with it elsewhere, too.

    Raises:
        InputError: a bandwidth is beyond anything that exists.
    """
    comms = theirs.comms_bandwidths
    found = {
        "hbm_mem_bw": theirs.hbm_mem_bw,
        "ddr_mem_bw": theirs.ddr_mem_bw,
        "intra_host_bw": getattr(comms, "intra_host_bw", 0.0),
        "inter_host_bw": getattr(comms, "inter_host_bw", 0.0),
    }
    for name, value in found.items():
        if value > units.gb_per_s(MOST_GB_S):
            raise InputError(
                f"Topology({name}={value:g}) is {value / units.gb_per_s(1):g} GB/s, which no "
                f"hardware has: TorchRec counts bytes per millisecond; for {value / 1e9:g} GB/s "
                f"give {name}={value / 1e3:g}"
            )
