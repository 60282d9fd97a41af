"""`ReplanMonitor`: watches a training loop and says when another plan would pay.

monitor = ReplanMonitor(dmp, "plan.json", every=5000, model="model.yaml", folder="windows")
for batch in batches:
    train(batch)
    if monitor.step(batch.sparse_features):  # a window has closed
        proposal = monitor.propose()
        if proposal.in_place:
            monitor.apply(dmp)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from predictor.errors import InputError, PlanError
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import check_plan
from predictor.model.plan_json import load_plan
from predictor.model.workload import Workload
from predictor.units import gib
from search.in_use.in_place import allowed_in_place
from search.in_use.plan import PlanInUse
from search.stop import Stop
from shardopt.api.request import Machine
from shardopt.api.setting import resolve
from shardopt.extras import needs_torchrec
from shardopt.live.proposal import Proposal, find_proposal, observed_workload
from shardopt.live.reshard import reshard
from shardopt.live.window import StepWindow
from shardopt.torchrec.collective import on_first_rank, search_seconds
from shardopt.torchrec.running import find_lost_state, find_mismatches

with needs_torchrec():
    import torch.distributed as dist


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
        given = plan if isinstance(plan, ShardingPlan) else load_plan(plan)
        self._setting = resolve(model, machine or Machine(), given)
        self.plan = check_plan(given, self._setting.workload, where="plan")
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
        """To be called once a step, on every rank.

        Args:
            features: the ids of the step's batch: its KeyedJaggedTensor, or a mapping of several;
                best those on the host, which need no copy from the device.

        Returns:
            Whether a window has just closed, which is so on all ranks at once.
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
        if self.proposal is None:
            raise InputError("nothing was proposed yet; call propose()")
        reshard(dmp, self.proposal)
        self.follow(dmp)

    def follow(self, dmp: Any) -> None:
        """Watch the model that runs the last proposal, after a move through a checkpoint
        (`save_for_plan` and `load_under_plan` of `shardopt.torchrec`).

        Raises:
            InputError: nothing was proposed.
            PlanError: the model runs another plan.
        """
        if self.proposal is None:
            raise InputError("nothing was proposed yet; call propose()")
        _check_running(dmp, self.proposal.plan)
        self.plan, self.proposal = self.proposal.plan, None
        self.window, self._closed = self._new_window(self.window.credit_s), None

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
        workload = observed_workload(self._setting.workload, window.statistics(rows), path)
        problem = replace(self._setting.problem(), workload=workload)
        max_moves, max_bytes, horizon = self._limits
        in_use = PlanInUse(self.plan, max_moves, max_bytes, horizon, self._allows(workload))
        stop = Stop(self._effort, search_seconds(self._timeout_s))
        return find_proposal(
            problem, in_use, stop, measured_ms=window.step_ms, stats_file=str(path)
        )

    def _allows(self, workload: Workload) -> Callable[[str, TablePlan], bool]:
        """What a table may change to: in place, or so that a checkpoint keeps its state."""
        tables = dict(zip(workload.keys, workload.tables, strict=True))
        now = self.plan
        if not self._any_move:
            return allowed_in_place(tables, now)
        return lambda key, after: not find_lost_state(tables[key], now.tables[key], after)


def _check_running(dmp: Any, plan: ShardingPlan) -> None:
    differs = list(find_mismatches(dmp, plan))
    if differs:
        raise PlanError(f"the plan is not the one that runs: {'; '.join(differs)}")
