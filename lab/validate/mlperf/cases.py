"""From a submission to what the predictor takes: model, machine, plan and runtime."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lab.runtimes.hugectr.builder import HugeCtrBuilder
from lab.runtimes.hugectr.runtime import Runtime, runtime_of_round
from lab.validate.mlperf.systems import DCNV2, Matrix, Planner, System
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Feature, Table, Workload

DIM = 128
ZIPF_ALPHA = 1.1
"""Of the Criteo ids; configs/models/dlrm_dcnv2_criteo1tb.yaml says where it comes from."""
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
_FORM = r"(?P<form>pcie|sxm|nvl)?"
_PATTERN = re.compile(
    r"(?P<chip>gb300|gb200|b300|b200|h200|h100|a100|v100|a30|a40|l40s|l40|l4)[^a-z0-9]*" + _FORM,
    re.IGNORECASE,
)
PROFILES = {
    ("a100", "pcie"): "a100-pcie-80gb",
    ("a100", ""): "a100-80gb",
    ("h100", "pcie"): "h100-pcie",
    ("h100", ""): "h100-sxm",
    ("h200", "nvl"): "h200-nvl",
    ("h200", ""): "h200-sxm",
    ("v100", ""): "v100-32gb",
}
"""(chip, form) -> profile; other chips have a profile of their own name."""


def profile_of(accelerator: str) -> str | None:
    """Name of the profile for an accelerator as submissions write it; None if there is none."""
    found = _PATTERN.search(accelerator)
    if found is None:
        return None
    chip, form = found["chip"].lower(), (found["form"] or "").lower()
    if (chip, form) == ("a100", "sxm") and "40gb" in accelerator.lower():
        return "a100-40gb"
    name = PROFILES.get((chip, form)) or PROFILES.get((chip, "")) or chip
    return name if name in list_hardware() else None


def family_of(system: System) -> str:
    """Accelerators that share a profile, and how many of them."""
    return f"{profile_of(system.accelerator) or system.accelerator} {system.benchmark}"


@dataclass(frozen=True)
class Case:
    """One submission, ready to be predicted."""

    system: System
    workload: Workload
    topology: Topology
    hardware: HardwareProfile
    plan: ShardingPlan
    runtime: Runtime

    def builder(self) -> HugeCtrBuilder:
        """The graph builder of its iteration."""
        return HugeCtrBuilder(
            self.workload,
            self.topology,
            self.hardware,
            self.plan,
            self.runtime,
            self.system.switches,
        )


def case_of(system: System, planner: Planner, matrix: Matrix | None = None) -> Case | str:
    """A submission as a case, or why it cannot be one.

    Args:
        matrix: a plan to use in place of the submission's own.
    """
    where = f"{system.round} {system.org} {system.system}"
    name = profile_of(system.accelerator)
    if name is None:
        return f"{where}: no profile describes {system.accelerator}"
    hardware = load_hardware(name)
    workload = _dcnv2(system, planner) if system.benchmark == DCNV2 else _dlrm(system, planner)
    names = [table.name for table in workload.tables]
    if system.benchmark == DCNV2:
        matrix = matrix or planner.matrix(system)
        if matrix is None:
            return f"{where}: no plan for {system.nodes} hosts of {system.gpus_per_node} GPUs"
        plan = matrix.plan(names, planner.rows, DIM)
    else:
        plan = _hybrid(system, names, planner.rows)
    runtime = runtime_of_round(system.software, preview="preview" in system.system)
    return Case(system, workload, _topology(system, hardware), hardware, plan, runtime)


def _topology(system: System, hardware: HardwareProfile) -> Topology:
    """NVLink spans hosts only where a rack is sold so."""
    local = system.gpus_per_node
    if hardware.nvlink_domain > hardware.gpus_per_host:
        hosts = max(1, min(hardware.nvlink_domain // local, system.nodes))
        # domains are equal and made of whole hosts
        while system.nodes % hosts:
            hosts -= 1
        domain = hosts * local
    else:
        domain = math.gcd(hardware.nvlink_domain, local)
    return Topology.uniform(
        system.gpus,
        system.gpus_per_node,
        hbm_bytes=hardware.hbm_bytes,
        ddr_bytes=hardware.ddr_bytes,
        nvlink_domain=domain,
    )


def _tables(rows: tuple[int, ...], hot: tuple[int, ...], optimizer: str) -> tuple[Table, ...]:
    return tuple(
        Table(
            f"t_cat_{i}",
            size,
            DIM,
            (Feature(f"cat_{i}", float(h), distribution=Zipf(ZIPF_ALPHA, (h - 1) / 2)),),
            optimizer=optimizer,
        )
        for i, (size, h) in enumerate(zip(rows, hot, strict=True))
    )


def _dcnv2(system: System, planner: Planner) -> Workload:
    tables = _tables(planner.rows, planner.multi_hot, "exact_adagrad")
    dense = DenseArch(13, BOTTOM, TOP, DcnV2(3, 512), "fp16", "adagrad")
    return Workload(DCNV2, _local(system), tables, dense)


def _dlrm(system: System, planner: Planner) -> Workload:
    tables = _tables(planner.rows, (1,) * len(planner.rows), "exact_sgd")
    dense = DenseArch(13, BOTTOM, TOP, "dot", "fp16", "sgd")
    return Workload(system.benchmark, _local(system), tables, dense)


def _local(system: System) -> int:
    return max(1, round(system.global_batch / system.gpus))


def _hybrid(system: System, names: list[str], rows: tuple[int, ...]) -> ShardingPlan:
    """Every table somewhere: the hybrid runtime spreads the rows over the ranks itself."""
    tables = {}
    for index, (name, size) in enumerate(zip(names, rows, strict=True)):
        shards = (Shard(index % system.gpus, (0, 0), (size, DIM)),)
        tables[name] = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, shards)
    return ShardingPlan(tables, system.gpus, system.gpus_per_node)
