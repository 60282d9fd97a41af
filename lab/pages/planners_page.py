"""docs/benchmarks.md: what the committed rows of the search benchmark say."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lab.planners.rows import (
    MANY_TABLES,
    MUCH,
    OURS,
    RANDOM,
    RATED,
    RATED_SAME,
    SHARDOPT,
    TORCHREC,
    HeadToHead,
    InstanceRows,
    SearchRow,
    Value,
    against,
    gaps,
    others,
    planners_of,
    rated_ms,
    rows_by_instance,
    shares,
    speed,
    time_ms,
    without_plan,
)
from shardopt.formatting import number, percent, plural

HEAD = """# Benchmarks of the search

Written by `python -m lab search configs/bench/search/instances.yaml -o
configs/bench/search/rows.csv --write-docs docs/benchmarks.md` from the rows in that file. Run the
command, do not edit this page. Nothing here was measured on GPUs: times are predictions or ratings.

Every planner plans every instance, in a process of its own that has imported all it needs. Each
plan is scored by two objectives:

- **(a)** the iteration time that shardopt predicts, for plans that fit by shardopt's count of
  memory. `shardopt` minimises this objective and the other planners do not, so this shows what
  model and search are worth together if the predictor is right (docs/accuracy.md).
- **(b)** the rating of TorchRec's planner, the largest sum of shard costs on a rank, for plans that
  fit by TorchRec's count of memory. TorchRec minimises this objective, and so do the two planners
  "shardopt on torchrec's cost": the same kind of search (lab/planners/additive.py) with
  TorchRec's numbers instead of the predictor. Their gain is due to search alone.
"""

MIXED = """\
**Warning:** these rows come from different states of the code (see Sources), so they cannot be
compared with each other. The command runs those again that are not of the present code.
"""

UNKNOWN = """\
**Warning:** these rows do not say which state of the code they come from. The present code may give
others; the command runs them again.
"""

PLANNERS = """## The planners

- `torchrec`: TorchRec's `EmbeddingShardingPlanner` with its defaults. `torchrec dynamic` uses its
  `DynamicProgrammingProposer`, `torchrec balanced` also its `MemoryBalancedPartitioner`. Each has a
  time limit (the planner's `timeout_seconds`, which it checks between proposals); a call that still
  runs 20 s later is killed.
- `neuroshard`: beam search over column splits around a greedy grid, after Zha et al. 2023.
- `dreamshard-greedy`: whole tables placed greedily by 35 mixtures of the costs that AutoShard and
  DreamShard (Zha et al. 2022) compare with; their learned policies are not implemented.
- `hugectr`: small tables data-parallel, hot ones split again and again.
- `random`: random plans, half of them placed greedily, for as long as `shardopt` took; under (b) as
  long as `shardopt on torchrec's cost` took.
- `shardopt`: `search.solve`, as `shardopt plan` runs it. `shardopt on torchrec's cost and options`
  and `shardopt on torchrec's cost`: see (b); the first has only the options that TorchRec lists.

NeuroShard, DreamShard and HugeCTR are reimplemented from papers and sources (search/baselines lists
the differences). Each of them plans twice, with the memory count of (a) and of (b), and its best
proposal under the objective counts; seconds are those under (a).

Instances are drawn from seeds (lab/planners/instances.py): `100x8-fill40-1` has 100
tables on 8 GPUs, and whole tables fill 40 % of their memory (80 % and more: tight). `packed`
instances are built around a known packing and have no host memory; `-tw` allows whole tables only.
"Only us" counts instances where shardopt has a plan that fits and the other planner has none.
"""


def benchmarks_text(rows: Sequence[SearchRow]) -> str:
    """The page."""
    fields = rows_by_instance(rows)
    parts = [HEAD, *_states(rows), *summary(fields), PLANNERS, *_by_instance(fields)]
    parts += _machines(rows)
    return "\n".join(parts).rstrip("\n") + "\n"


def _states(rows: Sequence[SearchRow]) -> Iterator[str]:
    """A warning where the rows are not of one state of the code. TorchRec's planners use less of
    it, so theirs have a digest of their own."""
    theirs = {row.sources for row in rows if row.planner.startswith(TORCHREC)}
    ours = {row.sources for row in rows if not row.planner.startswith(TORCHREC)}
    if len(theirs) > 1 or len(ours) > 1:
        yield MIXED
    elif "" in theirs | ours:
        yield UNKNOWN


def summary(fields: Mapping[str, InstanceRows]) -> Iterator[str]:
    """Lines on who is better by how much, and how soon."""
    yield f"## In short: {len(fields)} instances\n"
    yield "### (a) by shardopt's prediction\n"
    yield from _against(fields, (SHARDOPT,), time_ms)
    yield from _gap_words(fields, SHARDOPT, time_ms)
    yield "### (b) by TorchRec's rating\n"
    yield from _against(fields, (RATED, RATED_SAME), rated_ms)
    yield from _same_options(fields)
    yield from _gap_words(fields, RATED, rated_ms)
    yield "### Search and model apart\n"
    yield from _apart(fields)
    yield "### Time to a plan at least as good as TorchRec's\n"
    yield from _speed_words(fields)
    yield "### Plans that fit\n"
    yield from _feasible(fields)


def _against(
    fields: Mapping[str, InstanceRows], ours: Sequence[str], value: Value
) -> Iterator[str]:
    """A line for every other planner."""
    names = others(row for field in fields.values() for row in field.values())
    found = [against(fields, name, ours, value) for name in names]
    yield "| against | instances | better | equal | worse | median gain | least | most | only us |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in found:
        yield _against_line(one)
    worse = sorted({name for one in found for name in one.worse})
    yield ""
    if worse:
        yield f"Worse than some planner on {len(worse)}: {', '.join(worse)}.\n"
    else:
        yield "Never worse than any of them.\n"


def _against_line(one: HeadToHead) -> str:
    shown = (one.median_gain, one.least_gain, one.most_gain)
    gains = " | ".join("-" if gain is None else percent(gain) for gain in shown)
    return (
        f"| {one.planner} | {one.instances} | {one.better} | {one.equal} | {len(one.worse)} "
        f"| {gains} | {one.only_ours} |"
    )


def _same_options(fields: Mapping[str, InstanceRows]) -> Iterator[str]:
    one = against(fields, TORCHREC, (RATED_SAME,), rated_ms)
    if one.median_gain is not None:
        yield (
            f"Among the options that TorchRec lists, the median gain over its default is "
            f"{percent(one.median_gain)}.\n"
        )


def _apart(fields: Mapping[str, InstanceRows]) -> Iterator[str]:
    """What better search on TorchRec's numbers is worth by the predictor."""
    by_rating = against(fields, TORCHREC, (RATED_SAME,), time_ms)
    by_time = against(fields, TORCHREC, (SHARDOPT,), time_ms)
    if by_rating.median_gain is None or by_time.median_gain is None:
        yield "Not enough rows.\n"
        return
    yield (
        "Both figures here are gains in predicted iteration time over TorchRec's plan, in the "
        "median. Plans found on TorchRec's rating, among TorchRec's options: "
        f"{percent(by_rating.median_gain)} ({by_rating.answered} instances). That is what better "
        "search alone brings. Plans that shardopt finds on its prediction: "
        f"{percent(by_time.median_gain)} ({by_time.answered} instances). The difference is due to "
        "the cost model. A negative gain means that a plan which TorchRec rates better is "
        "predicted to be slower.\n"
    )


def _gap_words(fields: Mapping[str, InstanceRows], planner: str, value: Value) -> Iterator[str]:
    found = gaps(fields, planner, value)
    if found:
        yield (
            f"`{planner}` lies {percent(statistics.median(found))} above its proven lower bound in "
            f"the median, at most {percent(max(found))}.\n"
        )


def _speed_words(fields: Mapping[str, InstanceRows]) -> Iterator[str]:
    found = speed(fields)
    as_good, better = shares(found), shares(found, better=True)
    if not as_good:
        yield f"No instance of {MANY_TABLES} tables or more has been run by both.\n"
        return
    yield (
        f"On instances of {MANY_TABLES} tables or more, shardopt has a plan predicted to be "
        f"at least as fast as TorchRec's after {_middle_and_most(as_good)}. This includes the "
        "start of the search, and excludes imports for both. Often it is TorchRec's plan itself: "
        "our search starts with a reimplementation of TorchRec's "
        "(search/baselines/torchrec_planner.py). A plan that is faster by "
        f"{percent(MUCH)} or more is found after {_middle_and_most(better)}.\n"
    )
    yield "| instance | torchrec s | as good after s | share | better after s | share |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        cells = [
            cell
            for at in (one.as_good_s, one.better_s)
            for cell in (("-", "-") if at is None else (f"{at:.2f}", percent(at / one.theirs_s)))
        ]
        mark = " (cut)" if one.cut else ""
        yield f"| {one.instance} | {one.theirs_s:.1f}{mark} | {' | '.join(cells)} |"
    yield ""


def _middle_and_most(found: Sequence[float]) -> str:
    if not found:
        return "no time, since there is none"
    middle, most = percent(statistics.median(found)), percent(max(found))
    return f"{middle} of TorchRec's time in the median, {most} at worst"


def _feasible(fields: Mapping[str, InstanceRows]) -> Iterator[str]:
    yield "| planner | instances | no plan that fits (a) | no plan that fits (b) |"
    yield "|---|---|---|---|"
    for name in planners_of(fields):
        ran = sum(name in field for field in fields.values())
        a, b = (len(without_plan(fields, name, value)) for value in (time_ms, rated_ms))
        yield f"| {name} | {ran} | {a} | {b} |"
    yield ""


def _by_instance(fields: Mapping[str, InstanceRows]) -> Iterator[str]:
    names = sorted(planners_of(fields), key=lambda n: (n not in OURS, n == RANDOM))
    for title, value, ours in (
        ("(a) predicted iteration time in ms", time_ms, (SHARDOPT,)),
        ("(b) TorchRec's rating in ms", rated_ms, (RATED_SAME, RATED)),
    ):
        columns = [n for n in names if n in ours or n not in OURS]
        yield f"## Every instance: {title}\n"
        yield "A dash means that no plan fits, an empty cell that the planner was not run.\n"
        yield f"| instance | bound | {' | '.join(columns)} |"
        yield "|---|" + "---|" * (len(columns) + 1)
        for name, field in fields.items():
            bound = field[ours[-1]].bound_ms if ours[-1] in field else None
            cells = [_cell(field.get(column), value) for column in columns]
            shown = "" if bound is None else number(bound)
            yield f"| {name} | {shown} | {' | '.join(cells)} |"
        yield ""
    yield "## Every instance: seconds\n"
    yield f"| instance | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for name, field in fields.items():
        yield f"| {name} | {' | '.join(_seconds(field.get(n)) for n in names)} |"
    yield "\n(cut): ended at its limit; (killed): without an answer.\n"


def _cell(row: SearchRow | None, value: Value) -> str:
    if row is None:
        return ""
    found = value(row)
    return "-" if found is None else number(found)


def _seconds(row: SearchRow | None) -> str:
    if row is None:
        return ""
    mark = {"limit": " (cut)", "killed": " (killed)"}.get(row.ended, "")
    return f"{row.seconds:.2f}{mark if row.planner != RANDOM else ''}"


def _machines(rows: Sequence[SearchRow]) -> Iterator[str]:
    yield "## Machine\n"
    for machine in dict.fromkeys(row.machine for row in rows):
        loads = [row.load for row in rows if row.machine == machine]
        yield f"- {machine}; load average {min(loads):.1f} to {max(loads):.1f}"
    yield "\n## Sources\n"
    yield (
        "A row keeps a digest of the code that it comes from (predictor and search; for TorchRec's "
        "planners predictor and rating). The command runs a row again when its digest is another; "
        "until then its figures are of the code that it came from, not of a later one.\n"
    )
    for sources, count in Counter(row.sources or "not kept" for row in rows).items():
        yield f"- {sources}: {plural(count, 'row')}"
