"""From rows to the file of a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.design.phases import Group
from shardopt.calibrate.profile.builder import Builder, CalibratedProfile, Wiring
from shardopt.calibrate.profile.cpu import CpuBuilder
from shardopt.calibrate.profile.cuda import CudaBuilder
from shardopt.calibrate.rows import Measurement, Origin

__all__ = ["CalibratedProfile", "build_profile", "profile_text"]


def build_profile(
    rows: Sequence[Measurement],
    origin: Origin,
    base: HardwareProfile,
    name: str,
    ranks: int,
    memory_gib: float,
    link_gbit_s: float | None = None,
    hosts: int = 1,
    only: Group | None = None,
) -> CalibratedProfile:
    """The profile that the rows give.

    Args:
        base: whose constants stay where nothing was measured; says whether ranks are CPUs or GPUs.
        memory_gib: main memory of the whole machine; its ranks share it.
        link_gbit_s: of the link between hosts of one rank, whose rows are fitted; None: those of
            ranks within the machine.
        hosts: that the ranks lie on.
        only: the one group whose rows are fitted, whatever others there are; None: all.

    Raises:
        InputError: there are too few rows of every family.
    """
    wiring = Wiring(ranks, hosts, link_gbit_s)
    kind = CpuBuilder if base.inline else CudaBuilder
    used = [row for row in rows if only is None or row.point.family in only.families]
    builder: Builder = kind(used, origin, base, wiring)
    builder.build()
    if not builder.made.errors:
        raise InputError(f"{len(used)} rows are too few to fit anything; measure more points")
    builder.judge()
    local = wiring.local
    over = "" if link_gbit_s is None else f" on hosts joined by {link_gbit_s:g} Gbit/s"
    over = f" on {hosts} hosts" if hosts > 1 else over
    shape: dict[str, Any] = {
        "name": name,
        "title": f"{origin.machine}, {ranks} ranks{over}, measured by shardopt calibrate",
        "known_error": (),  # of whole iterations that the base predicted
    }
    if only is not None:
        found = builder.made.profile.groups
        builder.made.groups |= {name for name in found if found[name] != base.groups[name]}
    if base.inline:
        shape |= {"runtime": rows[0].runtime.value}
        share = round(memory_gib / local, 2) if hosts > 1 else round(memory_gib / ranks, 2)
        shape |= {"gpus_per_host": local, "nvlink_domain": local}
        shape |= {"hbm_gib": share, "ddr_gib": share}
    builder.update(**shape)
    return builder.made


def profile_text(found: CalibratedProfile, base: str | None = None) -> str:
    """The profile as YAML, figures to five digits.

    Args:
        base: name of the profile that has the groups which were not measured; None writes them all.
    """
    data = found.profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    if base is not None:
        data = _over_base(data, base, found.groups)
    head = "# Written by shardopt calibrate; keys carry their unit.\n"
    text = yaml.safe_dump(_rounded(data), sort_keys=False, allow_unicode=True, width=98)
    return head + text


def _over_base(data: dict[str, Any], base: str, groups: set[str]) -> dict[str, Any]:
    """What the file says over its base: the device, and the groups that were measured."""
    kept = {"schema": data["schema"], "base": base}
    shape = ("hbm_gib", "ddr_gib", "gpus_per_host", "nvlink_domain", "runtime", "sms", "verdict")
    kept |= {key: data[key] for key in ("name", "title", *shape) if key in data}
    kept |= {key: value for key, value in data.items() if key in groups}
    links = {
        key: value for key, value in data["collectives"].items() if f"collectives.{key}" in groups
    }
    return kept | ({"collectives": links} if links else {})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
