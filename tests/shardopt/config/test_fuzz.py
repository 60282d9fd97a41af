"""Whatever is done to a good file, the loader gives a Workload or an InputError, never a crash."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.model.workload import Workload
from shardopt.config import load_model

NUMBERS = (True, 0, -1, 1, 2**63, 10**400, 0.5, float("nan"), float("inf"), "1e6", "1e999", "0x1F")
WORDS = (None, "", "x", "\u2028", "dot", "uniform", "adam", "none")
NESTED = ([], {}, [1], [[]], {"zipf": {}}, {"zipf": {"alpha": "1_0"}}, {"csv": "."}, {"file": "."})
VALUES = st.one_of(
    st.sampled_from([*NUMBERS, *WORDS, *NESTED]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)

pytestmark = pytest.mark.timeout(120)


def containers(data: Any) -> list[Any]:
    """All mappings and lists of a document, outermost first."""
    found = [data] if isinstance(data, dict | list) else []
    for value in data.values() if isinstance(data, dict) else data if found else []:
        found += containers(value)
    return found


@st.composite
def mutations(draw: st.DrawFn, good: str) -> Any:
    """The good document after up to four deletions, replacements, renamings and copies."""
    data = yaml.safe_load(good)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.sampled_from([c for c in containers(data) if c] or [data]))
        if not where:
            break
        key = draw(st.sampled_from(sorted(where, key=repr) if isinstance(where, dict) else [0]))
        kind = draw(st.sampled_from(["delete", "replace", "rename", "copy"]))
        if kind == "delete":
            del where[key]
        elif kind == "replace":
            # a copy: what is drawn is shared between examples, and is changed further below
            where[key] = copy.deepcopy(draw(VALUES))
        elif isinstance(where, list):
            where.append(copy.deepcopy(where[0]))
        else:
            new = draw(st.text(max_size=6) | st.sampled_from(["name", "file", "zipf", "csv"]))
            where[new] = where.pop(key) if kind == "rename" else copy.deepcopy(where[key])
    return data


def loads_or_explains(path: Path) -> None:
    try:
        workload = load_model(path)
    except InputError as error:
        message = str(error)
    else:
        assert isinstance(workload, Workload)
        for table in workload.tables:
            for feature in table.features:
                assert feature.distribution.bins(table.num_embeddings).mass == pytest.approx(1)
        return
    assert message.startswith(str(path))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_files(data: st.DataObject, tmp_path: Path, good: str) -> None:
    path = tmp_path / "model.yaml"
    document = data.draw(mutations(good))
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    loads_or_explains(path)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutated_text(data: st.DataObject, tmp_path: Path, good: str) -> None:
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 30)))
    raw = data.draw(st.binary(max_size=8) | st.sampled_from([b"\t", b"{", b"*a", b"&a ", b"- "]))
    path = tmp_path / "model.yaml"
    path.write_bytes(good[:start].encode() + raw + good[end:].encode())
    loads_or_explains(path)
