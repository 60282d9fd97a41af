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

from lab.criteo import CAPPED_ROWS, MULTI_HOT
from lab.tasks.models import (
    BATCH,
    COUNT,
    FAMILIES,
    MAX_TABLES_BYTES,
    PIPELINES,
    REUSE,
    cap_rows,
    count,
    draw_model,
    log_uniform,
    lognormal,
    pick,
    products,
    whole,
)
from predictor.errors import InputError
from predictor.model.distribution import ReuseHistogram
from predictor.model.workload import DcnV2, Workload
from shardopt.config import load_model
from shardopt.config.write import model_text, write_model
from tests.builders import a_table, a_workload

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"published": 5, "shapes": 7}
FIXED = {
    ("published", 0): "a28763112222",
    ("shapes", 0): "a1fcb48e7432",
}
"""First digits of the digests of model files, so that a seed stays what it is."""


def kind(workload: Workload) -> str:
    return workload.name.split("-", 2)[2]


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 999_999))
@settings(max_examples=60, deadline=None)
def test_any_seed_gives_a_model_within_bounds(family: str, seed: int) -> None:
    made = FAMILIES[family](seed, random.Random(seed))
    assert made.batch_size in BATCH
    assert COUNT[0] <= count(made) <= COUNT[1]
    assert made.embedding_bytes <= MAX_TABLES_BYTES
    assert made.train_pipeline in PIPELINES
    assert 4 <= len(made.tables) <= 70
    for table in made.tables:
        assert table.num_embeddings >= 2
        assert table.embedding_dim % 4 == 0
        assert 1 <= table.lookups_per_sample <= 100
    for module in made.modules:
        held = [t for t in made.tables if t.module == module]
        assert len({t.is_pooled for t in held}) == len({t.weighted for t in held}) == 1
        assert held[0].is_pooled or len({t.embedding_dim for t in held}) == 1


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 999_999))
@settings(max_examples=8, deadline=None)
def test_its_file_reads_as_the_model(family: str, seed: int) -> None:
    made = draw_model(family, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        write_model(path, made)
        assert load_model(path) == made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_the_same_model_every_time(family: str) -> None:
    random.seed(1)
    first = model_text(draw_model(family, 11))
    random.seed(2)
    assert model_text(draw_model(family, 11)) == first
    assert model_text(draw_model(family, 11 + KINDS[family])) != first


@pytest.mark.parametrize(("family", "seed"), FIXED)
def test_a_seed_stays_what_it_is(family: str, seed: int) -> None:
    text = model_text(draw_model(family, seed))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == FIXED[family, seed]


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_in_a_row_are_all_kinds(family: str) -> None:
    found = {kind(draw_model(family, seed)) for seed in range(20, 20 + KINDS[family])}
    assert len(found) == KINDS[family]


def test_dcnv2_keeps_what_is_published() -> None:
    for seed in (0, 5, 10):
        made = draw_model("published", seed)
        assert kind(made) == "dcnv2"
        assert [t.lookups_per_sample for t in made.tables] == [float(n) for n in MULTI_HOT]
        cap = max(t.num_embeddings for t in made.tables)
        assert [t.num_embeddings for t in made.tables] == [min(n, cap) for n in CAPPED_ROWS]
        assert isinstance(made.dense.interaction, DcnV2)


def test_rm_models_differ_as_published() -> None:
    rm1, rm2, rm3 = (draw_model("published", seed) for seed in (1, 2, 3))
    assert {t.lookups_per_sample for t in rm1.tables} == {80.0}
    assert {t.lookups_per_sample for t in rm3.tables} == {20.0}
    assert len(rm2.tables) >= 28 > 12 >= len(rm1.tables)
    # products for each id
    heavy, *light = (products(m) / sum(t.lookups_per_sample for t in m.tables) for m in (rm3, rm1))
    assert heavy > 4 * max(light)


def test_metas_tables_repeat_as_published() -> None:
    made = draw_model("published", 4)
    laws = [f.distribution for t in made.tables for f in t.features]
    assert all(isinstance(law, ReuseHistogram) for law in laws)
    assert {law.fractions for law in laws if isinstance(law, ReuseHistogram)} <= {*REUSE.values()}
    assert len({t.embedding_dim for t in made.tables}) > 1


def test_shapes_are_what_they_are_called() -> None:
    made = {kind(model): model for model in (draw_model("shapes", seed) for seed in range(7))}
    assert len(made["many_small"].tables) >= 40
    assert min(t.embedding_dim for t in made["few_wide"].tables) >= 256
    ids = [t.lookups_per_sample for t in made["mixed_pooling"].tables]
    assert max(ids) > 10 * min(ids)
    assert {t.weighted for t in made["weighted"].tables} == {True, False}
    assert {t.pooling for t in made["sequences"].tables} == {"sum", "none"}
    assert len(made["several_modules"].modules) == 3
    laws = {type(t.features[0].distribution).__name__ for t in made["uneven_skew"].tables}
    assert laws == {"Zipf", "Uniform"}


def test_some_are_pipelined() -> None:
    rng = random.Random(0)
    made = [draw(seed, rng) for draw in FAMILIES.values() for seed in range(40)]
    assert 0.1 < sum(m.train_pipeline == "sparse_dist" for m in made) / len(made) < 0.35


def test_no_family_knows_a_predictor_or_a_search() -> None:
    """Models that a prediction sized would be models that suit it."""
    allowed = ("predictor.errors", "predictor.model", "lab.criteo", "shardopt.config.write")
    tree = ast.parse((ROOT / "lab" / "tasks" / "models.py").read_text())
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    ours = [m for m in modules if m.split(".")[0] in ("predictor", "search", "shardopt", "lab")]
    assert ours
    assert all(module.startswith(allowed) for module in ours)


def test_the_count_of_a_model_by_hand() -> None:
    made = a_workload(a_table("a", 10, 8), a_table("b", 10, 8), batch_size=100)
    ids = sum(t.lookups_per_sample for t in made.tables)
    sample = ids * (100e-6 + 8e-6) + 2 * 8 * 12e-6 + 50e-9 * products(made)
    assert count(made) == pytest.approx(100 * sample + 2 * 0.7)


def test_rows_are_capped_as_far_as_needed() -> None:
    tables = [a_table("a", 1_000_000, 8), a_table("b", 100, 8)]
    large, small = cap_rows(tables, 320_000)
    assert small.num_embeddings == 100
    assert large.weight_bytes + small.weight_bytes <= 320_000 < large.weight_bytes + 32 + 3200


def test_numbers_lie_where_they_should() -> None:
    rng = random.Random(3)
    assert {whole(rng, 2, 4) for _ in range(100)} == {2, 3, 4}
    assert {pick(rng, "ab") for _ in range(50)} == {"a", "b"}
    found = [log_uniform(rng, 1.0, 100.0) for _ in range(2000)]
    assert 1 <= min(found) <= max(found) <= 100
    assert 0.45 < sum(x < 10 for x in found) / 2000 < 0.55
    normal = sorted(lognormal(rng, 7.0, 1.0) for _ in range(2000))
    assert normal[1000] == pytest.approx(7.0, rel=0.1)


def test_names_that_are_no_family_are_refused() -> None:
    with pytest.raises(InputError, match=r"no models 'shape' \(did you mean 'shapes'\?\)"):
        draw_model("shape", 0)
