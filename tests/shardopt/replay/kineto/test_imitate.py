"""Programs out of Kineto traces alone, against the execution traces of the same steps."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from predictor.trace.execution import Node
from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, is_composite, programs_of
from shardopt.replay.kineto.imitate import Imitation, imitate
from shardopt.replay.launch import replay
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.replay.program.select import Tree, choose
from shardopt.replay.program.tensors import tensors_of
from tests.public_data import TRACES, needs_public_data
from tests.quick import quick_first
from tests.shardopt.replay.captured import capture, transformer_step


def alone(folder: Path) -> Path:
    """The Kineto trace of rank 0, without the execution trace beside it."""
    place = folder / "alone"
    place.mkdir(exist_ok=True)
    shutil.copy(folder / "rank0.kineto.json", place)
    return place / "rank0.kineto.json"


def imitation(path: Path) -> Imitation:
    return imitate(load_traces([path], keep_args=True).traces[0])


def bag_step():
    """Lookups in bags of uneven lengths with weights, a product of sums, Adagrad."""
    import torch

    torch.manual_seed(0)
    bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(40, 6, mode="sum") for _ in range(3))
    top = torch.nn.Linear(18, 1)
    optimizer = torch.optim.Adagrad([*bags.parameters(), *top.parameters()])
    ids, starts = torch.randint(40, (17,)), torch.tensor([0, 4, 9, 11])
    weights = torch.rand(17)

    def step() -> None:
        optimizer.zero_grad()
        pooled = torch.cat([bag(ids, starts, per_sample_weights=weights) for bag in bags], dim=1)
        torch.sigmoid(top(pooled)).mean().backward()
        optimizer.step()

    return step


@pytest.fixture(scope="module", params=["convnet", "transformer", "bags"])
def captured(
    request: pytest.FixtureRequest, traces: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "convnet":
        return traces
    step = transformer_step() if request.param == "transformer" else bag_step()
    return capture(step, tmp_path_factory.mktemp(request.param))


def test_ops_are_those_of_the_execution_trace(captured: Path) -> None:
    """Same ops in order, with the same schemas, shapes, strides, types and whole numbers.

    Exceptions: ops made of others are opened, and what then moves no data may be missing.
    """
    (truth,) = load_traces([captured]).executions
    found = imitation(alone(captured))
    assert not found.left_out
    ours = [of.node for of in found.chosen]
    tree = Tree(truth)
    missing: list[Node] = []

    def follow(node: Node, at: int) -> int:
        if at < len(ours) and ours[at].name == node.name and specs(ours[at]) == specs(node):
            assert ours[at].schema == node.schema
            assert wholes(ours[at]) == wholes(node)
            return at + 1
        if node.schema and not tree.children[node.id]:
            missing.append(node)
        for child in tree.children[node.id]:
            at = follow(child, at)
        return at

    at = 0
    for of in choose(truth, is_composite):
        at = follow(of.node, at)
    assert at == len(ours) > 50
    assert not missing


def specs(node: Node) -> list:
    return [
        None if of is None else (of.spec.shape, of.spec.strides, of.spec.dtype)
        for argument in node.inputs
        for of in tensors_of(argument)
    ]


def wholes(node: Node) -> list:
    """Flags, whole numbers and lists of them; texts, devices and what is not given are none."""
    plain = [a.value for a in node.inputs if not any(True for _ in a.tensors())]
    return [value for value in plain if isinstance(value, (bool, int, tuple)) and value != ()]


def test_nothing_is_chained(traces: Path) -> None:
    """What ops take exists before the first, and what they give is let go of."""
    (made,) = programs_of(load_traces([alone(traces)], keep_args=True), Annotations())
    assert all(number in made.made for call in made.calls for number in call.reads())
    assert not any(call.gives() for call in made.calls)
    # one tensor for all calls that take one like it, two for a call that takes two
    written = [made.made[n] for call in made.calls for n in call.reads()]
    assert len(made.made) < len(written) / 2
    product = next(c for c in made.calls if c.op == "aten::mul" and len(c.reads()) == 2)
    assert len(set(product.reads())) == 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    "captured", quick_first(1, ["bags", "transformer", "convnet"]), indirect=True
)
def test_it_runs(captured: Path, tmp_path: Path) -> None:
    generate([alone(captured)], tmp_path / "b", strict=True)
    result = replay(tmp_path / "b", ["--device", "cpu", "--warm-up", "1", "--iterations", "2"])
    assert result["not_replayed"] == {}
    assert result["ops_replayed"] == result["ops_total"] > 50
    assert result["coverage"] == 1.0


def shares(program: RankProgram) -> tuple[float, float]:
    """Share of compute ops that are replayed, and of all recorded host time."""
    calls = program.calls
    compute = sum(not call.is_collective for call in calls)
    replayed, left = sum(c.us or 0 for c in calls), sum(i.us or 0 for i in program.left_out)
    return compute / (compute + len(program.left_out)), replayed / (replayed + left)


@needs_public_data
@pytest.mark.parametrize(
    ("name", "left", "by_count", "by_time"),
    [
        ("hta_trace_diff_control_rank3of8.json.gz", 39, 0.98, 0.95),
        ("hta_trace_diff_test_rank1of2.json.gz", 23, 0.98, 0.98),
    ],
)
def test_public_traces_without_values(
    name: str, left: int, by_count: float, by_time: float
) -> None:
    """What of two jobs of 2022 can be rebuilt: no strides, no values, no shapes in lists."""
    pytest.importorskip("fbgemm_gpu")
    (made,) = programs_of(load_traces([TRACES / name], keep_args=True), Annotations())
    assert len(made.left_out) == left
    count, time = shares(made)
    assert count > by_count
    assert time > by_time
    collectives = Counter(call.op for call in made.calls if call.is_collective)
    assert collectives == {"c10d::alltoall_base_": 7, "c10d::allreduce_": 3}
    assert not [item for item in made.left_out if "c10d" in item.op or "comms" in item.op]
    reasons = {item.op: item.reason for item in made.left_out}
    assert "shapes of the list" in reasons["aten::cat"]
    assert "`dim`" in reasons["aten::sum"]
    assert "no op of this PyTorch" in reasons["fb::offsets_range"]


@needs_public_data
def test_a_public_trace_without_shapes(tmp_path: Path) -> None:
    path = TRACES / "hta_nccl_parser_rank0of2.json.gz"
    made = generate([path], tmp_path / "b")
    (program,) = made.programs
    collectives = [c for c in program.calls if c.is_collective]
    assert program.calls == collectives
    # the five buckets of ResNet-50's gradients, as docs/data.md counts its weights
    sums = [c.bytes or 0 for c in collectives if c.op == "c10d::allreduce_"]
    assert sum(sums) == 25_557_032 * 4
    told = [note for note in made.notes if "record_shapes=True" in note]
    assert len(told) == 1
    with pytest.raises(InputError, match="843 ops would be left out"):
        generate([path], tmp_path / "c", strict=True)


@needs_public_data
def test_collectives_of_eight_ranks_are_those_of_their_execution_traces() -> None:
    kineto, execution = TRACES / "dlrm_kineto.tar.gz", TRACES / "dlrm_pytorch_et.tar.gz"
    alone = programs_of(load_traces([kineto], keep_args=True), Annotations())
    truth = programs_of(load_traces([kineto, execution]), Annotations())
    assert [p.rank for p in alone] == [p.rank for p in truth] == list(range(8))
    for one, other in zip(alone, truth, strict=True):
        sent = [
            [(call.op, call.bytes) for call in made.calls if call.is_collective]
            for made in (one, other)
        ]
        assert sent[0] == sent[1]
        assert len(sent[0]) == 8
