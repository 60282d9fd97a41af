"""What a monitor costs a running job, and whether a move saves what it was foretold to save.

Two pinned CPU ranks with one thread each and no garbage collection, on a quiet machine:

    shardopt calibrate --quick -o here.yaml
    python -m lab live-steps measure here.yaml rows.json
    python -m lab live-steps show rows.json docs/live.md

*Overhead*: blocks of steps with and without a monitor, interleaved, by the same job. *Moves*: the
data of a job drift, its monitor proposes, the job moves; then blocks of its steps and of those of a
twin that stays, interleaved. `show` writes the tables of docs/live.md from the rows.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.pages.accuracy import END, START
from lab.programs import make_parser
from predictor.errors import InputError, ShardoptError
from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.files import atomic_write_text, decode, read_bytes
from shardopt.measure.machine import environment
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import Rank, Report, join_group, prepare
from shardopt.ranks.realtime import Runtime

ROWS, DIM, BATCH = 200_000, 64, 2048
RANKS = (0, 0, 0, 0, 1, 1, 1, 1)
YESTERDAY = (40.0, 40.0)
"""Ids per sample of the tables of either rank, when the plan was made."""
DRIFTS = {
    "one rank's ids double": (80.0, 40.0),
    "one rank's double, the other's fall": (80.0, 15.0),
    "one rank has almost all": (120.0, 5.0),
}
RING = 8
WINDOW = 120
WARM_UP, BLOCK = 10, 20
HORIZON = 10**6
EFFORT = 0.1
SHOWN = "live steps"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Args:
        overhead_rounds, move_rounds: pairs of blocks.
    """

    overhead_rounds: int
    move_rounds: int
    block: int = BLOCK
    window: int = WINDOW


def workload(ids: tuple[float, float] = YESTERDAY) -> Workload:
    """Eight tables alike, but for the ids of either half."""
    tables = tuple(
        Table(f"t{i}", ROWS, DIM, (Feature(f"f{i}", ids[rank], distribution=Zipf(1.05)),))
        for i, rank in enumerate(RANKS)
    )
    return Workload("drifting", BATCH, tables, DenseArch(13, (64,), (64, 1), "dot"))


def first_plan(load: Workload) -> ShardingPlan:
    """Even for the data of yesterday."""
    tables = {
        key: TablePlan(
            ShardingType.TABLE_WISE, ComputeKernel.FUSED, (Shard(rank, (0, 0), (ROWS, DIM)),)
        )
        for key, rank in zip(load.keys, RANKS, strict=True)
    }
    return ShardingPlan(tables, 2, 2)


class _Job:
    """A training whose steps are timed, with or without a monitor."""

    def __init__(self, rank: Rank, device: Any, rings: Mapping[str, Any]) -> None:
        from shardopt.training.loop import Training

        load = workload()
        self.rings = rings
        self.training = Training(load, first_plan(load), device, rings["yesterday"])

    def read(self, data: str) -> None:
        """From now on the batches of these data."""
        self.training = self.training.on(self.rings[data])
        self.ring = self.rings[data]

    def block(self, steps: int, watch: Callable[[Any], object] | None = None) -> list[float]:
        """Milliseconds of every step but the first, which ranks begin together."""
        import time

        import torch.distributed as dist

        dist.barrier()
        marks = [time.perf_counter()]
        for step in range(1 + steps):
            self.training.step()
            if watch is not None:
                watch(self.ring[step % len(self.ring)].sparse)
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(marks[1:])]


def run(rank: Rank, report: Report, hardware: str, folder: str, sizes: Sizes) -> None:
    """One rank of both measurements."""
    import gc
    import time

    device = prepare(rank, "gloo", Runtime.PLAIN)
    gc.disable()
    import torch.distributed as dist

    from shardopt.config.write import write_model
    from shardopt.training.batch import batch_ring

    join_group(rank)
    model_file = Path(folder) / "model.yaml"
    if rank.index == 0:
        write_model(model_file, workload())
    dist.barrier()
    data = {"yesterday": YESTERDAY, **DRIFTS}
    rings = {
        name: batch_ring(workload(ids), rank=rank.index, size=RING) for name, ids in data.items()
    }
    tell: Report = report if rank.index == 0 else lambda _: None

    def monitor_of(job: _Job, every: int) -> Any:
        from shardopt.api.request import Machine
        from shardopt.live.monitor import ReplanMonitor

        return ReplanMonitor(
            job.training.sharded,
            first_plan(workload()),
            every,
            model=model_file,
            folder=Path(folder) / "windows",
            machine=Machine(hardware=hardware, ddr_gib=4.0),
            horizon=HORIZON,
            effort=EFFORT,
        )

    tell({"overhead": _overhead(_Job(rank, device, rings), monitor_of, sizes)})
    for name in DRIFTS:
        tell({"move": {"drift": name, **_move(rank, device, rings, name, monitor_of, sizes)}})
    dist.barrier()
    time.sleep(0.3)


def _interleaved(
    sizes: Sizes, rounds: int, what: Mapping[str, Callable[[], list[float]]]
) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {name: [] for name in what}
    for round_ in range(rounds):
        order = list(what)
        random.Random(round_).shuffle(order)  # the same on every rank
        for name in order:
            found[name].append(what[name]())
    return found


def _overhead(job: _Job, monitor_of: Callable[..., Any], sizes: Sizes) -> dict[str, Any]:
    import time

    job.read("yesterday")
    monitor = monitor_of(job, 10**9)
    spent: list[float] = []

    def watch(features: Any) -> None:
        start = time.perf_counter()
        monitor.step(features)
        spent.append(1e3 * (time.perf_counter() - start))

    job.block(WARM_UP, watch)
    spent.clear()
    blocks = _interleaved(
        sizes,
        sizes.overhead_rounds,
        {
            "without": lambda: job.block(sizes.block),
            "with": lambda: job.block(sizes.block, watch),
        },
    )
    return {**blocks, "spent_ms": spent}


def _move(
    rank: Rank,
    device: Any,
    rings: Mapping[str, Any],
    drift: str,
    monitor_of: Callable[..., Any],
    sizes: Sizes,
) -> dict[str, Any]:
    import time

    moves, stays = (_Job(rank, device, rings) for _ in range(2))
    for job in (moves, stays):
        job.read("yesterday")
    old = moves.block(sizes.block)
    monitor = monitor_of(moves, sizes.window)
    moves.read(drift)
    new = moves.block(sizes.window - 1, monitor.step)
    start = time.perf_counter()
    proposal = monitor.propose()
    searched = time.perf_counter()
    if proposal.in_place:
        monitor.apply(moves.training.sharded)
    applied = time.perf_counter()
    stays.read(drift)
    for job in (moves, stays):
        job.block(WARM_UP)
    blocks = _interleaved(
        sizes,
        sizes.move_rounds,
        {"stays": lambda: stays.block(sizes.block), "moved": lambda: moves.block(sizes.block)},
    )
    return {
        "ids": DRIFTS[drift],
        "yesterday_ms": old,
        "drifted_ms": new,
        "proposal": proposal.to_object(),
        "search_s": searched - start,
        "apply_s": applied - searched,
        **blocks,
    }


def measure(hardware: Path, sizes: Sizes) -> dict[str, Any]:
    """All rows of a run, with the machine it ran on."""
    rows: dict[str, Any] = {"schema": "shardopt.live-steps/1", "moves": []}
    rows["environment"] = environment("gloo")

    def keep(_: int, message: Mapping[str, Any]) -> None:
        if "overhead" in message:
            rows["overhead"] = message["overhead"]
        else:
            rows["moves"].append(message["move"])

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run, 2, str(hardware.resolve()), folder, sizes, on_report=keep, silence_s=600.0)
    return rows


def tables(rows: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the page, from the rows."""
    about = rows["environment"]
    yield (
        f"{about['processor']}, {about['cores']} cores, torch {about['torch']}, torchrec "
        f"{about['torchrec']}; two gloo ranks, one thread each, pinned, no garbage collection."
    )
    yield ""
    yield from _overhead_table(rows["overhead"])
    yield ""
    yield from _moves_table(rows["moves"])


def _overhead_table(found: Mapping[str, Any]) -> Iterator[str]:
    without, watched = (_means(found[name]) for name in ("without", "with"))
    ratios = [b / a - 1 for a, b in zip(without, watched, strict=True)]
    mean = statistics.fmean(ratios)
    error = 2 * statistics.stdev(ratios) / len(ratios) ** 0.5
    every = [ms for block in found["with"] for ms in block]
    share = sum(found["spent_ms"]) / (sum(every) * len(found["spent_ms"]) / len(every))
    yield "| steps | median of a step, ms | quartiles | mean of a step, ms |"
    yield "|---|---|---|---|"
    for name in ("without", "with"):
        ms = [one for block in found[name] for one in block]
        low, middle, high = statistics.quantiles(ms, n=4)
        mean_ms = statistics.fmean(ms)
        yield (
            f"| {len(ms)} {name} a monitor | {middle:.2f} | {low:.2f} to {high:.2f} | "
            f"{mean_ms:.2f} |"
        )
    yield ""
    yield (
        f"Time inside `monitor.step`: **{share:.2%}** of the first rank's steps, at most "
        f"{max(found['spent_ms']):.1f} ms at once. Means of {len(ratios)} pairs of blocks differ "
        f"by {mean:+.2%} ± {error:.2%} (two standard errors)."
    )


def _moves_table(moves: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "| ids a sample, by rank | tables moved | ms foretold, stays → moved | ms measured | "
        "saves, foretold | measured | points | quartiles of pairs |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for move in moves:
        foretold, measured, low, high = gains(move)
        proposal = move["proposal"]
        stays, moved = (statistics.median(_flat(move[n])) for n in ("stays", "moved"))
        ids = " and ".join(
            f"{old:g} → {new:g}" for old, new in zip(YESTERDAY, move["ids"], strict=True)
        )
        yield (
            f"| {ids} | {len(proposal['from']['moved'])} | "
            f"{proposal['from']['iteration_ms']:.1f} → {proposal['iteration_ms']:.1f} | "
            f"{stays:.1f} → {moved:.1f} | {foretold:.1%} | {measured:.1%} | "
            f"{100 * (measured - foretold):+.1f} | {low:.1%} to {high:.1%} |"
        )
    yield ""
    seconds = [(move["search_s"], move["apply_s"]) for move in moves]
    yield (
        f"A proposal took {min(s for s, _ in seconds):.1f} to {max(s for s, _ in seconds):.1f} s, "
        f"a move {min(a for _, a in seconds):.2f} to {max(a for _, a in seconds):.2f} s."
    )


def gains(move: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Shares of the step time that a move saves: foretold, measured, and the quartiles of the
    measured ones over pairs of blocks."""
    pairs = zip(move["stays"], move["moved"], strict=True)
    each = [1 - statistics.median(b) / statistics.median(a) for a, b in pairs]
    low, _, high = statistics.quantiles(each, n=4)
    stays, moved = (statistics.median(_flat(move[n])) for n in ("stays", "moved"))
    return move["proposal"]["gain"], 1 - moved / stays, low, high


def _flat(blocks: Sequence[Sequence[float]]) -> list[float]:
    return [ms for block in blocks for ms in block]


def _means(blocks: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(block) for block in blocks]


def read_rows(path: Path) -> dict[str, Any]:
    """The rows of a run."""
    found: dict[str, Any] = json.loads(decode(read_bytes(path, "rows file"), path))
    return found


def page_with(page: str, rows: Mapping[str, Any]) -> str:
    """The page with the tables between its marks."""
    start, end = START.format(SHOWN), END.format(SHOWN)
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise InputError(f"the page has no marks '{start}' and '{end}'")
    return f"{before}{start}\n" + "\n".join(tables(rows)) + f"\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or show what was measured."""
    parser = make_parser("live-steps", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="run two ranks, about four minutes")
    measuring.add_argument("hardware", type=Path, help="profile of this machine")
    measuring.add_argument("rows", type=Path)
    measuring.add_argument("--overhead-rounds", type=int, default=30)
    measuring.add_argument("--move-rounds", type=int, default=6)
    showing = commands.add_parser("show", help="print the tables, or write them into a page")
    showing.add_argument("rows", type=Path)
    showing.add_argument("page", type=Path, nargs="?")
    given = parser.parse_args(argv)
    try:
        if given.command == "measure":
            sizes = Sizes(given.overhead_rounds, given.move_rounds)
            atomic_write_text(given.rows, json.dumps(measure(given.hardware, sizes)) + "\n")
        rows = read_rows(given.rows)
        page = given.page if given.command == "show" else None
        if page is None:
            print("\n".join(tables(rows)))
        else:
            text = decode(read_bytes(page, "page"), page)
            atomic_write_text(page, page_with(text, rows))
    except ShardoptError as error:
        parser.exit(2, f"{error}\n")
    return 0
