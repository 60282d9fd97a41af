"""Collectives: every public row predicted with the shipped profile of its GPU.

Nothing is fitted for a table at hand. Rows that gave the profile a constant are a part of their
own, and so is the form of the curve, fitted to every second size (`links.form`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lab.validate.intervals import kernel_interval
from lab.validate.links.form import form_of_the_curve
from lab.validate.links.rows import LINK_FILES, LinkRow, Wiring, read_links
from lab.validate.links.sources import gave_constants
from lab.validate.report import ComparedRow, Report, data_folder, noise_of
from predictor.cost.collectives import Collectives
from predictor.cost.errors import resource_groups
from predictor.hardware.loader import load_hardware
from predictor.model.topology import Topology
from predictor.units import mib, us

WITHIN_LARGE = "within a domain, from 16 MiB"
WITHIN_MEDIUM = "within a domain, 1 to 16 MiB"
WITHIN_SMALL = "within a domain, below 1 MiB"
WITHIN_TIMER = "within a domain, below 1 MiB, with a program around it"
ACROSS_LARGE = "across hosts, from 8 MiB"
ACROSS_SMALL = "across hosts, below 8 MiB"
BAD_NETWORK = "across hosts, network said to be poorly configured"
UNSTATED = "across hosts, line rate of the network not stated"
PAIRED = "cards with NVLink bridges in pairs, which no shipped profile is of"
GAVE = "gave constants"
HELD_OUT = (WITHIN_MEDIUM, WITHIN_SMALL, ACROSS_LARGE, ACROSS_SMALL)
NOTES = (
    "predicted with the shipped profile of each GPU; the line rate of a NIC is the table's where "
    "it states one",
    "below 1 MiB nccl-tests is believed: XLA's timer has a program around the collective, two to "
    "five times its time; its all-reduce counts a copy of the buffer, which is predicted too",
)


def validate_collectives(folder: Path) -> Report:
    """Predict every row of the tables in ``folder``.

    Raises:
        InputError: the folder is not there or holds none of the tables.
    """
    measured, problems = read_links(data_folder(folder, LINK_FILES))
    rows = [_compared(row) for row in measured]
    form = form_of_the_curve(folder)
    skipped = dict.fromkeys((*problems, *form.skipped))
    large = [r for r in rows if r.part in (WITHIN_LARGE, ACROSS_LARGE)]
    return Report(
        "collectives",
        (*rows, *form.rows),
        WITHIN_LARGE,
        tuple(skipped),
        (*NOTES, *form.notes),
        dict(_by_gpu(large)),
        HELD_OUT,
        noise={name: noise_of(pairs) for name, pairs in _repeats(measured)},
    )


def predicted_ms(row: LinkRow) -> float:
    """Time of a row's collective under the shipped profile of its GPU, and of the copy that its
    timer counts too."""
    engine = _collectives(row.wiring)
    copied = 2 * row.copied_bytes / engine.hardware.streaming
    return float(getattr(engine, row.op)(row.size_bytes)) + copied


@cache
def _collectives(wiring: Wiring) -> Collectives:
    hardware = load_hardware(wiring.profile)
    if wiring.nic_gbit_s is not None:
        hardware = hardware.with_nic(wiring.nic_gbit_s)
    topology = Topology.uniform(
        wiring.ranks,
        wiring.ranks // wiring.hosts if wiring.ranks % wiring.hosts == 0 else wiring.ranks,
        hbm_bytes=hardware.hbm_bytes,
        ddr_bytes=hardware.ddr_bytes,
        nvlink_domain=wiring.domain,
    )
    return Collectives(hardware, topology)


def _compared(row: LinkRow) -> ComparedRow:
    wiring, time = row.wiring, predicted_ms(row)
    engine = _collectives(wiring)
    groups = resource_groups("collectives", engine.topology)
    return ComparedRow(
        {
            "profile": wiring.profile,
            "hosts": wiring.hosts,
            "file": row.file,
            **row.cells,
            "collective": row.op,
            "ranks": wiring.ranks,
            "size_bytes": int(row.size_bytes),
        },
        us(row.time_us),
        time,
        family=f"{wiring.profile} {row.op}",
        part=_part(row),
        source=row.cells.get("source", row.file),
        interval_ms=kernel_interval(engine.hardware, groups, time, row.size_bytes),
    )


def _part(row: LinkRow) -> str:
    wiring, size = row.wiring, row.size_bytes
    if gave_constants(row):
        return GAVE
    if wiring.across:
        if "poorly configured" in row.note:
            return BAD_NETWORK
        if not wiring.rate_known:
            return UNSTATED
        return ACROSS_LARGE if size >= mib(8) else ACROSS_SMALL
    if wiring.pairs:
        return PAIRED
    if size < mib(1):
        return WITHIN_TIMER if row.timer_of_a_program else WITHIN_SMALL
    return WITHIN_LARGE if size >= mib(16) else WITHIN_MEDIUM


def _by_gpu(rows: list[ComparedRow]) -> Iterator[tuple[str, list[ComparedRow]]]:
    for part in (WITHIN_LARGE, ACROSS_LARGE):
        for profile in dict.fromkeys(str(r.name["profile"]) for r in rows if r.part == part):
            of = [r for r in rows if r.part == part and r.name["profile"] == profile]
            yield f"{profile} {part}", of


def _repeats(rows: list[LinkRow]) -> Iterator[tuple[str, list[tuple[object, float]]]]:
    for name, low, high in (
        ("repeats from 16 MiB", mib(16), float("inf")),
        ("repeats of 1 to 16 MiB", mib(1), mib(16)),
        ("repeats below 1 MiB", 0, mib(1)),
    ):
        yield name, [(r.key, r.time_us) for r in rows if low <= r.size_bytes < high]
