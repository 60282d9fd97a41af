"""`ReplanMonitor`: watches a training loop and says when another plan would pay.

monitor = ReplanMonitor(dmp, "plan.json", every=5000, model="model.yaml", folder="windows")
for batch in batches:
    train(batch)
    if monitor.step(batch.sparse_features):  # a window has closed
        proposal = monitor.propose()
        if proposal.in_place:
            monitor.apply(dmp)

Ids are counted of some samples only, while the time spent in here is below `SHARE` of the time that
has passed, over all windows, so that the overhead is bounded whatever counting costs; and few at a
time, so that no step waits long.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from predictor.errors import InputError, PlanError
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import check_plan
from predictor.model.plan_json import load_plan
from predictor.model.workload import Workload
from predictor.units import gib
from search.in_use.price import allowed_in_place
from search.problem import PlanInUse
from search.stop import Stop
from shardopt.api.request import Machine
from shardopt.api.setting import resolve
from shardopt.extras import needs_torchrec
from shardopt.files import atomic_open
from shardopt.live.reshard import Proposal, find_proposal, observed_workload, reshard
from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.result import summarise
from shardopt.torchrec.collective import on_first_rank, search_seconds
from shardopt.torchrec.running import find_lost_state, find_mismatches

with needs_torchrec():
    import torch.distributed as dist
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SHARE = 0.003
"""Share of a training loop's time that counting may take."""
LONGEST_STEP = 3.0
"""Longest step that earns counting time, in lengths of the step before; an evaluation is longer."""
MOST_IDS = 2**18
"""Distinct ids of a feature that are counted exactly in a window."""
MOST_AT_ONCE = 2**16
"""Ids of all features together that are counted in one step: some milliseconds."""


class StepWindow:
    """Steps of one rank since it was made.

    Args:
        counts_ids: count those of some samples, and not only steps.
        credit_s: time that may be spent on counting at once; negative if too much was spent before.
    """

    def __init__(self, *, counts_ids: bool = True, credit_s: float = 0.0) -> None:
        self.counts: dict[str, FeatureCounts] = {}
        self.credit_s = credit_s
        self._counts_ids = counts_ids
        self._counted = 0
        self._times = array("d")
        self._last = time.perf_counter()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self._times)

    @property
    def step_ms(self) -> float:
        """Median time of a step; nan where there was none."""
        return 1e3 * float(np.median(self._times)) if self._times else float("nan")

    def add(self, features: Any) -> None:
        """Add a step. The first of a window is counted whatever the credit.

        Args:
            features: its ids: a KeyedJaggedTensor, or several in a mapping.
        """
        now = time.perf_counter()
        step_s = now - self._last
        usual = min(step_s, LONGEST_STEP * self._times[-1]) if self._times else 0.0
        self._times.append(step_s)
        self.credit_s += SHARE * usual
        if self._counts_ids and (self.credit_s >= 0 or not self.counts):
            for name, bags in _bags_of(features, self._counted):
                self.counts.setdefault(name, FeatureCounts(MOST_IDS)).add(bags)
            self._counted += 1
        self._last = time.perf_counter()
        self.credit_s -= self._last - now

    def save(self, path: Path) -> None:
        """Write the counts, as a checkpoint of `shardopt stats` has them, and the step times."""
        start = time.perf_counter()
        arrays: dict[str, Any] = {"step_seconds": np.array(self._times)}
        for name, counts in self.counts.items():
            arrays |= {f"{name}.{part}": value for part, value in counts.state().items()}
        with atomic_open(path) as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        self.credit_s -= time.perf_counter() - start


def _bags_of(features: Any, turn: int) -> Iterator[tuple[str, Bags]]:
    """Bags of every feature, of some samples in a row; of one that several tensors hold, the first.

    Args:
        turn: each takes the samples after those of the one before, as where a sample lies in its
            batch may say what it is, and a data set that is read again must not be counted twice.
    """
    tensors = list(features.values()) if isinstance(features, Mapping) else [features]
    for tensor in tensors:
        if not isinstance(tensor, KeyedJaggedTensor):
            raise TypeError(
                f"got {type(tensor).__name__} as the ids of a step; give the batch's "
                "KeyedJaggedTensor, or a mapping of several"
            )
    share = min(1.0, MOST_AT_ONCE / max(1, sum(tensor.values().numel() for tensor in tensors)))
    counted: set[str] = set()
    for tensor in tensors:
        lengths = tensor.lengths().cpu().numpy()
        id_, sample = 0, 0
        for key, ids, samples in zip(
            tensor.keys(), tensor.length_per_key(), tensor.stride_per_key(), strict=True
        ):
            if key not in counted:
                counted.add(key)
                count = math.ceil(share * samples)
                skip = turn * count % max(1, samples - count + 1)
                mine = lengths[sample + skip : sample + skip + count].astype(np.int64)
                first = id_ + int(lengths[sample : sample + skip].sum())
                part = tensor.values()[first : first + int(mine.sum())]
                yield key, Bags(part.cpu().numpy().astype(np.int64), mine)
            id_, sample = id_ + ids, sample + samples


class ReplanMonitor:
    """Counts what a training loop reads, proposes plans, and moves to them.

    The first rank counts its own batches; the others count steps only.

    Args:
        dmp: the running `DistributedModelParallel`.
        plan: what it runs, or the plan file.
        every: steps of a window, >= 1.
        model: the model file.
        folder: where the first rank keeps the windows: ``window-STEP.npz`` each, and
            ``stats-STEP.npz`` of those behind a proposal.
        machine: what the plan does not say: hardware, memory, batch size.
        horizon: steps over which a move must pay for itself, >= 1.
        max_moves, max_gib: limits on a move; None for none.
        any_move: propose moves that need a checkpoint, too.
        effort: of a search, as in `ShardoptPlanner`.
        timeout_seconds: ceiling on a search, > 0; never more than a quarter of the group's timeout.

    Raises:
        InputError: something given cannot be used.
        PlanError: the plan is not the one that runs; names what differs.
    """

    def __init__(
        self,
        dmp: Any,
        plan: ShardingPlan | str | PathLike[str],
        every: int = 5000,
        *,
        model: str | PathLike[str],
        folder: str | PathLike[str] = "windows",
        machine: Machine | None = None,
        horizon: int = 10_000,
        max_moves: int | None = None,
        max_gib: float | None = None,
        any_move: bool = False,
        effort: float = 1.0,
        timeout_seconds: float | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"every is {every}; a window has at least 1 step")
        running = plan if isinstance(plan, ShardingPlan) else load_plan(plan)
        self._setting = resolve(model, machine or Machine(), running)
        self.plan = check_plan(running, self._setting.workload, where="plan")
        _check_running(dmp, self.plan)
        self.every = every
        self.steps = 0
        self.window = self._new_window()
        self.proposal: Proposal | None = None
        self._closed: StepWindow | None = None
        self._folder = Path(folder)
        self._limits = (max_moves, None if max_gib is None else gib(max_gib), horizon)
        self._any_move, self._effort, self._timeout_s = any_move, effort, timeout_seconds

    def step(self, features: Any) -> bool:
        """Count a step; call it once a step, on every rank.

        Args:
            features: the ids of the step's batch: its KeyedJaggedTensor, or a mapping of several;
                best those on the host, which need no copy from the device.

        Returns:
            True if a window has just closed, on all ranks at once.
        """
        self.window.add(features)
        self.steps += 1
        if self.window.steps < self.every:
            return False
        self._closed, closed = self.window, self.window
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            closed.save(self._folder / f"window-{self.steps}.npz")
        self.window = self._new_window(closed.credit_s)
        return True

    def propose(self) -> Proposal:
        """The plan that would cost least on the data of the last closed window, or of the open one
        if there is none; to be called on all ranks at once. The first rank searches, and training
        waits for it.

        Raises:
            InputError: no step was counted yet.
            PlanError: the first rank met an error, or a rank did not arrive.
        """
        window = self._closed or self.window
        if not window.steps:
            raise InputError("no step was counted yet; call step() once a step")
        self.proposal = on_first_rank(lambda: self._search(window))
        return self.proposal

    def apply(self, dmp: Any) -> None:
        """Move the model to the last proposal, in place; to be called on all ranks at once, between
        two steps. Optimizers that hold `dmp.fused_optimizer` and train pipelines are to be made
        anew afterwards.

        Raises:
            InputError: nothing was proposed.
            PlanError: something forbids it, on whichever rank; names all of it. Nothing was moved.
        """
        reshard(dmp, self._proposed())
        self.follow(dmp)

    def follow(self, dmp: Any) -> None:
        """Watch the model that runs the last proposal, after a move through a checkpoint
        (`save_for_plan` and `load_under_plan` of `shardopt.torchrec`).

        Raises:
            InputError: nothing was proposed.
            PlanError: the model runs another plan.
        """
        plan = self._proposed().plan
        _check_running(dmp, plan)
        self.plan, self.proposal = plan, None
        self.window, self._closed = self._new_window(self.window.credit_s), None

    def _proposed(self) -> Proposal:
        if self.proposal is None:
            raise InputError("nothing was proposed yet; call propose()")
        return self.proposal

    def _new_window(self, credit_s: float = 0.0) -> StepWindow:
        return StepWindow(counts_ids=dist.get_rank() == 0, credit_s=credit_s)

    def _search(self, window: StepWindow) -> Proposal:
        path = self._folder / f"stats-{self.steps}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {
            feature.name: table.num_embeddings
            for table in self._setting.workload.tables
            for feature in table.features
        }
        counted = {name: counts for name, counts in window.counts.items() if name in rows}
        statistics = summarise(counted, ReadOptions(rows=rows), 0)
        workload = observed_workload(self._setting.workload, statistics, path)
        problem = replace(self._setting.problem(), workload=workload)
        max_moves, max_bytes, horizon = self._limits
        in_use = PlanInUse(self.plan, max_moves, max_bytes, horizon, self._allows(workload))
        stop = Stop(self._effort, search_seconds(self._timeout_s))
        return find_proposal(
            problem, in_use, stop, measured_ms=window.step_ms, stats_file=str(path)
        )

    def _allows(self, workload: Workload) -> Callable[[str, TablePlan], bool]:
        """Return the test of a table's new plan: in place, or its state survives a checkpoint."""
        tables = dict(zip(workload.keys, workload.tables, strict=True))
        now = self.plan
        if not self._any_move:
            return allowed_in_place(tables, now)
        return lambda key, after: not find_lost_state(tables[key], now.tables[key], after)


def _check_running(dmp: Any, plan: ShardingPlan) -> None:
    differs = list(find_mismatches(dmp, plan))
    if differs:
        raise PlanError(f"the plan is not the one that runs: {'; '.join(differs)}")
