"""Tensors that a benchmark makes before its first iteration."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Any

import torch

MAX_RANKED_ROWS = 1 << 22
"""Most rows that a Zipf distribution of ids reaches; it has a table of as many probabilities."""


SMALL_BYTES = 1 << 20
"""Tensors up to this size are not counted against the free memory."""


def make_all(
    up_front: dict[str, dict[str, Any]], count: int, device: torch.device, indices: str, seed: int
) -> list[Any]:
    """Make the tensors that exist before an iteration; None where an op gives the tensor."""
    generator = torch.Generator().manual_seed(seed)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    free_bytes = available_bytes() // 2 // ranks  # a rank's part
    extents = extents_of(up_front.values())
    stores: dict[tuple[int, str], torch.Tensor] = {}
    tensors: list[Any] = [None] * count
    for number, spec in up_front.items():
        key = (spec["storage"], spec["dtype"])
        place = torch.device("cpu") if spec.get("host") else device
        if key not in stores:
            size = extents[key] * getattr(torch, spec["dtype"]).itemsize
            # a storage that does not fit stays unwritten: unread, it takes no memory
            written = size < free_bytes or place.type != "cpu"
            free_bytes -= size if written and size > SMALL_BYTES else 0
            stores[key] = _make_storage(spec, extents[key], written, generator).to(place)
        at = spec.get("offset", 0)
        tensors[int(number)] = stores[key].as_strided(spec["shape"], spec["strides"], at)
        if "fill" in spec and spec["fill"]["kind"] != "positive":
            tensor = tensors[int(number)]
            values = _values(tensor.numel(), spec["fill"], indices, generator)
            tensor.copy_(values.reshape(tensor.shape).to(tensor.dtype))
    return tensors


def like(spec: Any, device: torch.device) -> Any:
    """Make a tensor as an op gave it in the trace: ``[shape, strides, dtype]``."""
    if spec is None:
        return None
    if isinstance(spec[0], list) and len(spec) == 3 and isinstance(spec[2], str):
        tensor = torch.empty_strided(spec[0], spec[1], dtype=getattr(torch, spec[2]), device=device)
        return tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    return [like(item, device) for item in spec]


def difference(output: Any, specs: Any) -> str:
    """Describe a difference between the shapes of an op's outputs and the recorded ones.

    Returns:
        Empty if they agree.
    """
    if specs is None:
        return ""
    outputs = output if len(specs) != 1 and isinstance(output, (tuple, list)) else [output]
    for tensor, spec in zip(outputs, specs, strict=False):
        single = bool(spec) and isinstance(spec[-1], str)
        if single and isinstance(tensor, torch.Tensor) and list(tensor.shape) != spec[0]:
            return f"gives a tensor of shape {list(tensor.shape)} here, {spec[0]} in the trace"
    return ""


def extents_of(specs: Iterable[dict[str, Any]]) -> dict[tuple[int, str], int]:
    """Return the elements that some tensors reach in each storage, by storage and type."""
    extents: dict[tuple[int, str], int] = defaultdict(int)
    for spec in specs:
        reach = spec.get("offset", 0)
        if 0 not in spec["shape"]:
            spans = zip(spec["shape"], spec["strides"], strict=True)
            reach += 1 + sum((size - 1) * step for size, step in spans)
        key = (spec["storage"], spec["dtype"])
        extents[key] = max(extents[key], reach)
    return extents


def _make_storage(
    spec: dict[str, Any], extent: int, written: bool, generator: torch.Generator
) -> torch.Tensor:
    dtype = getattr(torch, spec["dtype"])
    if not written:
        return torch.empty(extent, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.zeros(extent, dtype=dtype)
    # torch draws few types; bytes of a huge table are not worth drawing one by one
    block = torch.rand(min(extent, 1 << 20), generator=generator)
    if len(spec["shape"]) > 1 and "fill" not in spec:
        # products keep the size of their factors: denormal numbers are slow on CPUs
        block = (block - 0.5) * (12 / max(spec["shape"][-1], 1)) ** 0.5
    if extent <= len(block):
        return block.to(dtype)
    storage = torch.empty(extent, dtype=dtype)
    for start in range(0, extent, len(block)):
        part = storage[start : start + len(block)]
        part.copy_(block[: len(part)])
    return storage


def _values(
    count: int, fill: dict[str, Any], indices: str, generator: torch.Generator
) -> torch.Tensor:
    kind = fill["kind"]
    if kind == "ids":
        return draw_ids(count, fill["high"], indices, generator)
    if kind == "rows":
        return torch.randint(fill["high"], (count,), generator=generator)
    if kind == "table_ids":
        # shares of a table summary, or equal ones
        rows = fill["rows"]
        ids = shared_out(count, fill.get("shares", [1.0] * len(rows)))
        laws = [fill["laws"][at] for at in fill["law"]] if "laws" in fill else [indices] * len(rows)
        tables = zip(laws, ids, rows, strict=True)
        return torch.cat([draw_by(law, n, high, generator) for law, n, high in tables])
    if kind == "permutation":
        return torch.arange(count)
    if kind == "constant":
        return torch.full((count,), fill["value"])
    if kind == "list":
        listed = torch.tensor(fill["values"][:count], dtype=torch.int64)
        return torch.cat([listed, listed.new_zeros(count - len(listed))])
    if kind == "row_lengths":
        columns = max(count // max(len(fill["rows"]), 1), 1)
        return torch.cat([_even_bags(columns, "lengths", total) for total in fill["rows"]])
    if kind == "table_offsets":
        return _table_offsets(count, shared_out(fill["total"], fill["shares"]))
    if kind in ("lengths", "offsets", "starts"):
        return _even_bags(count, kind, fill["total"])
    return torch.zeros(count, dtype=torch.int64)


def _even_bags(count: int, kind: str, total: int) -> torch.Tensor:
    """Make the most even bags: their lengths, or their sums with or without the last one."""
    bags = max(count - (kind == "offsets"), 1)
    marks = torch.arange(bags + 1) * total // bags
    if kind == "lengths":
        return marks[1:] - marks[:-1] if count else marks[:0]
    return marks[:count]


def _table_offsets(count: int, ids: list[int]) -> torch.Tensor:
    """Make sums of bags with the last one: equally many bags a table, even within a table."""
    bags = (count - 1) // len(ids)
    if bags * len(ids) != count - 1:
        return _even_bags(count, "offsets", sum(ids))
    lengths = torch.cat([_even_bags(bags, "lengths", total) for total in ids])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def shared_out(total: int, shares: list[float]) -> list[int]:
    """Split a whole number in proportion to `shares`."""
    every = sum(shares)
    if every <= 0:
        shares, every = [1.0] * len(shares), float(len(shares))
    marks, so_far = [0], 0.0
    for share in shares:
        so_far += share
        marks.append(min(int(total * so_far / every), total))
    marks[-1] = total
    return [after - before for before, after in pairwise(marks)]


def draw_by(skew: Any, count: int, high: int, generator: torch.Generator) -> torch.Tensor:
    """Draw row numbers below `high`.

    Args:
        skew: a text of `draw_ids`, or rows by popularity: ``counts`` of rows with a probability of
            ``weights`` each, the hottest first; they lie anywhere in the table unless
            ``hot_first``.
    """
    if isinstance(skew, str):
        return draw_ids(count, high, skew, generator)
    counts = torch.tensor(skew["counts"], dtype=torch.float64)
    chances = (counts * torch.tensor(skew["weights"], dtype=torch.float64)).cumsum(0)
    points = torch.rand(count, dtype=torch.float64, generator=generator) * chances[-1]
    bins = torch.searchsorted(chances, points).clamp_(max=len(counts) - 1)
    within = torch.rand(count, dtype=torch.float64, generator=generator) * counts[bins]
    ranks = (counts.cumsum(0)[bins] - counts[bins] + within).long().clamp_(max=max(high, 1) - 1)
    return ranks if skew["hot_first"] else _scatter(ranks, high)


def draw_ids(count: int, high: int, indices: str, generator: torch.Generator) -> torch.Tensor:
    """Draw row numbers below `high`: ``uniform``, or ``zipf:ALPHA`` over shuffled rows."""
    if indices == "uniform" or high <= 1:
        return torch.randint(max(high, 1), (count,), generator=generator)
    alpha = float(indices.partition(":")[2])
    rows = min(high, MAX_RANKED_ROWS)
    chances = torch.arange(1, rows + 1, dtype=torch.float64).pow(-alpha).cumsum(0)
    points = torch.rand(count, dtype=torch.float64, generator=generator) * chances[-1]
    ranks = torch.searchsorted(chances, points).clamp_(max=rows - 1)
    return _scatter(ranks, high)


def _scatter(ranks: torch.Tensor, high: int) -> torch.Tensor:
    """Spread ranks over the rows of a table, by a step that shares no factor with its size."""
    high = max(high, 1)
    step = max(int(high * 0.6180339887), 1)
    while gcd(step, high) != 1:
        step += 1
    return (ranks * step + 1) % high


SCATTERED = ("fbgemm::", "aten::embedding", "aten::_embedding_bag", "aten::index_select")
"""Ops that read and write a few rows of their tables; the other rows take no memory."""
GIB = 1 << 30


def needed_bytes(mine: dict[str, Any], calls: list[int]) -> int:
    """Sum the host bytes of a rank's storages made up front that ops read in whole.

    Args:
        mine: the rank's data.
        calls: positions of the ops that run.
    """
    ran = [mine["calls"][at] for at in calls]
    whole = (c for c in ran if not c["op"].removeprefix("backward of ").startswith(SCATTERED))
    touched = {str(number) for call in whole for number in call.get("reads", ())}
    touched &= mine["made"].keys()
    specs = (mine["made"][number] for number in touched)
    extents = extents_of(spec for spec in specs if 0 not in spec["shape"])
    return sum(n * getattr(torch, dtype).itemsize for (_, dtype), n in extents.items())


def available_bytes() -> int:
    """Return the bytes that the system, or the container, has free for new data."""
    limits = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable"))
        limits = [int(free.split()[1]) << 10]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    return max(min(limits), 0)


def too_large(needed: list[int], available: int) -> str:
    """Return a message if ranks that share memory need more than is free; empty if not."""
    if sum(needed) <= available:
        return ""
    ranks = "one rank" if len(needed) == 1 else f"{len(needed)} ranks"
    return (
        f"the benchmark's tensors take {sum(needed) / GIB:.1f} GiB ({ranks}, the largest "
        f"{max(needed) / GIB:.1f} GiB), and {available / GIB:.1f} GiB of memory are left here; try "
        "fewer --ranks, more machines with torchrun, or a part of it: --subset comms, --ops NAME, "
        "--from-annotation NAME"
    )


def _batch_norm_backward(x: Any, gradient: Any, weight: Any, *rest: Any) -> Any:
    mean, var, saved_mean, saved_scale, epsilon = rest[:5]
    needed = [True, weight is not None, weight is not None]
    return torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, var, saved_mean, saved_scale, True, epsilon, needed
    )


ON_CPU: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten::cudnn_batch_norm_backward": ("aten::native_batch_norm_backward", _batch_norm_backward),
    "aten::pin_memory": ("aten::clone", lambda x, *_: x.clone()),
}
"""Op -> name and call of its substitute, which gives the same shapes."""
