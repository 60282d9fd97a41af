"""Sharding tasks drawn at random: a model, and plans of it that are run side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lab.architecture import Architecture
from lab.tasks.models import draw_model
from lab.tasks.plans import task_plans
from lab.tasks.task_set import task_name
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload

PROFILE = "cpu-gloo"
"""Whose predictions choose the plans of a task."""


@dataclass(frozen=True)
class Task:
    """A model and the plans of it that are run side by side.

    Args:
        workload: as its model file reads, with the digest of that.
        plans: name -> plan; the first is what others are compared with.
        architecture: of the model beside its tables; None: the DLRM that the workload describes.
        windows: the same model with other data, which plans are run in too.
    """

    seed: int
    name: str
    workload: Workload
    plans: Mapping[str, ShardingPlan]
    architecture: Architecture | None = None
    windows: tuple[Workload, ...] = ()


def draw_task(seed: int, ranks: Topology, models: str) -> Task:
    """The model of a seed, which is the same on any machine, with a dozen plans of every structure.

    Args:
        seed: at least 0.
        ranks: the plans of a seed depend on how many there are on each host, its model does not.
        models: one of `lab.tasks.models.COUNTED`.

    Raises:
        InputError: a number is out of range.
    """
    hardware = load_hardware(PROFILE)
    topology = task_topology(hardware, ranks.world_size, ranks.local_world_size)
    workload = draw_model(models, seed)
    return Task(seed, task_name(seed), workload, task_plans(seed, workload, topology, hardware))


def task_topology(hardware: HardwareProfile, world_size: int, local_world_size: int) -> Topology:
    """The ranks of tasks, with the memory that the profile says."""
    return Topology.uniform(
        world_size,
        local_world_size,
        hbm_bytes=hardware.hbm_bytes,
        ddr_bytes=hardware.ddr_bytes,
        nvlink_domain=math.gcd(hardware.nvlink_domain, local_world_size),
    )
