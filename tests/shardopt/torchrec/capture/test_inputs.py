"""Fake inputs: like an example at another batch size, or made from the features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from predictor.errors import InputError
from shardopt.torchrec.capture.inputs import (
    BatchNumbers,
    dense_tensors,
    from_features,
    like_example,
)
from tests.shardopt.torchrec.hook_models import Model

KEYED = KeyedJaggedTensor.from_lengths_sync(
    ["a", "b"], torch.arange(24), torch.tensor([1, 2, 3, 2, 4, 4, 4, 4])
)
"""Batch of 4."""
NUMBERS = BatchNumbers(10, {"a": 33})


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Own:
    dense: Tensor
    ids: KeyedJaggedTensor
    name: str = "kept"


class Weighted(nn.Module):
    """With ids that have weights, and a layer of 13 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 1)
        self.ebc = Model(is_weighted=True).ebc


class Takes(Weighted):
    def forward(self, x: Tensor, ids: KeyedJaggedTensor, label: Tensor) -> Tensor:
        return x


def test_axes_as_long_as_the_batch_grow_with_it() -> None:
    example = {
        "x": torch.empty(4, 4),
        "ids": Pair(torch.empty(7, 4), torch.empty(12)),
        "label": Own(torch.empty(3), KEYED),
    }
    inputs = like_example(example, Takes(), 4096)(NUMBERS)
    assert inputs.positional == ()
    assert inputs.named["x"].shape == (10, 4), "the first axis alone"
    pair = inputs.named["ids"]
    assert isinstance(pair, Pair)
    assert (pair.first.shape, pair.second.shape) == ((7, 10), (30,))
    own = inputs.named["label"]
    assert isinstance(own, Own)
    assert (own.name, own.dense.shape) == ("kept", (3,))
    assert own.ids.stride() == 10
    # a feature of a table has the ids that it is given; another as many a sample as before
    assert own.ids.length_per_key() == [33, 40]
    assert KEYED.stride() == 4


def test_a_tuple_is_arguments_and_anything_else_the_only_one() -> None:
    inputs = like_example((KEYED, torch.empty(4, 2)), Takes(), 4)(NUMBERS)
    assert [type(item) for item in inputs.positional] == [KeyedJaggedTensor, Tensor]
    inputs = like_example({"other": torch.empty(4, 2)}, Takes(), 4)(NUMBERS)
    assert inputs.positional[0]["other"].shape == (10, 2)


class TakesBatch(Weighted):
    def forward(self, batch: Batch, scale: float = 1.0) -> Tensor:
        return batch.dense_features * scale


def test_inputs_are_made_of_what_forward_is_annotated_with() -> None:
    ids = BatchNumbers(10, {"a": 33, "b": 5})
    features = {"ebc": ["a"], "ec": ["a", "b"]}
    inputs = from_features(Takes(), features)(ids)
    assert inputs.named["x"].shape == (10, 13)
    assert inputs.named["label"].shape == (10,)
    assert list(inputs.named["ids"].keys()) == ["a", "b"]
    assert inputs.named["ids"].weights().shape == (38,)
    batch = from_features(TakesBatch(), features)(ids).named["batch"]
    assert (batch.dense_features.shape, batch.labels.shape) == ((10, 13), (10,))
    assert [t.shape for t in dense_tensors(batch)] == [(10, 13), (10,)]


class TakesMore(nn.Module):
    def forward(self, ids: KeyedJaggedTensor, step: int) -> Tensor:
        return ids.values() * step


class TakesNoLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TakesAnything(nn.Module):
    def forward(self, ids, history):  # type: ignore[no-untyped-def]
        return history


def test_what_cannot_be_made_is_asked_for_by_name() -> None:
    with pytest.raises(InputError, match=r"TakesMore takes 'step' \(int\).*example_inputs="):
        from_features(TakesMore(), {"ebc": ["a"]})
    with pytest.raises(InputError, match=r"takes 'ids' \(something that has no annotation\)"):
        from_features(TakesAnything(), {"ebc": ["a"]})
    with pytest.raises(InputError, match=r"'x' of unknown width.*example_inputs="):
        from_features(TakesNoLayer(), {"ebc": ["a"]})


def test_an_example_without_the_batch_is_refused() -> None:
    with pytest.raises(InputError, match=r"axis of batch_size, 64: got \[7, 3\]; give a batch"):
        like_example((torch.empty(7, 3),), Takes(), 64)
