"""``shardopt hardware``: the hardware profiles and where their constants come from."""

from __future__ import annotations

from typing import Annotated

import typer

from shardopt.cli import options

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Profile to show, by name or file; without it all are listed.",
        show_default=False,
    ),
]


def hardware(name: Name = None, json: options.Json = False) -> None:
    """List the hardware profiles, or show one with the sources of its constants."""
    from predictor.hardware.loader import DEFAULT_HARDWARE, list_hardware, load_hardware
    from shardopt.cli.output import print_json
    from shardopt.report.console import make_console
    from shardopt.report.hardware import hardware_object, show_list, show_profile

    if name is not None:
        profile = load_hardware(name)
        if json:
            print_json(hardware_object(profile))
        else:
            show_profile(make_console(), profile)
        return
    profiles = [load_hardware(shipped) for shipped in list_hardware()]
    if json:
        found = {profile.name: hardware_object(profile) for profile in profiles}
        print_json({"default": DEFAULT_HARDWARE, "profiles": found})
    else:
        show_list(make_console(), profiles)
