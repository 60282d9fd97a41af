"""``shardopt hardware`` shows the profiles, ``shardopt cluster`` writes the file of hosts."""

from __future__ import annotations

from pathlib import Path


def hardware(name: str | None = None, json: bool = False) -> None:
    """List the hardware profiles, or show one with the sources of its constants.

    Arguments:
        name ([NAME]): Profile to show, by name or file; without it all are listed.
    """
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


def cluster(
    *,
    from_nvidia_smi: Path,
    hosts: str = "1",
    hardware: str | None = None,
    output: Path | None = None,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Write a cluster file from what nvidia-smi and the scheduler say.

    Options:
        from_nvidia_smi (FILE): Output of `nvidia-smi topo -m` on one host; lines of `nvidia-smi -L`
            in the same file name the GPU.
        hosts (N|LIST|FILE): Number of hosts, a list such as 'node[01-04,07]', or the scheduler's
            file: a name a line, node[01-04], or with slots=8.
        output (-o FILE): Write the cluster file here instead of printing it.
    """
    from shardopt.cli.output import check_writable, note, print_json
    from shardopt.config.describe import describe, hosts_of, read_host, write_cluster
    from shardopt.files import atomic_write_text

    check_writable(output, [from_nvidia_smi])
    found, notes = describe(read_host(from_nvidia_smi), hosts_of(hosts), hardware)
    text = write_cluster(found)
    if output is not None:
        atomic_write_text(output, text)
        notes.append(f"wrote {output}")
    note(notes, quiet=quiet)
    if json:
        print_json({**found, "notes": notes})
    elif output is None:
        print(text, end="")
