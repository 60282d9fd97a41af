"""Out of one trace: programs are those of a capture at the scaled batch, or they are refused."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from predictor.errors import InputError
from predictor.trace.read import load_traces
from shardopt.replay.generate import program_of
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.replay.scale.one import scale_alone
from tests.public_data import TRACES, needs_public_data
from tests.quick import quick_first, quick_only
from tests.shardopt.replay.captured import capture, program, step_of, transformer_step
from tests.shardopt.replay.differences import check_equal, signatures

Make = Callable[[int], Callable[[], None]]
"""Batch -> a step."""


def pair(make: Make, batch: int, times: int, place: Path) -> tuple[RankProgram, RankProgram]:
    """Programs at a batch and at `times` it."""
    one, whole = (program(capture(make(n), place / str(n))) for n in (batch, batch * times))
    return one, whole


def trained(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def layers(*widths: int) -> Make:
    """A classifier of samples."""

    def make(batch: int) -> Callable[[], None]:
        torch.manual_seed(0)
        pairs = pairwise(widths)
        model = nn.Sequential(*[m for a, b in pairs for m in (nn.Linear(a, b), nn.ReLU())])
        x, labels = torch.randn(batch, widths[0]), torch.arange(batch) % widths[-1]
        return trained(model, lambda m: nn.functional.cross_entropy(m(x), labels))

    return make


def forward_alone(*widths: int) -> Make:
    """No gradients, so that no tensor is known for a parameter."""

    def make(batch: int) -> Callable[[], None]:
        model = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])
        x = torch.randn(batch, widths[0])

        def step() -> None:
            with torch.no_grad():
                model(x)

        return step

    return make


class Attention(nn.Module):
    """Over sequences of 8, in 4 heads; the batch is the first or the second extent."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=first)
        self.out = nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
        return made


def attention(first: bool) -> Make:
    def make(batch: int) -> Callable[[], None]:
        sides = (batch, 8) if first else (8, batch)
        x, labels = torch.randn(*sides, 16), torch.zeros(sides, dtype=torch.long)
        return trained(
            Attention(first),
            lambda m: nn.functional.cross_entropy(m(x).flatten(0, 1), labels.flatten()),
        )

    return make


class Towers(nn.Module):
    """Scores of all pairs of samples and candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(10, 6), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x) @ self.right(y).t()


def towers(candidates: Callable[[int], int]) -> Make:
    def make(batch: int) -> Callable[[], None]:
        x, y = torch.randn(batch, 10), torch.randn(candidates(batch), 10)
        labels = torch.arange(batch) % len(y)
        return trained(Towers(), lambda m: nn.functional.cross_entropy(m(x, y), labels))

    return make


def recurrent(first: bool) -> Make:
    def make(batch: int) -> Callable[[], None]:
        model = nn.GRU(6, 8, batch_first=first)
        x = torch.randn(*((batch, 4) if first else (4, batch)), 6)
        return trained(model, lambda m: m(x)[0].sum())

    return make


def squares(batch: int) -> Callable[[], None]:
    """Products over samples, and a penalty on weights that are as large."""
    model = nn.Linear(8, 8)
    x = torch.randn(batch, 8)

    def loss(m: nn.Module) -> torch.Tensor:
        return (m(x).t() @ x).pow(2).mean() + sum((w**2).sum() for w in m.parameters())

    return trained(model, loss)


def head(batch: int) -> Callable[[], None]:
    """Four samples are used apart, whatever the batch."""
    model = nn.Linear(8, 8)
    x = torch.randn(batch, 8)
    return trained(model, lambda m: m(x)[:4].sum() + m(x).mean())


@pytest.mark.parametrize("batch", quick_first(1, [4, 7]))
def test_convnet(batch: int, tmp_path: Path) -> None:
    """4 channels and sides of 8 are multiples of 4 samples as well; its lookup tells the batch."""
    one, whole = pair(step_of, batch, 3, tmp_path)
    made = scale_alone(one, 3)
    check_equal(made, whole)
    assert signatures(made) != signatures(one)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "xlnet"])
@pytest.mark.parametrize("batch", [3, 4])
def test_transformers(family: str, batch: int, tmp_path: Path) -> None:
    """4 divides all widths."""
    pytest.importorskip("torchrec")
    one, whole = pair(partial(transformer_step, family), batch, 3, tmp_path)
    check_equal(scale_alone(one, 3, batch), whole)


EQUAL: list[tuple[Make, int]] = [
    (layers(10, 20, 12, 5), 7),
    (layers(16, 16, 16), 16),
    (layers(16, 16, 8), 8),
    (forward_alone(12, 20, 6), 7),
    (attention(first=True), 3),
    (attention(first=False), 3),
    (squares, 5),
]
REFUSED: list[tuple[Make, int]] = [
    (forward_alone(16, 16, 16), 16),
    (attention(first=True), 8),
    (attention(first=False), 8),
    (towers(lambda batch: batch), 7),
    (towers(lambda batch: 2 * batch), 7),
    (towers(lambda _: 14), 7),
    (recurrent(first=True), 5),
    (recurrent(first=True), 8),
    (recurrent(first=False), 8),
    (head, 8),
]
OPEN: list[tuple[Make, int]] = [
    (attention(first=True), 4),
    (attention(first=False), 2),
    (recurrent(first=False), 4),
    (squares, 4),
    (squares, 8),
    (head, 4),
]
"""Sizes that are alike by chance: none may be scaled wrongly."""


@pytest.mark.parametrize(("make", "batch"), quick_first(2, EQUAL))
def test_what_one_trace_tells(make: Make, batch: int, tmp_path: Path) -> None:
    one, whole = pair(make, batch, 2, tmp_path)
    check_equal(scale_alone(one, 2, batch), whole)


@pytest.mark.parametrize(("make", "batch"), quick_only(REFUSED[1::3], REFUSED))
def test_what_one_trace_does_not_tell(make: Make, batch: int, tmp_path: Path) -> None:
    one, _ = pair(make, batch, 2, tmp_path)
    with pytest.raises(InputError, match="at twice the batch"):
        scale_alone(one, 2, batch)


@pytest.mark.parametrize(("make", "batch"), quick_only(OPEN[2::3], OPEN))
def test_never_wrong(make: Make, batch: int, tmp_path: Path) -> None:
    one, whole = pair(make, batch, 2, tmp_path)
    try:
        made = scale_alone(one, 2, batch)
    except InputError:
        return
    check_equal(made, whole)


@needs_public_data
def test_public_dlrm() -> None:
    """16 samples are the width of its tables, too; its traces have no strides."""
    found = load_traces([TRACES / "dlrm_pytorch_et.tar.gz", TRACES / "dlrm_kineto.tar.gz"])
    one = program_of(found.executions[0], found, Annotations())
    made = scale_alone(one, 2)
    assert [call.op for call in made.calls] == [call.op for call in one.calls]
    sent = [(old.op, old.bytes, new.bytes) for old, new in zip(one.calls, made.calls, strict=True)]
    exchanged = [(a, b) for op, a, b in sent if op == "c10d::alltoall_base_"]
    # lengths of ids to come are of ranks and features
    assert exchanged == [(n, n if n == 192 else 2 * n) for n, _ in exchanged]
    reduced = [(a, b) for op, a, b in sent if op == "c10d::allreduce_"]
    assert len(reduced) == 3
    assert all(a == b for a, b in reduced)


def test_the_batch_must_be_known(tmp_path: Path) -> None:
    one = program(capture(layers(6, 3)(5), tmp_path))
    with pytest.raises(InputError, match="give the samples"):
        scale_alone(one, 2)
    with pytest.raises(InputError, match="batch of one sample"):
        scale_alone(one, 2, 1)
    with pytest.raises(InputError, match="11 samples"):
        scale_alone(one, 2, 11)
    bags = program(capture(step_of(6), tmp_path / "bags"))
    with pytest.raises(InputError, match=r"6 bags, .* 4 samples"):
        scale_alone(bags, 2, 4)
