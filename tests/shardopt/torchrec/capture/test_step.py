"""The dense part around embedding modules of all kinds, and what cannot be captured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchrec
from torch import Tensor, nn
from torch.nn import functional
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from predictor.cost.fixed_costs import FixedCosts
from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.dlrm_program import dense_program
from predictor.model.op_calls import DenseProgram, Lookup, LookupBackward, OpCall
from predictor.model.workload import DcnV2, DenseArch, Feature, Table, Workload
from shardopt.config import load_model
from shardopt.config.ops_file import ops_text
from shardopt.torchrec import to_yaml
from shardopt.torchrec.capture.capture import capture_dense
from shardopt.torchrec.tables import find_tables
from shardopt.training.model import build_model
from tests.builders import a_table, a_topology, a_workload, hardware
from tests.shardopt.torchrec.capture.sizes import flop

META = torch.device("meta")


BATCH, DIM = 64, 16


def bags(names: str = "abc", **more: bool) -> torchrec.EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=100, embedding_dim=DIM, feature_names=[name]
        )
        for name in names
    ]
    return torchrec.EmbeddingBagCollection(tables=tables, device=META, **more)


def sequences(names: str) -> torchrec.EmbeddingCollection:
    tables = [
        EmbeddingConfig(
            name=f"t_{name}", num_embeddings=100, embedding_dim=DIM, feature_names=[name]
        )
        for name in names
    ]
    return torchrec.EmbeddingCollection(tables=tables, device=META)


def workload_of(module: nn.Module, ids: float, batch: int) -> Workload:
    tables = tuple(
        Table(
            table.table,
            *table.shape,
            tuple(Feature(name, ids) for name in table.features),
            table.path or "ebc",
            pooling=table.pooling,
        )
        for table in find_tables(module)
    )
    return Workload("m", batch, tables, DenseArch(1, (1,), (1,)))


def captured(module: nn.Module, ids: float = 3.0) -> CapturedDense:
    return capture_dense(module, workload_of(module, ids, BATCH).tables, BATCH)


class Layered(nn.Module):
    """Bags, two layers in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("a")
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)) for _ in range(2)
        )
        self.head = nn.Linear(DIM, 1)

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        x = self.ebc(sparse).values()
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).mean()


def test_ops_know_their_module_in_forward_and_backward(tmp_path: Path) -> None:
    workload = to_yaml(Layered(), tmp_path / "m.yaml", batch_size=BATCH, default_pooling_factor=3.0)
    assert isinstance(workload.dense, CapturedDense)
    program = workload.dense.program(workload)

    def paths(events: Sequence[object], op: str) -> list[str]:
        return [e.path for e in events if isinstance(e, OpCall) and e.name == op]

    assert paths(program.forward, "addmm") == ["layers.0.0", "layers.1.0", "head"]
    assert paths(program.backward, "native_layer_norm_backward") == ["layers.1.1", "layers.0.1"]
    products = ["head", "head", *["layers.1.0"] * 2, *["layers.0.0"] * 2]
    assert paths(program.backward, "mm") == products
    read = load_model(tmp_path / "m.yaml")
    costs = FixedCosts(read, a_topology(2), hardware("h100-sxm")).dense
    assert costs.by_module.keys() == {"layers.0", "layers.1", "head"}
    assert all(backward > forward > 0 for forward, backward in costs.by_module.values())
    assert costs.by_module["layers.0"] == pytest.approx(costs.by_module["layers.1"])


def program_of(module: nn.Module, ids: float = 3.0, batch: int = 1000) -> DenseProgram:
    return captured(module, ids).program(workload_of(module, ids, batch))


TORCHRECS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": lambda: DLRM(bags(), 13, [32, DIM], [32, 1]),
    "train": lambda: DLRMTrain(DLRM(bags(), 13, [32, DIM], [32, 1])),
    "dcn": lambda: DLRMTrain(DLRM_DCN(bags(), 13, [32, DIM], [32, 1], 3, 8)),
    "projection": lambda: DLRM_Projection(
        bags(), 13, [32, DIM], [32, 1], [4 * DIM, DIM * 2], [4 * DIM, DIM * 2]
    ),
    "deepfm": lambda: SimpleDeepFMNN(13, bags(), 32, 8),
}


@pytest.mark.parametrize("interaction", ["dot", "concat", DcnV2(2, 16)])
def test_the_short_form_of_a_dlrm_is_what_its_module_runs(interaction: str | DcnV2) -> None:
    dense = DenseArch(13, (64, DIM), (64, 1), interaction)
    short = a_workload(*(a_table(name, 1000, DIM) for name in "abc"), dense=dense)
    paths = tuple(replace(table, module=f"sparse.{table.module}") for table in short.tables)
    long = replace(short, tables=paths)
    program = capture_dense(build_model(short), paths, short.batch_size).program(long)
    expected = dense_program(short)
    assert flop(program) == flop(expected)
    assert program.gradient_bytes == expected.gradient_bytes


@pytest.mark.parametrize("name", TORCHRECS)
def test_torchrecs_models_are_captured_without_an_example(name: str) -> None:
    module = TORCHRECS[name]()
    program = program_of(module)
    (lookup,) = (e for e in program.forward if isinstance(e, Lookup))
    assert [out.shape for out in lookup.outputs] == [(1000, 3 * DIM)]
    (back,) = (e for e in program.backward if isinstance(e, LookupBackward))
    assert back.module == lookup.module
    assert [gradient.shape for gradient in back.gradients] == [(1000, 3 * DIM)]
    assert program.batch_size == 1000


class Sequential(nn.Module):
    """Histories, padded or as they are."""

    def __init__(self, names: str, forward: Callable[[dict[str, torchrec.JaggedTensor]], Tensor]):
        super().__init__()
        self.ec = sequences(names)
        self.layer = nn.Linear(DIM, 1)
        self.of = forward

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Logits."""
        output: Tensor = self.layer(self.of(self.ec(ids)))
        return output


def products(program: DenseProgram) -> list[tuple[int, ...]]:
    return [
        e.outputs[0].shape
        for e in program.forward
        if isinstance(e, OpCall) and e.name in ("addmm", "mm")
    ]


def padded(features: dict[str, torchrec.JaggedTensor]) -> Tensor:
    return features["a"].to_padded_dense(50)


def together(features: dict[str, torchrec.JaggedTensor]) -> Tensor:
    return torch.cat([features["a"].values(), features["b"].values()])


def square(features: dict[str, torchrec.JaggedTensor]) -> Tensor:
    values = features["a"].values()
    return values.view(-1, 3, DIM)[:, 0] + values.view(len(features["a"].lengths()), 3, DIM)[:, 1]


@pytest.mark.parametrize(
    ("names", "layout", "ids", "rows"),
    [
        ("a", padded, 2.5, 50_000),
        ("ab", together, 2.5, 5000),
        ("a", square, 3.0, 1000),
    ],
)
def test_sequences_have_sizes_of_their_ids(
    names: str, layout: Callable[[dict[str, torchrec.JaggedTensor]], Tensor], ids: float, rows: int
) -> None:
    program = program_of(Sequential(names, layout), ids)
    assert products(program) == [(rows, 1)]
    (lookup,) = (e for e in program.forward if isinstance(e, Lookup))
    assert [out.shape for out in lookup.outputs] == [(int(ids * 1000), DIM)] * len(names)
    tied = captured(Sequential(names, layout), ids).captured.tied_ids
    assert tied == ({"a": ids} if layout is square else {})


def test_lookups_stand_where_the_model_waits_for_them() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = bags("a"), bags("b")
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, ids: KeyedJaggedTensor) -> Tensor:
            x = self.layer(self.first(ids).values())
            return (x * self.second(ids).values()).sum()

    program = program_of(Late())
    events = [
        e.module if isinstance(e, Lookup) else e.name
        for e in program.forward
        if isinstance(e, Lookup) or e.name in ("addmm", "mul")
    ]
    assert events == ["first", "addmm", "second", "mul"]
    back = [e.module for e in program.backward if isinstance(e, LookupBackward)]
    assert back == ["second", "first"]


class Pooled(nn.Module):
    """A linear layer over bags, and something that may not be captured."""

    def __init__(self, after: Callable[[Tensor], Tensor], width: int = 3 * DIM) -> None:
        super().__init__()
        self.ebc = bags()
        self.layer = nn.Linear(width, 1)
        self.after = after

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Whatever the function makes of logits."""
        return self.after(self.layer(self.ebc(ids).values()))


LIBRARY = torch.library.Library("shardopt_tests", "DEF")


LIBRARY.define("twice(Tensor x) -> Tensor")


LIBRARY.impl("twice", lambda x: 2 * x, "CPU")


@pytest.mark.parametrize(
    ("after", "width", "parts"),
    [
        (
            lambda x: x if x.sum() > 0 else -x,
            48,
            ["op aten._local_scalar_dense", "if x.sum() > 0", "depends on the values"],
        ),
        (lambda x: x[x > 0], 48, ["op aten.nonzero", "x[x > 0]", "depends on the values"]),
        (
            lambda x: torch.ops.shardopt_tests.twice(x),
            48,
            ["op shardopt_tests.twice", "no kernel for fake tensors", "register_fake"],
        ),
        (lambda x: x, 47, ["op addmm", "self.layer(self.ebc(ids).values())", "48", "47"]),
        (functional.relu_, 48, []),
    ],
)
def test_what_cannot_be_captured_names_op_and_line(
    after: Callable[[Tensor], Tensor], width: int, parts: Sequence[str]
) -> None:
    if not parts:
        assert captured(Pooled(after, width))
        return
    with pytest.raises(InputError) as error:
        captured(Pooled(after, width))
    words = str(error.value)
    for part in [*parts, f"{Path(__file__).name}:", "measured:", "bottom_mlp:"]:
        assert part in words


def over_lines(x: Tensor) -> Tensor:
    """A call that is written over several lines."""
    return torch.masked_select(
        x,
        x > 0,
    )


def test_a_call_over_several_lines_is_shown_whole() -> None:
    with pytest.raises(InputError, match=r"\(return torch\.masked_select\( x, x > 0, \)\)"):
        captured(Pooled(over_lines))


def test_outputs_without_a_gradient_are_refused() -> None:
    with pytest.raises(InputError, match="no output of forward depends on a parameter"):
        captured(Pooled(lambda x: x.detach()))
    with pytest.raises(InputError, match="ModuleDict has no forward"):
        captured(nn.ModuleDict({"ebc": bags()}))


def test_a_loss_is_told_from_outputs() -> None:
    assert "forward gives back" in captured(Pooled(torch.sum)).captured.loss
    assert "sum of forward's outputs" in captured(Pooled(lambda x: x)).captured.loss


def test_the_file_is_private() -> None:
    captured_ops = captured(DLRM(bags(), 13, [32, DIM], [32, 1]))
    text = ops_text(captured_ops.captured)
    raw = json.loads(text)
    assert raw["schema"] == "shardopt.ops/1"
    for word in (str(Path(__file__).parent), "/", "weight", "bias"):
        assert word not in text.replace("/1", "")


def test_what_cannot_be_captured_is_described_by_hand(tmp_path: Path) -> None:
    module = Pooled(lambda x: x if x.sum() > 0 else -x)
    dense = {"measured": {"batch_size": 64, "forward_ms": 1, "backward_ms": 2, "optimizer_ms": 0,
                          "gradient_mib": 1}}  # fmt: skip
    arguments = {"batch_size": 64, "default_pooling_factor": 1.0}
    with pytest.raises(InputError, match="cannot be captured"):
        to_yaml(module, tmp_path / "m.yaml", **arguments)
    assert not list(tmp_path.iterdir())
    workload = to_yaml(module, tmp_path / "m.yaml", **arguments, dense=dense)
    assert load_model(tmp_path / "m.yaml") == workload
    with pytest.raises(InputError, match=r"dense\.measured\.forward_ms"):
        to_yaml(module, tmp_path / "m.yaml", **arguments, dense={"measured": {"forward_ms": -1}})
