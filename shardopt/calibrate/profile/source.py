"""On which machine, and in which runtime, a profile was measured."""

from __future__ import annotations

import re

from predictor.hardware.schema import HardwareProfile

_SAID = "shardopt calibrate on {machine}; "
_FOUND = re.compile(re.escape(_SAID).replace(re.escape("{machine}"), "(.+?)"))


def source_on(machine: str) -> str:
    """How the source of a measured group begins."""
    return _SAID.format(machine=machine)


def measured_on(profile: HardwareProfile) -> tuple[str, ...]:
    """Machines that measured a profile's groups, sorted; none where nothing says so."""
    found = (_FOUND.match(group.provenance.source) for group in profile.groups.values())
    return tuple(sorted({match.group(1) for match in found if match}))


def other_machine_note(profile: HardwareProfile, machine: str) -> str | None:
    """What there is to say where a profile was measured on another machine than this one."""
    others = [other for other in measured_on(profile) if other != machine]
    if not others:
        return None
    return (
        f"hardware {profile.name} was measured on {'; '.join(others)}, and this is {machine}: "
        "predicted and measured times will differ by what the machines do; "
        "measure this one with shardopt calibrate"
    )


def other_runtime_note(profile: HardwareProfile, runtime: str) -> str | None:
    """What there is to say where a profile was measured in another runtime than ``runtime``."""
    if profile.runtime in (None, runtime):
        return None
    return (
        f"hardware {profile.name} was measured in the {profile.runtime} runtime, and these ranks "
        f"run in the {runtime} one: collectives and host code take other times; calibrate in the "
        f"{runtime} runtime"
    )
