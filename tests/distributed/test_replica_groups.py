"""Four ranks in two sharding groups train under `DMPCollection` as the prediction says.

The ranks run without assertions: see `CpuCollection`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import batched_embedding_kernel as kernels
from torchrec.distributed.planner import Topology

from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingType
from predictor.model.topology import DEFAULT, FULLY_SHARDED, ReplicaGroups
from predictor.model.workload import Constraints, Workload
from predictor.predict import Prediction, predict
from shardopt.torchrec import ShardoptPlanner
from shardopt.torchrec.convert import to_torchrec
from shardopt.torchrec.machine import Replicas, find_replicas
from shardopt.training.cpu_collection import CpuCollection
from shardopt.training.loop import apply_sparse_optimizers
from shardopt.training.model import build_model
from tests.distributed import training_case as case
from tests.distributed.ranks import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
T = ShardingType
WORLD, GROUP = 4, 2
STEPS, INTERVAL = 4, 2


@pytest.fixture(autouse=True)
def without_assertions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DMPCollection` asserts that there is a GPU."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")


def of_groups(model: Workload) -> Workload:
    """The model in sharding groups of two ranks."""
    return replace(model, replica_groups=ReplicaGroups(GROUP, INTERVAL))


def model_of_groups() -> Workload:
    """Tables of several modules, optimizers and precisions, each with one way to be sharded."""
    workload = case.workload()
    # TorchRec takes constraints by table name alone: no two tables of one name
    types = (T.TABLE_WISE, T.TABLE_WISE, T.COLUMN_WISE, T.TABLE_WISE)
    tables = [
        replace(table, constraints=Constraints(sharding_types=(kind,)))
        for table, kind in zip(workload.tables[:-1], types, strict=True)
    ]
    tables[2] = replace(tables[2], data_type="fp16", optimizer="exact_adagrad")
    return of_groups(replace(workload, tables=tuple(tables)))


def a_host() -> Topology:
    return Topology(WORLD, "cpu", local_world_size=WORLD)


def collection(kind: type[CpuCollection], model: nn.Module, plan: Any, replicas: Replicas) -> Any:
    """The model in both groups."""
    return kind(
        model,
        case.CPU,
        plan,
        global_pg=dist.GroupMember.WORLD,
        sharders=case.SHARDERS,
        **replicas.collection_arguments,
    )


class Noted(CpuCollection):
    """Notes what it averages, and whether that became the mean."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_mean = True
        super().__init__(*args, custom_all_reduce=self.note, **named)

    def note(self, tensors: list[torch.Tensor]) -> None:
        """Average, and compare with what all copies had."""
        group = self.device_mesh.get_group("replicate")
        before = []
        for tensor in tensors:
            copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, tensor.contiguous(), group=group)
            before.append(torch.stack([copy.float() for copy in copies]).mean(dim=0))
        size = sum(t.numel() * t.element_size() for t in tensors)
        self.calls.append((str(tensors[0].dtype), size))
        self.average(tensors)
        for tensor, mean in zip(tensors, before, strict=True):
            self.is_mean &= torch.allclose(tensor.float(), mean, rtol=2e-3, atol=1e-4)


def planned(workload: Workload, model: nn.Module) -> tuple[Any, Replicas, Prediction | None]:
    """The plan of all ranks together; foretold on rank 0, which planned."""
    planner = ShardoptPlanner(a_host(), model=workload, effort=case.EFFORT, debug=False)
    plan = planner.collective_plan(model, case.SHARDERS)
    assert planner.replicas is not None
    return plan, planner.replicas, planner.found and planner.found.prediction


def written(workload: Workload, model: nn.Module) -> tuple[Any, Replicas, Prediction | None]:
    """A plan by hand with the rows of every table over the ranks of a group: on CPUs TorchRec's
    sharders offer no row split of a pooled table."""
    replicas = find_replicas(workload.replica_groups, a_host(), "cpu-gloo", None)
    assert replicas is not None
    plan = case.uniform_plan(T.ROW_WISE, GROUP, GROUP)
    foretold = predict(workload, replicas.group, load_hardware("cpu-gloo"), plan)
    return to_torchrec(plan, model, device="cpu"), replicas, foretold


def train_in_groups(by_hand: bool) -> dict[str, Any]:
    """Plan together, train, average; say what was foretold and what was done."""
    workload = of_groups(case.workload()) if by_hand else model_of_groups()
    torch.manual_seed(0)
    model = build_model(workload, "meta")
    apply_sparse_optimizers(model, workload)
    plan, replicas, foretold = written(workload, model) if by_hand else planned(workload, model)
    sharded = collection(Noted, model, plan, replicas)
    losses = []
    for first in range(0, STEPS, INTERVAL):
        losses += case.train(sharded, workload, case.own_batches(workload, INTERVAL, first))
        sharded.sync()
    dense = [
        p for n, p in sharded.named_parameters() if "embedding" not in n and p.device.type == "cpu"
    ]
    return {
        "losses": losses,
        "calls": sharded.calls,
        "is_mean": sharded.is_mean,
        "dense": sum(float(p.double().sum()) for p in dense),
        "mesh": sharded.device_mesh.mesh.tolist(),
        "sync": foretold and foretold.replica_sync,
    }


@pytest.mark.parametrize("by_hand", [False, True], ids=["planned", "row_wise"])
def test_copies_are_averaged_byte_for_byte(by_hand: bool) -> None:
    ranks = on_ranks(train_in_groups, by_hand, ranks=WORLD)
    foretold = ranks[0]["sync"]
    assert ranks[0]["mesh"] == [[0, 2], [1, 3]]
    for rank, result in enumerate(ranks):
        assert all(0 < loss < 1 for loss in result["losses"])
        assert result["is_mean"]
        place = rank // GROUP
        # every second step of four
        first = result["calls"][: len(result["calls"]) // 2]
        assert result["calls"] == first * 2
        # weights a data type at a time, then the states of all
        *weights, states = first
        assert states[1] == foretold.state_bytes[place]
        assert sum(size for _, size in weights) == foretold.weight_bytes[place]
        assert result["dense"] == pytest.approx(ranks[0]["dense"]), "reduced over all ranks"


# --- fully sharded copies ------------------------------------------------------------------------
# TorchRec's code runs on CPUs with stand-ins for three things: CUDA streams and events, the
# reduce-scatter with a mean, which gloo does not have, and the tensor that a lookup on a GPU reads
# its weights from.

KINDS = (T.ROW_WISE, T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE, T.TABLE_WISE)
scattered: list[tuple[int, int]] = []
"""Bytes that a call averages, and of the part that it leaves."""
gathered: list[int] = []


class Done:
    """A stream, an event, or work that is done."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Done


def scatter(output: torch.Tensor, input: torch.Tensor, op: Any, group: Any, async_op: bool) -> Done:
    """The mean, of which every copy keeps its part."""
    if op != dist.ReduceOp.AVG:
        raise ValueError(op)
    scattered.append((input.nbytes, output.nbytes))
    total = input.detach().clone()
    dist.all_reduce(total, group=group)
    copies = dist.get_world_size(group)
    output.copy_((total / copies).view(copies, -1)[dist.get_rank(group)])
    return Done()


def gather_and_note(**named: Any) -> Any:
    """`all_gather_into_tensor`."""
    gathered.append(named["output_tensor"].nbytes)
    return dist.all_gather_into_tensor(**named)


def on_cpu() -> None:
    """Put the stand-ins in place."""
    torch.cuda.Stream = torch.cuda.Event = Done
    torch.cuda.current_stream = Done
    torch.cuda.stream = lambda stream: nullcontext()
    noted = {"reduce_scatter_tensor": scatter, "all_gather_into_tensor": gather_and_note}
    kernels.dist = SimpleNamespace(**vars(dist) | noted)
    for kernel in (kernels.BatchedFusedEmbedding, kernels.BatchedFusedEmbeddingBag):
        kernel.__init__ = on_host(kernel.__init__)


def on_host(init: Any) -> Any:
    """A constructor behind which the weights of a GPU are those of the host."""

    def make(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        lookup = self._emb_module
        del lookup.weights_dev
        lookup.register_buffer("weights_dev", lookup.weights_host.data)

    return make


def foretold(strategy: str) -> tuple[Prediction, Any, Any]:
    """Predict the strategy on GPUs, the only devices with known costs for it."""
    groups = ReplicaGroups(GROUP, sharding_strategy=strategy)
    replicas = find_replicas(groups, a_host(), "cpu-gloo", None)
    plan = case.make_plan(KINDS, GROUP, GROUP)
    load = replace(case.workload(), replica_groups=groups)
    return predict(load, replicas.group, load_hardware("h100-sxm"), plan), plan, replicas


def train_scattered() -> list[dict[str, float]]:
    """Train, and say what moved in each step."""
    on_cpu()
    workload = case.workload()
    _, plan, replicas = foretold(FULLY_SHARDED)
    torch.manual_seed(dist.get_rank())  # copies begin apart
    model = build_model(workload, "meta")
    apply_sparse_optimizers(model, workload)
    of_torchrec = to_torchrec(plan, model, device="cpu")
    sharded = collection(CpuCollection, model, of_torchrec, replicas)
    steps = []
    for batch in case.own_batches(workload, 3):
        scattered.clear()
        gathered.clear()
        (loss,) = case.train(sharded, workload, [batch])
        whole, parts = (sum(sizes) for sizes in zip(*scattered, strict=True))
        moved = {"scattered": whole, "parts": parts, "gathered": sum(gathered)}
        steps.append({"loss": loss, **moved})
    return steps


def test_parts_of_copies_move_byte_for_byte() -> None:
    predicted, plain = foretold(FULLY_SHARDED)[0], foretold(DEFAULT)[0]
    weight_bytes = predicted.replica_sync.weight_bytes
    parts = [a.hbm_bytes - b.hbm_bytes for a, b in zip(predicted.memory, plain.memory, strict=True)]
    for rank, steps in enumerate(on_ranks(train_scattered, ranks=WORLD)):
        place = rank // GROUP
        for step in steps:
            assert 0 < step["loss"] < 1
            assert step["scattered"] == step["gathered"] == weight_bytes[place]
            assert step["parts"] == parts[place]
