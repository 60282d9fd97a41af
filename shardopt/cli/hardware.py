"""``shardopt hardware`` shows profiles, ``shardopt cluster`` writes a cluster file."""

from __future__ import annotations

from pathlib import Path

from shardopt.report.blocks import Line, View


def hardware(name: str | None = None) -> View:
    """List the hardware profiles, or show one with the sources of its constants.

    Arguments:
        name ([NAME]): Profile to show, by name or file; without a name, all are listed.
    """
    from predictor.hardware.loader import list_hardware, load_hardware
    from shardopt.report.hardware import list_view, profile_view

    if name is not None:
        return profile_view(load_hardware(name))
    return list_view([load_hardware(shipped) for shipped in list_hardware()])


def cluster(
    *,
    from_nvidia_smi: Path,
    hosts: str = "1",
    hardware: str | None = None,
    output: Path | None = None,
) -> View:
    """Write a cluster file from the output of nvidia-smi and the scheduler's list of hosts.

    Options:
        from_nvidia_smi (FILE): Output of `nvidia-smi topo -m` on one host; lines of `nvidia-smi -L`
            in the same file name the GPU.
        hosts (N|LIST|FILE): Number of hosts, a list such as 'node[01-04,07]', or the scheduler's
            file: one name or list per line, with or without slots=8.
        output (-o FILE): Write the cluster file here instead of printing it.
    """
    import yaml

    from shardopt.cli.output import check_writable
    from shardopt.config.describe import describe, hosts_of, read_host
    from shardopt.files import atomic_write_text

    check_writable(output, [from_nvidia_smi])
    described, notes = describe(read_host(from_nvidia_smi), hosts_of(hosts), hardware)
    text = yaml.safe_dump(described, sort_keys=False)
    if output is not None:
        atomic_write_text(output, text)
        notes.append(f"wrote {output}")
    lines = [] if output is not None else [Line(line, wraps=False) for line in text.splitlines()]
    return View({**described, "notes": notes}, lines, notes=notes)
