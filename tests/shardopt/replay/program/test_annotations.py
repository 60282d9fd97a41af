"""Names of annotations: PyTorch's stay, a user's do not."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardopt.replay.program.annotations import KNOWN, Annotations

LIBRARY = [
    "ProfilerStep#12",
    "Optimizer.step#Adam.step",
    "Optimizer.zero_grad#SGD.zero_grad",
    "DistributedDataParallel.forward",
    "## forward ##",
    "## all2all_data:kjt splits ##",
    "## EmbeddingBagCollectionAwaitable wait() ##",
]
OWN = [
    "forward",
    "## train_alice ##",
    "Optimizer.step#AliceOptimizer.step",
    "ProfilerStep#12 alice",
    "ProfilerStep#alice",
    "alice ## forward ##",
    "## forward ##\nalice",
    "DistributedDataParallel.forward of alice",
    "",
]


@pytest.mark.parametrize("name", LIBRARY)
def test_names_of_the_libraries_stay(name: str) -> None:
    annotations = Annotations()
    assert annotations(name) == name
    assert annotations.replaced == 0


@pytest.mark.parametrize("name", OWN)
def test_other_names_do_not(name: str) -> None:
    annotations = Annotations()
    assert annotations(name) == "annotation 1"
    assert annotations.replaced == 1
    assert Annotations([name])(name) == name


@given(st.lists(st.text(min_size=1)))
def test_a_number_a_name(names: list[str]) -> None:
    assume(not any(KNOWN.match(name) for name in names))
    annotations = Annotations()
    written = dict(zip(names, map(annotations, names), strict=True))
    assert [annotations(name) for name in names] == [written[name] for name in names]
    # told apart, and by nothing of their own
    assert set(written.values()) == {f"annotation {i + 1}" for i in range(len(written))}
    assert annotations.replaced == len(written)
