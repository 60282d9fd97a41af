"""Whatever is done to a good file, the loader gives a Workload or an InputError, never a crash."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.model.workload import Workload
from shardopt.config import load_model
from tests.hostile import mutate

NUMBERS = (True, 0, -1, 1, 2**63, 10**400, 0.5, float("nan"), float("inf"), "1e6", "1e999", "0x1F")
WORDS = (None, "", "x", "\u2028", "dot", "uniform", "adam", "none")
NESTED = ([], {}, [1], [[]], {"zipf": {}}, {"zipf": {"alpha": "1_0"}}, {"csv": "."}, {"file": "."})
VALUES = (*NUMBERS, *WORDS, *NESTED)


def hostile(rng: random.Random) -> Any:
    value = copy.deepcopy(rng.choice(VALUES))
    return rng.choice((value, value, [value, rng.choice(WORDS)], {rng.choice(WORDS): value}))


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
@given(seed=st.integers(0, 10**9))
def test_mutated_files(seed: int, tmp_path: Path, good: str) -> None:
    path = tmp_path / "model.yaml"
    document = mutate(random.Random(seed), yaml.safe_load(good), 4, hostile)
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
