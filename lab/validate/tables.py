"""Reading and prediction of public tables of measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from lab.suites import COLUMNS, ComparedRow
from predictor.cost.errors import Z_90, error_size
from predictor.csv_rows import ParsedRows, Row, read_table
from predictor.errors import ShardoptError, did_you_mean
from predictor.hardware.device_names import PROFILES, profile_of_device
from predictor.hardware.loader import DEFAULT_HARDWARE, load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.critical_path import critical_path
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import simulate
from predictor.model.topology import Topology
from predictor.predict import iteration_interval

T = TypeVar("T")

SMALL_BYTES = 2**20
"""Message size below which latency dominates."""


def read(folder: Path, name: str, parse: Callable[[Row], T]) -> ParsedRows[T]:
    """Read every row of a public table; none where the file is missing.

    Args:
        parse: parses a row; its ValueError or ShardoptError is the reason for leaving it out.

    Raises:
        InputError: the file cannot be read, or lacks a column.
    """

    def parsed(row: Row) -> T:
        try:
            return parse(row)
        except ShardoptError as error:
            raise ValueError(str(error)) from error

    path = folder / name
    return read_table(path, COLUMNS[name], parsed) if path.exists() else ParsedRows()


def compare_tables(
    folder: Path, tables: Mapping[str, Callable[[Row], ComparedRow]]
) -> tuple[list[ComparedRow], list[str]]:
    """Predict every row of some tables; also return ``file:line: why`` for those left out.

    Args:
        tables: file -> function that predicts one of its rows.

    Raises:
        InputError: a file cannot be read.
    """
    parsed = [read(folder, name, build) for name, build in tables.items()]
    rows = [row for table in parsed for row in table.rows]
    return rows, merged_lines([text for table in parsed for text in table.problems])


def merged_lines(problems: Sequence[str]) -> list[str]:
    """Merge problems ``file:line: why`` of consecutive lines with one reason into
    ``file:first-last: why``."""
    merged: list[tuple[str, int, int, str]] = []
    for text in problems:
        name, line, why = text.split(":", 2)
        file, first, last, same = merged[-1] if merged else ("", 0, 0, "")
        if (file, last + 1, same) == (name, int(line), why):
            merged[-1] = (file, first, last + 1, why)
        else:
            merged.append((name, int(line), int(line), why))
    return [
        f"{file}:{first}{f'-{last}' if last > first else ''}:{why}"
        for file, first, last, why in merged
    ]


def known(row: Row, column: str, values: Mapping[str, T]) -> T:
    """Look up the value of a column's word; a question mark after it marks an inferred word.

    Raises:
        ValueError: the word is not among the known ones.
    """
    text = row[column].strip().rstrip("?")
    if text not in values:
        words = ", ".join(filter(None, values))
        hint = did_you_mean(text, list(values))
        raise ValueError(f"{column} is '{row[column]}'{hint}; known are {words}")
    return values[text]


def profile_of_row(row: Row, column: str = "gpu") -> HardwareProfile:
    """Return the profile of the device that a column names.

    Raises:
        ValueError: no profile describes it.
    """
    name = profile_of_device(row[column])
    if name is None:
        raise ValueError(no_profile(row[column], column))
    return load_hardware(name)


def no_profile(name: str, column: str) -> str:
    """Explain why rows of a device are left out, with the nearest profile by name."""
    shipped = {profile: profile for _, profile in PROFILES}
    shipped |= {words[0].lower(): profile for words, profile in reversed(PROFILES)}
    words = name.lower().replace("-", " ").split()
    near = [shipped[hit] for word in words for hit in get_close_matches(word, shipped, 1, 0.65)]
    problem = (
        f"{column} is '{name}', which no profile describes" if name else f"{column} is not given"
    )
    return (
        f"{problem}; the nearest is {near[0] if near else DEFAULT_HARDWARE}: name it as `base:` of "
        "a file with the groups that differ (CONTRIBUTING.md)"
    )


def ranks_of(
    hardware: HardwareProfile, ranks: int, local: int | None = None, domain: int = 0
) -> Topology:
    """Return ranks with the memory of a profile.

    Args:
        local: ranks of a host; the profile's GPUs of a host unless given.
        domain: ranks joined by NVLink, where they differ from those of a host.
    """
    return Topology.uniform(
        ranks,
        local or min(ranks, hardware.gpus_per_host),
        hbm_bytes=hardware.hbm_bytes,
        ddr_bytes=hardware.ddr_bytes,
        nvlink_domain=domain,
    )


def joined_ranks(hardware: HardwareProfile, hosts: int, local: int) -> int:
    """Return the ranks of an NVLink domain: part of a host, or whole hosts of a rack."""
    most = hardware.nvlink_domain
    if local >= most:
        return max(n for n in range(1, most + 1) if local % n == 0)
    spans = range(1, hosts + 1 if most > hardware.gpus_per_host else 2)
    return local * max(k for k in spans if hosts % k == 0 and k * local <= most)


def time_of(
    graph: Graph, hardware: HardwareProfile, topology: Topology, software_error: float = 0.0
) -> tuple[float, tuple[float, float]]:
    """Return the time of an iteration in ms and its 90 % interval.

    Args:
        software_error: 1-sigma relative error from releases that differ.
    """
    timeline = simulate(graph, keep_steps=True)
    time = float(timeline.iteration_ms[0])
    path = critical_path(graph, timeline)
    return time, iteration_interval(time, path, hardware, topology, software_error)


def kernel_interval(
    hardware: HardwareProfile,
    groups: Iterable[str],
    predicted_ms: float,
    size_bytes: float = math.inf,
) -> tuple[float, float]:
    """Return the 90 % interval ``(low, high)`` in ms of the time of one kernel or collective.

    Args:
        groups: groups of the profile behind its cost, such as ``collectives.inter``.
        predicted_ms: > 0.
        size_bytes: size of a message; links may have larger errors for small ones.
    """
    names = tuple(groups)
    size = error_size(hardware, names)
    shared = [size.shared]
    if size_bytes < SMALL_BYTES:
        links = (hardware.groups[name] for name in names)
        shared += [getattr(link, "small_rel_error", None) or 0.0 for link in links]
    factor = math.exp(Z_90 * math.hypot(max(shared), size.own))
    return predicted_ms / factor, predicted_ms * factor
