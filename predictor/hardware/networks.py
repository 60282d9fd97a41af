"""The network between hosts by its kind, in place of the one that a profile is sold with."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware, load_table
from predictor.hardware.schema import HardwareProfile, Inter


@dataclass(frozen=True)
class Network:
    """A kind of network, and its rate.

    Args:
        kind: one of `list_networks`.
        per_gpu_gbps: Gbit/s of NIC for each GPU; None: as such hosts are sold.
    """

    kind: str
    per_gpu_gbps: float | None = None

    def joins(self, hardware: HardwareProfile) -> HardwareProfile:
        """The profile in hosts that this network joins."""
        if hardware.inline:
            raise InputError(
                f"network {self.kind} joins GPUs, and hardware {hardware.name} is of CPU ranks; "
                "leave it out",
                inputs=("cluster",),
            )
        found = load_table("networks")[self.kind]
        usual = found["per_gpu_gbps"]
        about = {
            key: found[key]
            for key in ("rel_error", "small_rel_error", "provenance")
            if key in found
        }
        about["tree_cost"] = hardware.collectives.inter.tree_cost
        own = found.get("inter", {})
        if "curves" in found:
            curves = load_hardware(found["curves"]).collectives.inter.at(usual)
            own = curves.model_dump() | own
        inter = Inter(**own | about | {"nic_gbit_s": usual})
        rate = self.per_gpu_gbps or usual
        inter = inter.at(rate / found.get("slower", 1.0)).model_copy(update={"nic_gbit_s": rate})
        links = hardware.collectives.model_copy(update={"inter": inter})
        return hardware.model_copy(update={"collectives": links})


def list_networks() -> tuple[str, ...]:
    return tuple(load_table("networks"))
