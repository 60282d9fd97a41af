"""Whatever a trace file holds, reading it ends in a result or in an `InputError`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.trace.breakdown import breakdown, mean_parts, top_kernels
from predictor.trace.chrome import comparison_trace
from predictor.trace.files import open_traces
from predictor.trace.read import load_traces
from predictor.trace.simulate.step import simulate_trace
from tests.predictor.trace.synthetic import OLD, OLDEST, RECENT, execution, kineto
from tests.public_data import OF_FULL_DATA, TRACES

Document: TypeAlias = Callable[[], dict[str, Any]]

LONG = 10**400
KEPT = 60
LONG_MEMBERS = ("traceEvents", "nodes")
"""Drawn first, as they hold what matters."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.sampled_from([2**63, -(2**70), LONG, 1e308, float("inf"), float("nan"), 0.5]),
    st.sampled_from(["", "x", "[0, 1]", "[0, ...]", "ProfilerStep#4", "ncclKernel_X", "kernel"]),
)
JUNK = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=2), SCALARS)
)


@cache
def cut_out(name: str, key: str) -> dict[str, Any]:
    """Some events of a public trace of every category, with the members around them."""
    rest = json.loads(next(open_traces([TRACES / name])).text)
    items = rest[key]
    kinds: dict[str, list[Any]] = {}
    for item in items:
        kinds.setdefault(str(item.get("cat", item["name"])), []).append(item)
    kept = [item for found in kinds.values() for item in islice(found, 0, None, 97)][:KEPT]
    return {**rest, key: kept + items[:KEPT]}


MADE: tuple[Document, ...] = (
    lambda: kineto(schema=RECENT, steps=3),
    lambda: kineto(schema=OLD, steps=3),
    lambda: kineto(schema=OLDEST, steps=2),
    lambda: execution(nested=False),
    lambda: execution(nested=True),
)
PUBLIC: tuple[Document, ...] = (
    lambda: cut_out("hta_nccl_parser_rank0of2.json.gz", "traceEvents"),
    lambda: cut_out("dlrm_kineto.tar.gz", "traceEvents"),
    lambda: cut_out("dlrm_pytorch_et.tar.gz", "nodes"),
    lambda: cut_out("param_resnet_et.json.gz", "nodes"),
)
DOCUMENTS = pytest.mark.parametrize(
    "documents",
    [
        pytest.param(MADE, id="made"),
        pytest.param((*MADE, *PUBLIC), id="public", marks=OF_FULL_DATA),
    ],
)


def garble(data: st.DataObject, value: Any, depth: int = 0) -> Any:
    """The value with something inside it changed, dropped or doubled."""
    inside = depth < 2 or data.draw(st.integers(0, 3)) > 0
    if isinstance(value, dict) and value and inside:
        key = data.draw(st.sampled_from(sorted(value, key=lambda k: k not in LONG_MEMBERS)))
        return {**value, key: garble(data, value[key], depth + 1)}
    if isinstance(value, list) and value and inside:
        at = data.draw(st.integers(0, len(value) - 1))
        how = data.draw(st.sampled_from(["garble", "garble", "garble", "drop", "double"]))
        if how == "garble":
            return [*value[:at], garble(data, value[at], depth + 1), *value[at + 1 :]]
        return value[:at] + (value[at : at + 1] * 2 if how == "double" else []) + value[at + 1 :]
    return data.draw(JUNK)


def use(paths: list[Path]) -> None:
    """Everything that `shardopt trace` does with its files."""
    found = load_traces(paths)
    steps = [step for trace in found.traces for step in breakdown(trace)]
    for step in steps:
        assert sum(step.parts.values()) == pytest.approx(step.measured_ms, rel=1e-6, abs=1e-6)
    mean_parts(steps)
    top_kernels(found.traces, 3)
    for run in found.executions:
        run.input_bytes()
    try:
        simulated = simulate_trace(found.traces)
    except InputError:
        simulated = None
    json.dumps(comparison_trace(found.traces, simulated), allow_nan=False)


def outcome(paths: list[Path]) -> None:
    """Uses the files, or is told which of them cannot be used."""
    refusal = ""
    try:
        use(paths)
    except InputError as error:
        refusal = str(error)
    assert not refusal or any(str(path) in refusal for path in paths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@DOCUMENTS
@settings(max_examples=75)
@given(data=st.data())
def test_garbled_documents(
    folder: Path, documents: tuple[Document, ...], data: st.DataObject
) -> None:
    paths = []
    for number in range(data.draw(st.integers(1, 2))):
        document: Any = data.draw(st.sampled_from(documents))()
        for _ in range(data.draw(st.integers(0, 8))):
            document = garble(data, document)
        paths.append(folder / f"rank{number}.json")
        paths[-1].write_text(json.dumps(document))
    outcome(paths)


@DOCUMENTS
@settings(max_examples=50)
@given(data=st.data())
def test_garbled_bytes(folder: Path, documents: tuple[Document, ...], data: st.DataObject) -> None:
    content = json.dumps(data.draw(st.sampled_from(documents))()).encode()
    if data.draw(st.integers(0, 3)) == 3:
        content = gzip.compress(content, mtime=0)
    at = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.sampled_from([len(content), at]))
    path = folder / "rank0.json"
    path.write_bytes(content[:at] + data.draw(st.binary(max_size=4)) + content[at + 1 : end])
    outcome([path])
