"""Plans run for real in the process group that there is: in a training script, or under torchrun.

All ranks make the same calls. Every session has a process group of its own, on which its plans are
built and torn down. Where a step fails on a rank, that rank aborts the group, which wakes those
that wait for it. All then agree over a second group on what failed and go on without it. A rank
that is killed ends the job.

The user's training is left as it was: what runs are copies of the module, whose tables begin on the
meta device, and the states of the random generators are put back.

Tests run the CUDA path on a stand-in for a device.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from predictor.errors import InfeasibleError, InputError
from shardopt.extras import needs_torchrec
from shardopt.race import (
    MINUTES,
    PLANS,
    Confirmation,
    Entrant,
    Race,
    deadlines,
    run_final,
    run_race,
    run_session,
)
from shardopt.ranks.clock import steps_ms, trace_steps
from shardopt.ranks.rank import Report, Talk
from shardopt.torchrec.collective import joined
from shardopt.torchrec.logs import logger, silence_torchrec
from shardopt.torchrec.private import abort_nccl, keep_optimizers, rendezvous
from shardopt.torchrec.tables import fill_cheaply, trained_copy

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.train_pipeline import TrainPipelineBase
    from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
    from torchrec.optim.optimizers import in_backward_optimizer_filter

BATCHES = 16
"""Batches of the user's data to cycle through."""
BLOCK = 6
"""Steps of a plan in a round, after one that does not count, and in its warm-up."""
STUCK = timedelta(minutes=5)
"""Time that a rank waits for another within a step."""
LOOK_S = 0.2
"""Between looks for a rank that has failed."""

Step = Callable[[], object]
Make = Callable[[Any, Any], Step]
"""Builds a plan on a process group, and gives its training step."""


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@dataclass(frozen=True)
class Confirm:
    """Settings of the measurement of plans in a training script.

    Args:
        batches: the data loader of this rank; `BATCHES` of its batches are used. An iterator would
            lose them, so give what iterators are made from.
        optimizer: makes the optimizer of what no fused one steps; plain SGD by default.
        pipeline: makes a train pipeline of model, optimizer and device, as those of TorchRec. The
            module returns loss and outputs, as they want it.
        plans: how many of the best plans are measured beside TorchRec's.
        minutes: that all of it may take.
    """

    batches: Iterable[Any]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _sgd
    pipeline: Callable[[nn.Module, torch.optim.Optimizer, torch.device], Any] = TrainPipelineBase
    plans: int = PLANS
    minutes: float = MINUTES


def confirm(
    module: nn.Module,
    plans: Mapping[str, ShardingPlan],
    how: Confirm,
    *,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    device: torch.device | None = None,
) -> Confirmation:
    """Run copies of a module under several plans and find the fastest; collective over all ranks.

    Args:
        module: unsharded, on the CPU or the meta device.
        plans: by name; that of TorchRec's planner, if it is there, is ``torchrec``.
        sharders: as `DistributedModelParallel` takes them.
        device: of this rank; the current GPU, or the CPU with gloo.

    Raises:
        InputError: there is no process group, no batch, or no plan that could be timed.
    """
    if not joined():
        raise InputError(
            "confirming plans needs a process group; call init_process_group() first, with a batch "
            "loader on every rank"
        )
    if device is None:
        device = torch.device("cpu")
        if dist.get_backend() != "gloo":
            device = torch.device("cuda", torch.cuda.current_device())
    with untouched(how.batches):
        batches = list(itertools.islice(how.batches, BATCHES))
        make = partial(_step_of, module, sharders, batches, how, device)
        sessions = JoinedSessions(make, device, Talk())
        try:
            if not all(sessions.talk.gather(bool(batches))):
                raise InputError(
                    "the data loader of a rank gives no batch; give one that can be iterated anew"
                )
            race = Race()
            # TorchRec's plans of modules all count as equal
            tables = {
                name: {k: dict(sharding) for k, sharding in p.plan.items()}
                for name, p in plans.items()
            }
            race.enter({name: Entrant(plans[name], name, tables[name]) for name in plans})
            deadline, end = deadlines(sessions.now(), how.minutes)
            run_race(race, sessions, deadline, sessions.tell)
            run_final(race, sessions, end, sessions.tell)
            return race.confirmation()
        finally:
            sessions.talk.close()


@contextmanager
def untouched(loader: object) -> Iterator[None]:
    """Put the states of the random generators back, those of a data loader too, and leave no memory
    behind."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    generators = [
        getattr(source, "generator", None) for source in (loader, getattr(loader, "sampler", None))
    ]
    own = [(rng, rng.get_state()) for rng in generators if isinstance(rng, torch.Generator)]
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)
        for generator, state in own:
            generator.set_state(state)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
        free_memory()


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _step_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]] | None,
    batches: Sequence[Any],
    how: Confirm,
    device: torch.device,
    plan: ShardingPlan,
    group: Any,
) -> Step:
    """The step of a copy of the user's module under a plan."""
    chosen = list(sharders or get_default_sharders())
    sharded = DistributedModelParallel(
        copy_of(module, chosen),
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=chosen,
    )
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    pipeline = how.pipeline(sharded, how.optimizer(rest.values()), device)
    ring = itertools.cycle(batches)
    return lambda: pipeline.progress(ring)


def copy_of(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> nn.Module:
    """A copy for training whose tables are on the meta device, with the optimizers they had."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    memo: dict[int, Any] = {}
    for child in module.modules():
        sharder = by_type.get(type(child))
        for weight in () if sharder is None else sharder.shardable_parameters(child).values():
            meta = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            keep_optimizers(weight, meta)
            memo[id(weight)] = meta
    copied = trained_copy(module, memo)
    fill_cheaply(copied)
    return copied


@dataclass(frozen=True)
class _Outcome:
    """Result of a task on one rank.

    Args:
        why: it failed.
        task: that it was at.
        memory: there was too little of it.
        interrupted: by the user.
    """

    value: Any = None
    why: str | None = None
    task: str = ""
    memory: bool = False
    interrupted: bool = False
    at: float = 0.0


class _FailedError(Exception):
    def __init__(self, outcome: _Outcome) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


class JoinedSessions:
    """`shardopt.race.Sessions` in ranks that are there; all ranks make the same calls.

    Args:
        make: builds a plan and gives its step.
        folder: for the traces of each plan; None to record none. Only the first rank writes there.
    """

    def __init__(
        self, make: Make, device: torch.device, talk: Talk, folder: Path | None = None
    ) -> None:
        self.make, self.device, self.talk, self.folder = make, device, talk, folder
        self.first = dist.get_rank() == 0
        self.traced: set[str] = set()
        """Plans that need no further trace."""
        self.report: Report = lambda message: None
        """Gets every round, and the name of the plan that this rank turns to."""
        self._groups = 0

    def now(self) -> float:
        """The clock of the first rank."""
        return float(self.talk.share(time.time()))

    def tell(self, text: str) -> None:
        """Log, on the first rank."""
        if self.first:
            logger.info(text)

    def run(
        self, race: Race, session: int, order: Sequence[str], until: float
    ) -> Mapping[str, str]:
        """See `shardopt.race.Sessions`; all ranks raise alike."""
        try:
            self._run(race, session, order, until)
        except _FailedError as error:
            outcome = error.outcome
        else:
            return {}
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.memory:
            raise InfeasibleError(outcome.why or "")
        rest = [name for name in order if name != outcome.task]
        out = {outcome.task: outcome.why or ""}
        return {**out, **run_session(self, race, session, rest, until)}

    def _run(self, race: Race, session: int, order: Sequence[str], until: float) -> None:
        self._groups += 1
        built = _Built(self.make, self.device, self._groups)

        def do(tasks: Mapping[str, Callable[[], Any]]) -> list[dict[str, Any]]:
            outcome = _try(tasks, self.report)
            if outcome.why is not None:
                built.give_up()
            answers: list[_Outcome] = self.talk.gather(outcome)
            failed = [answer for answer in answers if answer.why is not None]
            if failed:  # the others failed as they waited for the first
                first = min(failed, key=lambda s: (not s.interrupted, not s.memory, s.at))
                raise _FailedError(first)
            return [answer.value for answer in answers]

        try:
            with silence_torchrec():
                do({order[0]: built.connect})
                for name in order:
                    do({name: partial(built.build, name, race.entrants[name].plan)})
                blocks = {name: partial(built.block_ms, name) for name in order}
                do(blocks)  # warms up
                for index in itertools.count():
                    turns = random.Random(f"{session} {index}").sample(order, len(order))
                    by_rank = do({name: blocks[name] for name in turns})
                    key = (session, index)
                    ms = {name: max(times[name] for times in by_rank) for name in order}
                    race.add(key, ms)
                    self.report({"kind": "round", "key": key, "ms": ms})
                    if self.now() >= until:
                        break
                for name in order:
                    if self.folder is not None and name not in self.traced:
                        self.traced.add(name)
                        traces = do({name: partial(built.trace, name)})
                        for rank, by_name in enumerate(traces if self.first else ()):
                            path = self.folder / name.replace(" ", "-") / f"rank{rank}.json"
                            path.parent.mkdir(parents=True, exist_ok=True)
                            path.write_bytes(by_name[name])
        finally:
            built.close()


class _Built:
    """Plans that are built on this rank, and their process group.

    Nothing else may refer to the group: gloo wakes the ranks that wait for this one only when the
    last reference is gone, which closes its connections.
    """

    def __init__(self, make: Make, device: torch.device, number: int) -> None:
        self.make, self.device = make, device
        self.steps: dict[str, Step] = {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.group: Any = dist.new_group(backend=backend, timeout=STUCK)
        self.alarm = Alarm(self.group, number) if device.type == "cuda" else None

    def connect(self) -> None:
        """Meet all ranks before one can fail: NCCL connects them at the first collective, and no
        alarm wakes those that wait for it."""
        dist.barrier(self.group)

    def build(self, name: str, plan: Any) -> None:
        """Build a plan."""
        self.steps[name] = self.make(plan, self.group)

    def block_ms(self, name: str) -> float:
        """The median of some steps that all ranks begin together."""
        dist.barrier(self.group)
        return statistics.median(steps_ms(self.steps[name], 1 + BLOCK, self.device)[1:])

    def trace(self, name: str) -> bytes:
        """A trace of some steps."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace_steps(self.steps[name], path, self.device)
            return path.read_bytes()

    def give_up(self) -> None:
        """This rank has failed: let the others notice."""
        if self.alarm is not None:
            self.alarm.sound()
        self.close()

    def close(self) -> None:
        """Leave the group and give back the memory; not collective."""
        if self.alarm is not None:
            self.alarm.stop()
        self.steps.clear()
        if self.group is not None:
            group, self.group = self.group, None
            with suppress(RuntimeError, ValueError, AssertionError):  # it may be aborted
                dist.destroy_process_group(group)
            del group
        free_memory()


def _try(tasks: Mapping[str, Callable[[], Any]], report: Report) -> _Outcome:
    """Run tasks, each named by its plan, and return their values or the first error."""
    task, values = "", {}
    try:
        for task, action in tasks.items():
            report({"kind": "plan", "name": task})
            values[task] = action()
    except (Exception, KeyboardInterrupt) as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"rank {dist.get_rank()}: {type(error).__name__}: {lines[0]}"
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        )
        stop = isinstance(error, KeyboardInterrupt)
        return _Outcome(why=why, task=task, memory=memory, interrupted=stop, at=time.time())
    return _Outcome(values)


class Alarm:
    """Aborts an NCCL group on this rank once another rank has failed.

    A failed rank of gloo closes its connections, which the others notice. NCCL's kernels would wait
    until its watchdog ends the process.
    """

    def __init__(self, group: Any, number: int) -> None:
        self.group, self.key = group, f"shardopt.confirm.{number}"
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.over.wait(LOOK_S):
            if rendezvous().check([self.key]):
                abort_nccl(self.group)
                return

    def sound(self) -> None:
        """Tell the other ranks; this one aborts at once."""
        rendezvous().set(self.key, "failed")
        abort_nccl(self.group)

    def stop(self) -> None:
        """There is nothing to watch any more."""
        self.over.set()
        self.thread.join()
        self.group = None
