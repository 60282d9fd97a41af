"""Digests tell contents apart, and nothing else."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from predictor.hardware.loader import load_hardware
from shardopt.api.content import code_digest, digest, solver_versions
from shardopt.config import load_model


class Kind(StrEnum):
    ONE = "one"


@dataclass(frozen=True)
class Holder:
    a: object
    b: object = None
    aside: object = field(default=None, compare=False)


DIFFERENT = [
    None,
    0,
    0.0,
    False,
    "",
    "0",
    b"0",
    (),
    ((), ()),
    ("ab",),
    ("a", "b"),
    {"a": 1},
    {"a": "1"},
    frozenset({1, 2}),
    frozenset({1, 3}),
    Kind.ONE,
    "one",
    Path("one"),
    np.zeros(2),
    np.zeros(2, dtype=np.float32),
    np.zeros((2, 1)),
    np.array([0.0, 1.0]),
    Holder(1),
    Holder(1, 2),
    Holder((1, 2)),
]


def test_what_differs_has_another_digest() -> None:
    assert len({digest(thing) for thing in DIFFERENT}) == len(DIFFERENT)


def test_what_is_alike_has_the_same() -> None:
    assert digest([1, 2]) == digest((1, 2)), "how a list is kept says nothing"
    assert digest(Holder(1, aside=2)) == digest(Holder(1))
    assert digest(frozenset({"a", "b", "c"})) == digest({"c", "b", "a"})


def test_models_and_profiles(model: Path) -> None:
    workload, hardware = load_model(model), load_hardware("h100-sxm")
    assert digest(workload, hardware) == digest(load_model(model), load_hardware("h100-sxm"))
    assert digest(workload) != digest(replace(workload, batch_size=2 * workload.batch_size))
    assert digest(hardware) != digest(load_hardware("a100-80gb"))


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="content of object is not known"):
        digest((1, object()))


def test_code_and_versions() -> None:
    assert len(code_digest()) == 64
    assert set(solver_versions()) == {"python", "numpy", "ortools", "optuna"}
