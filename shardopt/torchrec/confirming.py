"""Plans run for real in a training script, on copies of the user's module.

The user's training is left as it was: the tables of the copies begin on the meta device, and the
states of the random generators are put back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from predictor.errors import InputError
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
)
from shardopt.ranks.rank import Talk
from shardopt.ranks.sessions import JoinedSessions, Step, free_memory
from shardopt.torchrec.collective import joined
from shardopt.torchrec.private import keep_optimizers
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


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@dataclass(frozen=True)
class Confirm:
    """Settings of the measurement of plans in a training script.

    Args:
        batches: data loader of this rank; `BATCHES` of its batches are used. Give the loader, not
            an iterator, which would lose them.
        optimizer: makes the optimizer of the parameters that no fused optimizer steps; plain SGD by
            default.
        pipeline: makes a train pipeline from model, optimizer and device, like TorchRec's classes.
            The module returns loss and outputs, as these classes require.
        plans: number of the best plans that are measured, in addition to TorchRec's.
        minutes: time limit of the whole measurement.
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
                    "the data loader of a rank yields no batch; give a loader that can be iterated "
                    "more than once"
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
