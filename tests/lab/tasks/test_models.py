"""Families of models: one model a seed, valid, within bounds, and sized without any prediction."""

from __future__ import annotations

import ast
import hashlib
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tasks.models import (
    BATCH,
    COUNT,
    FAMILIES,
    MAX_TABLES_BYTES,
    PIPELINES,
    count,
    draw_model,
    log_uniform,
    lognormal,
    pick,
    products,
    whole,
)
from predictor.errors import InputError
from shardopt.config import load_model
from shardopt.config.write import model_text, write_model
from tests.builders import a_table, a_workload

ROOT = Path(__file__).resolve().parents[3]
DIGESTS = {
    "published-000-dcnv2": "2b64632c49ce",
    "published-001-rm1": "d4cff340836d",
    "published-002-rm2": "64ae6869a0af",
    "published-003-rm3": "98660944acb7",
    "published-004-meta": "b9484bc93427",
    "shapes-000-many_small": "45654114e275",
    "shapes-001-few_wide": "a3ae145a9ab1",
    "shapes-002-mixed_pooling": "5f7ce1cacd45",
    "shapes-003-weighted": "e90aa380c6ad",
    "shapes-004-sequences": "a4587674ddb3",
    "shapes-005-several_modules": "49f340d02131",
    "shapes-006-uneven_skew": "085657967bf7",
}
"""Model of every kind -> first digits of its file's digest, so that a seed stays what it is."""


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 999_999))
@settings(max_examples=60, deadline=None)
def test_any_seed_gives_a_model_within_bounds(family: str, seed: int) -> None:
    model = FAMILIES[family](seed, random.Random(seed))
    assert model.batch_size in BATCH
    assert COUNT[0] <= count(model) <= COUNT[1]
    assert model.embedding_bytes <= MAX_TABLES_BYTES
    assert model.train_pipeline in PIPELINES
    assert 4 <= len(model.tables) <= 70
    for table in model.tables:
        assert table.num_embeddings >= 2
        assert table.embedding_dim % 4 == 0
        assert 1 <= table.lookups_per_sample <= 100
    for module in model.modules:
        tables = [t for t in model.tables if t.module == module]
        assert len({t.is_pooled for t in tables}) == len({t.weighted for t in tables}) == 1
        assert tables[0].is_pooled or len({t.embedding_dim for t in tables}) == 1


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 999_999))
@settings(max_examples=8, deadline=None)
def test_its_file_reads_as_the_model(family: str, seed: int) -> None:
    model = draw_model(family, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        write_model(path, model)
        assert load_model(path) == model


@pytest.mark.parametrize("name", DIGESTS)
def test_a_seed_stays_what_it_is(name: str) -> None:
    family, seed, _ = name.split("-")
    random.seed(len(name))
    model = draw_model(family, int(seed))
    assert model.name == name
    assert hashlib.sha256(model_text(model).encode()).hexdigest()[:12] == DIGESTS[name]


def test_some_are_pipelined() -> None:
    rng = random.Random(0)
    models = [draw(seed, rng) for draw in FAMILIES.values() for seed in range(40)]
    assert 0.1 < sum(m.train_pipeline == "sparse_dist" for m in models) / len(models) < 0.35


def test_no_family_knows_a_predictor_or_a_search() -> None:
    """Models that a prediction sized would be models that suit it."""
    allowed = ("predictor.errors", "predictor.model", "lab.criteo", "shardopt.config.write")
    tree = ast.parse((ROOT / "lab" / "tasks" / "models.py").read_text())
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    ours = [m for m in modules if m.split(".")[0] in ("predictor", "search", "shardopt", "lab")]
    assert ours
    assert all(module.startswith(allowed) for module in ours)


def test_the_count_of_a_model_by_hand() -> None:
    model = a_workload(a_table("a", 10, 8), a_table("b", 10, 8), batch_size=100)
    ids = sum(t.lookups_per_sample for t in model.tables)
    sample = ids * (100e-6 + 8e-6) + 2 * 8 * 12e-6 + 50e-9 * products(model)
    assert count(model) == pytest.approx(100 * sample + 2 * 0.7)


def test_numbers_lie_where_they_should() -> None:
    rng = random.Random(3)
    assert {whole(rng, 2, 4) for _ in range(100)} == {2, 3, 4}
    assert {pick(rng, "ab") for _ in range(50)} == {"a", "b"}
    numbers = [log_uniform(rng, 1.0, 100.0) for _ in range(2000)]
    assert 1 <= min(numbers) <= max(numbers) <= 100
    assert 0.45 < sum(x < 10 for x in numbers) / 2000 < 0.55
    normal = sorted(lognormal(rng, 7.0, 1.0) for _ in range(2000))
    assert normal[1000] == pytest.approx(7.0, rel=0.1)


def test_names_that_are_no_family_are_refused() -> None:
    with pytest.raises(InputError, match="'shapes'"):
        draw_model("shape", 0)
