"""Tables from a CSV file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ShardingType
from predictor.model.workload import Workload
from shardopt.config import load_model

MODEL = """\
schema: 1
batch_size: 4
tables: {csv: tables.csv}
dense: {in_features: 2, bottom_mlp: [8], top_mlp: [1], interaction: concat}
"""
GOOD = """\
name,module,num_embeddings,embedding_dim,weighted,feature,pooling_factor,index_distribution,\
zipf_alpha,sharding_types,constraints
a,,1e6,64,true,f_0,3.5,,1.1,"[row_wise, table_wise]",{ranks: [0]}
a,,,,,f_1,2,uniform,,,
b,other,100,8,,f_0,1,"{zipf: {alpha: 0.9, q: 1}}",,,
"""


@pytest.fixture
def load(tmp_path: Path, write: Callable[..., Path]) -> Callable[[str], Workload]:
    """Load the model with some text as its tables.csv."""

    def _load(text: str) -> Workload:
        (tmp_path / "tables.csv").write_text(text, encoding="utf-8", newline="")
        return load_model(write(MODEL))

    return _load


def test_a_good_file(load: Callable[[str], Workload]) -> None:
    workload = load(GOOD)
    a, b = workload.tables
    assert (a.name, a.module, a.num_embeddings, a.embedding_dim) == ("a", "ebc", 1_000_000, 64)
    assert a.weighted
    assert not b.weighted
    assert [f.name for f in a.features] == ["f_0", "f_1"]
    assert [f.pooling_factor for f in a.features] == [3.5, 2.0]
    assert [f.distribution for f in a.features] == [Zipf(1.1), Uniform()]
    assert a.constraints.sharding_types == (ShardingType.ROW_WISE, ShardingType.TABLE_WISE)
    assert a.constraints.ranks == (0,)
    assert (b.module, b.features[0].distribution) == ("other", Zipf(0.9, 1))
    assert workload.sha256 == hashlib.sha256((MODEL + GOOD).encode()).hexdigest()


def test_line_ends_and_byte_order_mark_do_not_matter(load: Callable[[str], Workload]) -> None:
    plain = load(GOOD).tables
    assert load("\ufeff" + GOOD.replace("\n", "\r\n") + "\r\n").tables == plain


def test_missing_and_binary_files(tmp_path: Path, write: Callable[[str], Path]) -> None:
    path = write(MODEL)
    with pytest.raises(InputError, match=r"model\.yaml:3: tables\.csv: "):
        load_model(path)
    (tmp_path / "tables.csv").write_bytes(b"name\n\xff\xfe\n")
    with pytest.raises(InputError, match=r"tables\.csv:2: not UTF-8"):
        load_model(path)
