"""Models beside the DLRM: built from kind and sizes, trained by one step, refused when they do not
fit their tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.architecture import KINDS, Architecture
from lab.rankers import BODIES, Ranker, RankerBuilder, model_facts
from predictor.errors import InputError
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.training.batch import synthetic_batch

pytest.importorskip("torchrec")


BAGS = tuple(Table(f"t{i}", 100, 16, (Feature(f"f{i}", 2.5),)) for i in range(3))
WIDE = tuple(Table(f"w{i}", 50, 8, (Feature(f"g{i}", 1.5),), "wide") for i in range(2))
HISTORIES = tuple(
    Table(f"s{i}", 100, 16, (Feature(f"h{i}", n),), "ec", pooling="none")
    for i, n in enumerate((5.5, 7.5, 1.0))
)
BATCH = 8
SMALL = {
    "dcn_v2": (BAGS, {"bottom": (32,), "layers": 2, "low_rank": 4, "top": (24,)}),
    "deepfm": (BAGS, {"hidden": 32, "deep": 24}),
    "mmoe": (BAGS, {"experts": 3, "expert": (32, 16), "tasks": 2, "tower": (8,)}),
    "two_dims": (BAGS + WIDE, {"bottom": (8,), "first": (24,), "second": (16,), "top": (8,)}),
    "sasrec": (BAGS + HISTORIES, {"length": 6, "blocks": 2, "heads": 2, "top": (8,)}),
    "hstu": (BAGS + HISTORIES, {"length": 6, "blocks": 2, "heads": 2, "top": (8,)}),
}
LINEARS = {
    "dcn_v2": [[13, 32], [32, 16], [64, 24], [24, 1]],
    "deepfm": [[13, 32], [32, 16], [64, 24], [41, 1]],
    "two_dims": [[13, 8], [48, 24], [16, 16], [48, 8], [8, 1]],
    "sasrec": [*(2 * [[16, 16], [16, 64], [64, 16]]), [13 + 2 * 16 + 48, 8], [8, 1]],
}


def workload(kind: str) -> Workload:
    return Workload("small", BATCH, SMALL[kind][0], DenseArch(13, (1,), (1,), "concat"))


def architecture(kind: str) -> Architecture:
    return Architecture(kind, 13, SMALL[kind][1])


def test_every_kind_has_a_body_and_a_case_here() -> None:
    assert set(KINDS) == set(BODIES) == set(SMALL)


@pytest.mark.parametrize("kind", SMALL)
def test_every_parameter_learns(kind: str) -> None:
    module = RankerBuilder(architecture(kind))(workload(kind), "cpu")
    loss, predicted = module(synthetic_batch(workload(kind)))
    loss.backward()
    assert torch.isfinite(loss)
    assert predicted.shape == (BATCH, 2 if kind == "mmoe" else 1)
    assert all(p.grad is not None for p in module.parameters())
    assert all(bool(p.grad.abs().sum()) for p in module.body.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", LINEARS)
def test_linear_layers(kind: str) -> None:
    facts = model_facts(workload(kind), architecture(kind))
    assert sorted(facts["linears"]) == sorted(LINEARS[kind])


def test_tables_lie_on_meta_and_the_body_does_not() -> None:
    module = RankerBuilder(architecture("hstu"))(workload("hstu"), "meta")
    where = {name: p.device.type for name, p in module.named_parameters()}
    assert {where[name] for name in where if name.startswith("body.")} == {"cpu"}
    assert {where[name] for name in where if not name.startswith("body.")} == {"meta"}
    assert set(module.sparse) == {"ebc", "ec"}


def test_a_long_history_is_cut_and_padding_is_zero() -> None:
    module = RankerBuilder(architecture("sasrec"))(workload("sasrec"), "cpu")
    assert isinstance(module, Ranker)
    batch = synthetic_batch(workload("sasrec"))
    rows = module.ec(batch.sparse["ec"])["h1"]
    padded = module.body._padded(rows, 6)
    lengths = rows.lengths().tolist()
    assert set(lengths) == {7, 8}
    assert padded.shape == (BATCH, 6, 16)
    assert torch.equal(padded[0], rows.values()[:6])
    short = module.body._padded(module.ec(batch.sparse["ec"])["h0"], 6)
    first = module.ec(batch.sparse["ec"])["h0"].lengths()[0]
    assert not short[0, int(first) :].abs().sum()


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_future_is_not_seen(kind: str) -> None:
    module = RankerBuilder(architecture(kind))(workload(kind), "cpu")
    x = torch.randn(2, 6, 16)
    changed = x.clone()
    changed[:, 3:] += 1
    before, after = module.body.blocks(x), module.body.blocks(changed)
    assert torch.allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert not torch.allclose(before[:, 3:], after[:, 3:], atol=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="dcn_v2"):
        RankerBuilder(architecture("dcn_v2"))(workload("two_dims"), "cpu")
    tables = tuple(replace(t, module="body") for t in BAGS)
    with pytest.raises(InputError, match="body"):
        RankerBuilder(architecture("mmoe"))(replace(workload("mmoe"), tables=tables), "cpu")
