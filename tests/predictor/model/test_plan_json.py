"""plan.json: what is written comes back, and what is wrong is named."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import PlanError
from predictor.model.plan import (
    PARAMETER_FIELDS,
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
)
from predictor.model.plan_check import check_plan, model_mismatch
from predictor.model.plan_json import load_plan, plan_from_dict, plan_to_dict
from predictor.model.workload import DenseArch, Feature, Table, Workload

NAMES = st.text("abcdefgh_0123456789", min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
DENSE = DenseArch(13, (16,), (1,))


def table(name: str = "t0", module: str = "ebc", rows: int = 10, columns: int = 8) -> Table:
    return Table(name, rows, columns, (Feature(f"f_{name}", 1.0),), module=module)


def workload(*tables: Table, sha256: str = "abc") -> Workload:
    return Workload("m", 4, tables or (table(),), DENSE, sha256=sha256)


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    local = draw(st.integers(1, 4))
    world = local * draw(st.integers(1, 4))
    pairs = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40))
    shards = st.builds(Shard, st.integers(0, world - 1), pairs, pairs)
    parameters = st.fixed_dictionaries(
        {},
        optional={
            "cache_params": st.fixed_dictionaries({"load_factor": st.floats(0.01, 1)}),
            "enforce_hbm": st.booleans(),
            "output_dtype": st.sampled_from(["FP32", "FP16"]),
        },
    )
    tables = st.builds(
        TablePlan,
        st.sampled_from(ShardingType),
        st.sampled_from(ComputeKernel),
        st.lists(shards, min_size=1, max_size=4).map(tuple),
        NAMES,
        parameters,
    )
    reserved = ("schema", "world_size", "local_world_size", "tables")
    meta = st.dictionaries(NAMES.filter(lambda n: n not in reserved), JSON, max_size=3)
    return ShardingPlan(draw(st.dictionaries(NAMES, tables, max_size=3)), world, local, draw(meta))


@given(plans())
@settings(max_examples=25)
def test_a_plan_survives_its_file(plan: ShardingPlan) -> None:
    text = json.dumps(plan_to_dict(plan))
    assert plan_from_dict(json.loads(text), where="p") == plan


def good() -> dict[str, Any]:
    """The example of the contract, cut to 2 ranks, without what may be left out."""
    return {
        "schema": "shardopt.plan/1",
        "world_size": 2,
        "tables": {
            "t0": {
                "sharding_type": "table_wise",
                "compute_kernel": "fused",
                "shards": [{"rank": 1, "offset": [0, 0], "size": [10, 8]}],
            }
        },
    }


def test_the_file_has_every_field_of_the_contract() -> None:
    data = plan_to_dict(plan_from_dict({**good(), "hardware": "h100-sxm", "x": [1]}, where="p"))
    assert list(data) == ["schema", "hardware", "world_size", "local_world_size", "x", "tables"]
    assert set(data["tables"]["t0"]) == {
        "sharding_type",
        "compute_kernel",
        "module",
        "shards",
        *PARAMETER_FIELDS,
    }
    assert data["x"] == [1]


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(good()))
    assert load_plan(path) == plan_from_dict(good(), where="p")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", ["not UTF-8"]),
        (b"[" * 100_000, ["not usable as JSON"]),
        (b'{"world_size": ' + b"9" * 5000 + b"}", ["not usable as JSON"]),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: no such file; `shardopt plan"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path)


def plan_of(
    kind: ShardingType, *shards: tuple[int, tuple[int, int], tuple[int, int]], world: int = 2
) -> ShardingPlan:
    placed = tuple(Shard(*shard) for shard in shards)
    return ShardingPlan({"t0": TablePlan(kind, ComputeKernel.FUSED, placed)}, world, world)


T = ShardingType


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(T.TABLE_WISE, (1, (0, 0), (10, 8))),
        plan_of(T.COLUMN_WISE, (0, (0, 0), (10, 4)), (0, (0, 4), (10, 4))),
        plan_of(T.COLUMN_WISE, (0, (0, 4), (10, 4)), (0, (0, 0), (10, 4))),
        plan_of(T.ROW_WISE, (0, (0, 0), (9, 8)), (1, (9, 0), (1, 8))),
        plan_of(T.ROW_WISE, (0, (0, 0), (10, 8)), (1, (10, 0), (0, 8))),
        plan_of(T.ROW_WISE, (1, (0, 0), (5, 8)), (2, (5, 0), (5, 8)), world=4),
        plan_of(T.DATA_PARALLEL, (1, (0, 0), (10, 8)), (0, (0, 0), (10, 8))),
        plan_of(
            T.GRID_SHARD,
            *((r, (5 * i, 4 * j), (5, 4)) for r, (i, j) in enumerate([(0, 0), (0, 1), (1, 0)])),
            (3, (5, 4), (5, 4)),
            world=4,
        ),
    ],
)
def test_plans_that_fit(plan: ShardingPlan) -> None:
    assert check_plan(plan, workload()) == plan


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(T.TABLE_WISE, (0, (0, 0), (9, 8))), ["rows 9..9, columns 0..7", "no shard"]),
        (plan_of(T.TABLE_WISE, (0, (0, 0), (11, 8))), ["ends at row 11", "10 rows"]),
        (plan_of(T.TABLE_WISE, (2, (0, 0), (10, 8))), ["rank 2", "0..1"]),
        (
            plan_of(T.TABLE_WISE, (0, (0, 0), (10, 4)), (1, (0, 4), (10, 4))),
            ["whole on one rank", "2 shards"],
        ),
        (plan_of(T.ROW_WISE, (0, (0, 0), (6, 8)), (1, (5, 0), (5, 8))), ["rows 5..5", "2 shards"]),
        (plan_of(T.ROW_WISE, (0, (0, 0), (10, 4)), (1, (0, 4), (10, 4))), ["4 columns", "all 8"]),
        (plan_of(T.COLUMN_WISE, (0, (0, 0), (5, 8)), (1, (5, 0), (5, 8))), ["5 rows", "all 10"]),
        (plan_of(T.COLUMN_WISE, (0, (0, 0), (10, 8)), (1, (0, 8), (10, 0))), ["empty"]),
        (plan_of(T.TABLE_WISE, (0, (0, 0), (0, 8))), ["empty"]),
        (plan_of(T.DATA_PARALLEL, (0, (0, 0), (10, 8))), ["0..1", "[0]"]),
        (plan_of(T.DATA_PARALLEL, (0, (0, 0), (10, 8)), (0, (0, 0), (10, 8))), ["0..1", "[0, 0]"]),
        (plan_of(T.DATA_PARALLEL, (0, (0, 0), (5, 8)), (1, (5, 0), (5, 8))), ["whole table"]),
        (
            plan_of(T.GRID_SHARD, (0, (0, 0), (5, 4)), (0, (0, 4), (5, 4)), (1, (5, 0), (5, 4))),
            ["rows 5..9, columns 4..7", "no shard"],
        ),
    ],
)
def test_shards_that_do_not_tile(plan: ShardingPlan, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        check_plan(plan, workload(), where="p.json")
    for word in ["p.json: table 't0'", *words]:
        assert word in str(caught.value)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    cuts=st.lists(st.tuples(st.integers(1, 39), st.integers(1, 39)), max_size=5),
)
def test_any_grid_tiles_and_no_less_does(
    rows: int, columns: int, cuts: list[tuple[int, int]]
) -> None:
    ys = sorted({0, rows, *(y for y, _ in cuts if y < rows)})
    xs = sorted({0, columns, *(x for _, x in cuts if x < columns)})
    shards = [
        (0, (y, x), (y_end - y, x_end - x))
        for y, y_end in pairwise(ys)
        for x, x_end in pairwise(xs)
    ]
    model = workload(table(rows=rows, columns=columns))
    check_plan(plan_of(T.GRID_SHARD, *shards), model)
    if len(shards) > 1:
        with pytest.raises(PlanError, match="no shard"):
            check_plan(plan_of(T.GRID_SHARD, *shards[1:]), model)
    with pytest.raises(PlanError, match="2 shards"):
        check_plan(plan_of(T.GRID_SHARD, *shards, shards[-1]), model)


def whole(module: str = "ebc") -> TablePlan:
    return TablePlan(T.TABLE_WISE, ComputeKernel.FUSED, (Shard(0, (0, 0), (10, 8)),), module)


def test_tables_unknown_missing_and_planned_twice() -> None:
    model = workload(table("t0"), table("t1"))
    with pytest.raises(PlanError, match=r"table 't2' is not in m \(did you mean 't[01]'\?\)"):
        check_plan(ShardingPlan({"t0": whole(), "t2": whole()}, 1, 1), model)
    with pytest.raises(PlanError, match="no shards for 'ebc/t1' of m"):
        check_plan(ShardingPlan({"t0": whole()}, 1, 1), model)
    twice = ShardingPlan({"t0": whole(), "ebc/t0": whole(), "t1": whole()}, 1, 1)
    with pytest.raises(PlanError, match="'t0' and 'ebc/t0' both plan 'ebc/t0'"):
        check_plan(twice, model)


def test_tables_of_one_name_are_told_apart_by_module() -> None:
    model = workload(table("t0", "a"), table("t0", "b"))
    checked = check_plan(
        ShardingPlan({"x": whole(), "b/t0": whole("b"), "a/t0": whole("a")}, 1, 1),
        workload(*model.tables, table("x")),
    )
    assert list(checked.tables) == ["a/t0", "b/t0", "x"]
    with pytest.raises(PlanError, match="may mean 'a/t0' or 'b/t0'"):
        check_plan(ShardingPlan({"t0": whole(), "b/t0": whole("b")}, 1, 1), model)


def test_a_module_path_stands_for_the_models_module_name() -> None:
    model = workload(table("t0", "a"), table("t0", "b"))
    paths = {"sparse.b/t0": whole("sparse.b"), "sparse.a/t0": whole("sparse.a")}
    checked = check_plan(ShardingPlan(paths, 1, 1), model)
    assert {key: t.module for key, t in checked.tables.items()} == {"a/t0": "a", "b/t0": "b"}


def test_model_mismatch() -> None:
    def warning(meta: dict[str, Any]) -> str | None:
        return model_mismatch(ShardingPlan({}, 1, 1, meta), workload())

    assert warning({"model": {"name": "m", "sha256": "abc"}}) is None
    assert "another version" in (warning({"model": {"name": "m", "sha256": "abd"}}) or "")
    for meta in ({}, {"model": None}, {"model": "m"}, {"model": {"sha256": ""}}):
        assert "does not say which model" in (warning(meta) or "")


PRINTED = (
    "module: ebc\n\nparam | sharding type | compute kernel | ranks\n----- | ---- | ---- | ---\n"
)


@pytest.mark.parametrize("text", [PRINTED, "# --- Planner Statistics ---  #\n# ---- #\n"])
def test_what_torchrec_prints_is_told_from_a_damaged_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(text)
    for where in (path, text):
        with pytest.raises(PlanError, match="from_torchrec"):
            load_plan(where)
