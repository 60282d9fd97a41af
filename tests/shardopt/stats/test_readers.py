"""Every format gives the same counts; what cannot be read is told with its place."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from predictor.errors import InputError
from shardopt.stats.collect import WHOLE, ReadOptions, TimeWindow, collect
from shardopt.stats.counts import FeatureCounts
from shardopt.stats.readers import DataFormat, format_of, open_source

RNG = np.random.default_rng(0)
IDS = RNG.zipf(1.4, (300, 26)) % 5000
BAGS = [RNG.integers(0, 90, n) for n in RNG.integers(0, 4, 300)]
LENGTHS = np.array([len(bag) for bag in BAGS])
FLAT = np.concatenate(BAGS)


def line(ids: np.ndarray, *, label: bool = True) -> str:
    return "\t".join([*["1"] * (14 if label else 13), *(f"{i:08x}" for i in ids)])


def tsv(path: Path, *, label: bool = True, ending: str = "\n") -> Path:
    path.write_bytes((ending.join(line(row, label=label) for row in IDS) + ending).encode())
    return path


def multi_hot(path: Path) -> Path:
    np.savez(path, **{"0": IDS[:, :3].astype(np.int32), "1": IDS[:, 3].astype(np.int64)})
    return path


def npy(head: str) -> bytes:
    """A file with a head of one's own, and no data."""
    text = head.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def counts(*paths: Path, **more: object) -> dict[str, FeatureCounts]:
    return collect(paths, ReadOptions(chunk_rows=70, **more))[WHOLE]  # type: ignore[arg-type]


def same(feature: FeatureCounts, ids: np.ndarray) -> None:
    true, often = np.unique(ids, return_counts=True)
    assert feature.sample.ids.tolist() == true.tolist()
    assert feature.sample.counts.tolist() == often.tolist()
    assert feature.ids == ids.size


def error(*paths: Path, **more: object) -> str:
    with pytest.raises(InputError) as caught:
        counts(*paths, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["train.txt", "day_0", "test.tsv", "crlf.tsv", "day_0.gz", "a.npy"]
)
def test_single_ids_of_criteo(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, IDS.astype(np.int32))
    else:
        plain = tmp_path / "plain"
        tsv(plain, label="test" not in name, ending="\r\n" if "crlf" in name else "\n")
        content = plain.read_bytes()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    features = counts(path)
    assert list(features) == [f"cat_{i}" for i in range(26)]
    for column in (0, 7, 25):
        same(features[f"cat_{column}"], IDS[:, column])
    assert features["cat_0"].samples == 300
    twice = counts(path, path, features=("cat_3",))
    assert list(twice) == ["cat_3"]
    assert twice["cat_3"].samples == 600


def test_an_empty_category_is_id_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("\t".join(["0"] * 14 + [""] * 25 + ["1f"]))
    features = counts(path)
    assert features["cat_0"].sample.ids.tolist() == [0]
    assert features["cat_25"].sample.ids.tolist() == [31]


def test_multi_hot_arrays(tmp_path: Path) -> None:
    features = counts(multi_hot(tmp_path / "day_0_sparse_multi_hot.npz"))
    same(features["cat_0"], IDS[:, :3])
    same(features["cat_1"], IDS[:, 3])
    assert features["cat_0"].samples == 300


def test_parquet_columns_and_lists(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    single_ids = [None if i % 10 == 0 else int(i) for i in range(300)]
    table = arrow.table(
        {"one": single_ids, "many": [bag.tolist() or None for bag in BAGS], "text": ["x"] * 300}
    )
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    features = counts(tmp_path / "a.parquet")
    assert list(features) == ["one", "many"]
    same(features["many"], FLAT)
    assert features["many"].empty == (LENGTHS == 0).sum()
    assert (features["one"].samples, features["one"].ids, features["one"].empty) == (300, 270, 30)
    assert "no feature 'text'" in error(tmp_path / "a.parquet", features=("text",))
    parquet.write_table(arrow.table({"a": [[1], [2, None]]}), tmp_path / "null.parquet")
    assert "row 1: a: " in error(tmp_path / "null.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:500])
    assert "no Parquet file" in error(tmp_path / "cut.parquet")


@pytest.mark.parametrize("listed", [True, False])
def test_keyed_jagged_tensors(listed: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    kjt = jagged.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([*FLAT, *IDS[:, 0]]),
        lengths=torch.tensor([*LENGTHS, *[1] * 300]),
    )
    torch.save([kjt, kjt] if listed else kjt, tmp_path / "a.pt")
    features = counts(tmp_path / "a.pt")
    same(features["a"], np.tile(FLAT, 2) if listed else FLAT)
    same(features["b"], np.tile(IDS[:, 0], 2) if listed else IDS[:, 0])
    assert features["a"].empty == (LENGTHS == 0).sum() * (2 if listed else 1)


def test_tuples_of_dlrm_datasets(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    lengths = torch.tensor(np.stack([LENGTHS, np.ones(300, dtype=np.int64)]))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    indices = torch.tensor([*FLAT, *IDS[:, 0]])
    with gzip.open(tmp_path / "a.pt.gz", "wb") as stream:
        torch.save((indices, offsets, lengths), stream)
    features = counts(tmp_path / "a.pt.gz")
    same(features["table_0"], FLAT)
    same(features["table_1"], IDS[:, 0])
    torch.save((indices, offsets, lengths[:1]), tmp_path / "b.pt")
    assert "b.pt" in error(tmp_path / "b.pt")
    torch.save({"model": 3}, tmp_path / "c.pt")
    assert "KeyedJaggedTensor" in error(tmp_path / "c.pt")
    (tmp_path / "d.pt.gz").write_bytes((tmp_path / "a.pt.gz").read_bytes()[:400])
    assert "truncated" in error(tmp_path / "d.pt.gz")


def test_skipped_chunks_are_left_out(tmp_path: Path) -> None:
    from shardopt.stats.readers import NpySource, NpzSource, TsvSource

    np.save(tmp_path / "a.npy", IDS)
    sources = [
        TsvSource(tsv(tmp_path / "a.tsv")),
        NpySource(tmp_path / "a.npy"),
        NpzSource(multi_hot(tmp_path / "a.npz")),
    ]
    for source in sources:
        (last,) = list(source.chunks(["cat_1"], 100, 2))
        column = 3 if isinstance(source, NpzSource) else 1
        assert last.bags["cat_1"].ids.tolist() == IDS[200:, column].tolist()


BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "none.tsv": (lambda path: None, ["none.tsv", "none.tsv"]),
    "empty.tsv": (lambda path: path.write_text(""), ["empty.tsv", "has no samples"]),
    "narrow.tsv": (lambda path: path.write_text("1\t2\n"), [":1: has 2 columns", "allowed: 40"]),
    "mixed.tsv": (
        lambda path: path.write_text(f"{line(IDS[0])}\n{line(IDS[1])}\n{line(IDS[2])}\tx\n"),
        [":3: has 41 columns", "line 1 has 40"],
    ),
    "word.tsv": (
        lambda path: path.write_text(f"{line(IDS[0])}\n{line(IDS[1])[:-1]}z\n"),
        [":2: cat_25: got", "hexadecimal"],
    ),
    "cut.tsv.gz": (
        lambda path: path.write_bytes(gzip.compress(line(IDS[0]).encode() * 90)[:-20]),
        ["cut.tsv.gz", "truncated"],
    ),
    "float.npy": (lambda path: np.save(path, IDS / 2.0), ["float64", "must be integers"]),
    "flat.npy": (lambda path: np.save(path, IDS[:, 0]), ["shape (300,)", "[samples, features]"]),
    "none.npy": (lambda path: np.save(path, IDS[:0]), ["has no samples"]),
    "text.npy": (lambda path: path.write_text("hello"), ["no .npy file"]),
    "cut.npy": (
        lambda path: (np.save(path, IDS), path.write_bytes(path.read_bytes()[:-9])),
        [".npy"],
    ),
    "deep.npy": (lambda path: path.write_bytes(npy("{" * 5000)), [".npy"]),
    "objects.npy": (
        lambda path: path.write_bytes(
            npy("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}")
        ),
        [".npy"],
    ),
    "endless.npy": (
        lambda path: path.write_bytes(
            npy("{'descr': '<i8', 'fortran_order': False, 'shape': (10**18, 2)}")
        ),
        [".npy"],
    ),
    "wide.npy": (
        lambda path: np.save(path, np.zeros((1, 70_000), dtype=np.int8)),
        ["has 70000 columns", "at most 65536"],
    ),
    "negative.npy": (
        lambda path: np.save(path, np.where(np.arange(300)[:, None] == 80, -3, IDS)),
        ["row 80: feature 'cat_0': got the id -3", "allowed: 0 and up", "modulo"],
    ),
    "text.npz": (lambda path: path.write_text("hello"), ["no .npz file"]),
    "uneven.npz": (lambda path: np.savez(path, a=IDS[:5], b=IDS), ["'a' has 5", "300 samples"]),
    "float.npz": (lambda path: np.savez(path, a=IDS / 2.0), ["a: holds float64"]),
    "data.xyz": (lambda path: path.write_text("1,2"), ["format", "tsv, npy"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_data_are_told_with_their_place(name: str, tmp_path: Path) -> None:
    write, words = BROKEN[name]
    write(tmp_path / name)
    message = error(tmp_path / name)
    assert all(word in message for word in words), message


def test_ids_beyond_the_table_are_refused_or_taken_modulo(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS)
    rows = int(IDS[:, 0].max())
    first = int(np.argmax(IDS[:, 0] >= rows))
    message = error(tmp_path / "a.npy", rows={"cat_0": rows})
    assert f"row {first}: feature 'cat_0': got the id {rows}; allowed: 0 to {rows - 1}" in message
    same(counts(tmp_path / "a.npy", rows=50, modulo=True)["cat_3"], IDS[:, 3] % 50)


def test_features_must_be_there(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS)
    np.save(tmp_path / "b.npy", IDS[:, :2])
    assert "no feature 'cat_40'" in error(tmp_path / "a.npy", features=("cat_40",))
    assert "b.npy: has no feature 'cat_2'" in error(tmp_path / "a.npy", tmp_path / "b.npy")
    missing = error(tmp_path / "a.npy", features=("cat_1",), rows={"cat_0": 9})
    assert "'cat_1'" in missing


@pytest.mark.parametrize(
    ("name", "data_format"),
    [("day_0.gz", "tsv"), ("x.PQ", "parquet"), ("a.pt.gz", "torch"), ("a.b.npz", "npz")],
)
def test_names_tell_the_format(name: str, data_format: str) -> None:
    assert format_of(Path(name)) is DataFormat(data_format)


INTERACTIONS = (
    "user_id:token\tseen:token_seq\trating:float\twhen:float\n"
    "3\t1 2\t4.5\t86400\n"
    "4\t\t1\t86399\n"
    "3\t7\t2\t172800.5\n"
)


def inter(path: Path, text: str = INTERACTIONS) -> Path:
    path.write_text(text)
    return path


def test_interactions_with_typed_columns(tmp_path: Path) -> None:
    path = inter(tmp_path / "a.inter")
    features = counts(path)
    assert list(features) == ["user_id", "seen"]
    same(features["user_id"], np.array([3, 4, 3]))
    same(features["seen"], np.array([1, 2, 7]))
    assert (features["seen"].samples, features["seen"].empty) == (3, 1)


def test_comma_separated_logs_with_a_line_of_names(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user_id,video_id,time_ms,rate\n0,7,1649397604812,0.5\n3,9,1649397605812,1\n")
    source = open_source(path, None)
    assert (source.features, source.times[-2:]) == (
        ["user_id", "video_id", "time_ms"],
        ["time_ms", "rate"],
    )
    (chunk,) = source.chunks(["video_id"], 10, 0, time="time_ms")
    assert chunk.bags["video_id"].ids.tolist() == [7, 9]
    assert chunk.times is not None
    assert chunk.times.tolist() == [1649397604.812, 1649397605.812]
    for text, words in (("a,b\n", "at least one sample"), ("1,2\n3,4\n", "must name the columns")):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            open_source(path, None)


def test_an_empty_cell_is_a_sample_without_an_id(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a,b,seconds\n,1,10\n3,,10.5\n4,2,\n")
    features = counts(path)
    assert list(features) == ["a", "b"]
    same(features["a"], np.array([3, 4]))
    same(features["b"], np.array([1, 2]))
    assert [(f.samples, f.empty) for f in features.values()] == [(3, 1), (3, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,c\n1,2\n3,4,5\n", "log.csv:2: has 2 columns; line 1 has 3"),
        ("a,b\n1,2\n3,4,5\n", "log.csv:3: has 3 columns; line 1 has 2"),
        ("a;b\n1;2\n", "separated by commas, not by ';'"),
        ('a,b\n1,"x\ny"\n2,z\n', "several lines"),
    ],
)
def test_broken_tables_are_told_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    assert words in error(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user_id\n1\n", "a.inter:1: got the column ':user_id'; allowed: name:type"),
        ("a:token\tb:token\n1\n", "a.inter:2: has 1 columns; line 1 has 2"),
        ("a:token\n1\nbob\n", "a.inter:3: feature 'a': got 'bob'; allowed: whole numbers"),
        ("a:token_seq\n1 2\n3 -1\n", "a.inter:3: feature 'a': got '-1'"),
        ("a:token\n", "has no samples"),
    ],
)
def test_broken_interactions_are_told_with_their_line(
    text: str, words: str, tmp_path: Path
) -> None:
    assert words in error(inter(tmp_path / "a.inter", text))


DAYS = {0: 1, 86_400: 1, 172_800: 1}
"""Samples by start of the day, of all files with times below."""


def npz_days(path: Path) -> Path:
    np.savez(path, user=np.array([3, 4, 3]), when=np.array([86_400_000, 86_399_000, 172_800_500]))
    return path


def parquet_days(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    when = pyarrow.array([86_400_000, 86_399_000, 172_800_500], pyarrow.timestamp("ms"))
    parquet.write_table(pyarrow.table({"user": [3, 4, 3], "when": when}), path)
    return path


@pytest.mark.parametrize(
    ("name", "write", "unit"),
    [("a.inter", inter, 1), ("a.parquet", parquet_days, 1), ("a.npz", npz_days, 1000)],
)
def test_samples_are_counted_by_day(
    name: str, write: Callable[[Path], Path], unit: int, tmp_path: Path
) -> None:
    # numbers below 10^11 are seconds, so a day of milliseconds after 1970 is 1000 days
    window = TimeWindow("when", 86_400 * unit)
    reading = ReadOptions(chunk_rows=2, window=window)
    windows = collect([write(tmp_path / name)], reading)
    assert {
        start // unit: next(iter(features.values())).samples for start, features in windows.items()
    } == DAYS
    assert all("when" not in features for features in windows.values())


def test_a_column_that_has_no_times_is_told(tmp_path: Path) -> None:
    words = error(inter(tmp_path / "a.inter"), window=TimeWindow("wen", 60))
    assert "'wen' of times (did you mean 'when'?)" in words
    assert "it has: none" in error(tsv(tmp_path / "a.tsv"), window=TimeWindow("when", 60))
    text = INTERACTIONS.replace("172800.5", "soon")
    words = error(inter(tmp_path / "b.inter", text), window=TimeWindow("when", 60))
    assert "b.inter:4: when: got 'soon'; allowed: numbers" in words


def test_too_many_windows_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", user=np.arange(1001), when=60 * np.arange(1001))
    assert "more than 1000 windows" in error(tmp_path / "a.npz", window=TimeWindow("when", 60))
