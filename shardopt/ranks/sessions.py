"""Sessions of plans in ranks that are there: in a training script, or under torchrun.

All ranks make the same calls. Every session has a process group of its own, on which its plans are
built and torn down. Where a step fails on a rank, that rank aborts the group, which wakes those
that wait for it. All then agree over a second group on what failed and go on without it. A rank
that is killed ends the job.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from predictor.errors import InfeasibleError
from shardopt.extras import needs_torchrec
from shardopt.logs import logger, silence_torchrec
from shardopt.race import Race, run_session
from shardopt.ranks.clock import steps_ms, trace_steps
from shardopt.ranks.rank import Report, Talk

with needs_torchrec():
    import torch
    import torch.distributed as dist

BLOCK = 6
"""Steps of a plan in a round, after one that does not count, and in its warm-up."""
STUCK = timedelta(minutes=5)
"""Time that a rank waits for another within a step."""
LOOK_S = 0.2
"""Between looks for a rank that has failed."""

Step = Callable[[], object]
Make = Callable[[Any, Any], Step]
"""Builds a plan on a process group, and gives its training step."""


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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


def abort_nccl(group: Any) -> None:
    """Give up a process group of NCCL on this rank, whatever its kernels wait for."""
    group._get_backend(torch.device("cuda")).abort()


def rendezvous() -> Any:
    """The store that all ranks share."""
    return dist.distributed_c10d._get_default_store()
