"""One profile for a job on GPUs of several generations: the slowest decides.

An iteration is full of exchanges in which every rank waits for every other one. The kernels are
those of the device with the least memory bandwidth, as most of them are bound by it; links and host
are the slowest of all, each for itself. It is an upper bound: a plan could give faster devices more
work, and here it has no reason to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.cost.collectives import latency_ms, transfer_ms
from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile, LinkCurves
from predictor.units import MIB

_MESSAGE, _RANKS = 16 * MIB, 8
"""Bytes and ranks of the all-to-all by which links are compared."""


def slowest(profiles: Sequence[HardwareProfile]) -> HardwareProfile:
    """Return the profile that stands for a job on devices of several profiles, at least one."""
    distinct: list[HardwareProfile] = []
    for profile in profiles:
        if profile not in distinct:  # by content: two files may have one name
            distinct.append(profile)
    if len(distinct) == 1:
        return distinct[0]
    if len({profile.device for profile in distinct}) > 1:
        names = ", ".join(profile.name for profile in distinct)
        raise InputError(
            f"hosts have hardware {names}: CPUs and GPUs cannot share a job; name one kind"
        )
    kernels = min(distinct, key=lambda p: p.memory.hbm_gb_s)
    host = max(distinct, key=lambda p: p.overheads.op_us)
    intra = max(distinct, key=lambda p: _exchange_ms(p.collectives.intra))
    inter = max(distinct, key=lambda p: _exchange_ms(p.collectives.inter))
    links = kernels.collectives.model_copy(
        update={"intra": intra.collectives.intra, "inter": inter.collectives.inter}
    )
    update = {
        "name": " + ".join(profile.name for profile in distinct),
        "overheads": host.overheads,
        "collectives": links,
        "known_error": (),
    }
    origins = kernels.origins | {
        "overheads": host.origins["overheads"],
        "collectives.intra": intra.origins["collectives.intra"],
        "collectives.inter": inter.origins["collectives.inter"],
    }
    return kernels.model_copy(update=update).with_origins(origins)


def _exchange_ms(link: LinkCurves) -> float:
    curve = link.all_to_all
    transfer = transfer_ms(curve, np.asarray(float(_MESSAGE)), _RANKS)
    return latency_ms(curve, _RANKS) + float(transfer)
