"""Whether what a benchmark fills has place in this machine's memory, asked before it is filled."""

from __future__ import annotations

import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch

SCATTERED = ("fbgemm::", "aten::embedding", "aten::_embedding_bag", "aten::index_select")
"""Ops that read and write a few rows of their tables: the others are never filled."""
GIB = 1 << 30


def needed_bytes(mine: dict[str, Any], calls: list[int]) -> int:
    """Host bytes of the storages that ops read in whole, of what a rank makes up front.

    Args:
        mine: the rank's data.
        calls: positions of the ops that run.
    """
    touched = {
        number
        for at in calls
        if not mine["calls"][at]["op"].removeprefix("backward of ").startswith(SCATTERED)
        for number in mine["calls"][at].get("reads", ())
    }
    sizes: dict[tuple[int, str], int] = {}
    for number, spec in mine["made"].items():
        if int(number) in touched and 0 not in spec["shape"]:
            spans = zip(spec["shape"], spec["strides"], strict=True)
            extent = spec.get("offset", 0) + 1 + sum((size - 1) * step for size, step in spans)
            key = (spec["storage"], spec["dtype"])
            size = extent * getattr(torch, spec["dtype"]).itemsize
            sizes[key] = max(sizes.get(key, 0), size)
    largest = max((_given_bytes(mine["calls"][at]) for at in calls), default=0)
    return sum(sizes.values()) + largest


def _given_bytes(call: dict[str, Any]) -> int:
    """Bytes of what an op gives; 0 for one that gives what it took, or may give a view of it."""
    if not call.get("gives") or call["op"].startswith(VIEWS):
        return 0
    return sum(map(_spec_bytes, call.get("outputs", ())))


VIEWS = (
    "aten::view", "aten::expand", "aten::as_strided", "aten::reshape", "aten::broadcast", "aten::t",
    "aten::_reshape_alias", "aten::slice", "aten::select", "aten::chunk", "aten::split",
    "aten::unfold", "aten::detach", "aten::alias", "aten::permute", "aten::narrow",
)  # fmt: skip


def _spec_bytes(spec: Any) -> int:
    if spec is None:
        return 0
    if len(spec) == 3 and isinstance(spec[2], str):
        spans = zip(spec[0], spec[1], strict=True)
        return prod(size for size, step in spans if step) * getattr(torch, spec[2]).itemsize
    return sum(map(_spec_bytes, spec))


def available_bytes() -> int:
    """Memory that the system, or the container, has left for new data."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [next(int(of.split()[1]) << 10 for of in lines if of.startswith("MemAvailable"))]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return max(min(found), 0)


def too_large(needed: list[int], available: int) -> str:
    """What to say if ranks that share memory need more than there is; empty if they do not."""
    if sum(needed) <= available:
        return ""
    ranks = "one rank" if len(needed) == 1 else f"{len(needed)} ranks"
    return (
        f"the benchmark's tensors take {sum(needed) / GIB:.1f} GiB ({ranks}, the largest "
        f"{max(needed) / GIB:.1f} GiB), and {available / GIB:.1f} GiB of memory are left here; try "
        "fewer --ranks, more machines with torchrun, or a part of it: --subset comms, --ops NAME, "
        "--from-annotation NAME"
    )
