"""The network between hosts by its kind, in place of the one that a profile is sold with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from predictor.errors import InputError, did_you_mean
from predictor.hardware.loader import load_hardware, load_table
from predictor.hardware.schema import HardwareProfile, Inter
from predictor.section import Section, choice, real

MOST_GBPS = 1e6


def list_networks() -> tuple[str, ...]:
    return tuple(load_table("networks"))


@dataclass(frozen=True)
class Network(Section):
    """Kind of the network between hosts, and its rate for each GPU."""

    kind: Annotated[str, choice(list_networks())]
    """The kind of the network."""
    per_gpu_gbps: Annotated[float, real(0, MOST_GBPS, above=True)] | None = None
    """Gbit/s of NIC for each GPU; left out: as such hosts are sold."""

    def __post_init__(self) -> None:
        if self.kind not in list_networks():
            raise InputError(
                f"network '{self.kind}' is unknown{did_you_mean(self.kind, list_networks())}; "
                f"kinds are {', '.join(list_networks())}",
                inputs=("network",),
            )
        rate = self.per_gpu_gbps
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate <= MOST_GBPS):
            raise InputError(
                f"network {self.kind}: per_gpu_gbps is {rate!r}; give Gbit/s of NIC for each GPU, "
                f"above 0 and at most {MOST_GBPS:g}"
            )

    def joins(self, hardware: HardwareProfile) -> HardwareProfile:
        """Return the profile with this network between its hosts."""
        if hardware.inline:
            raise InputError(
                f"network {self.kind} joins GPUs, and hardware {hardware.name} is of CPU ranks; "
                "leave it out",
                inputs=("network", "cluster"),
            )
        entry = load_table("networks")[self.kind]
        usual = entry["per_gpu_gbps"]
        about = {
            key: entry[key]
            for key in ("rel_error", "small_rel_error", "provenance")
            if key in entry
        }
        # these are constants of the hosts, not of the network
        for key in ("tree_cost", "message_us"):
            about[key] = getattr(hardware.collectives.inter, key)
        own = entry.get("inter", {})
        if "curves" in entry:
            curves = load_hardware(entry["curves"]).collectives.inter.at(usual)
            own = curves.model_dump() | own
        inter = Inter(**own | about | {"nic_gbit_s": usual})
        rate = self.per_gpu_gbps or usual
        inter = inter.at(rate / entry.get("slower", 1.0)).model_copy(update={"nic_gbit_s": rate})
        links = hardware.collectives.model_copy(update={"inter": inter})
        return hardware.model_copy(update={"collectives": links})
