"""Results that are kept: the right ones, whole, and not too many; digests tell contents apart."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from predictor.hardware.loader import load_hardware
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.api.cache import ENDING, ResultCache, code_digest, digest, solver_versions
from shardopt.config import load_model
from tests.builders import a_table, a_topology, a_workload, device_bound


@cache
def a_result() -> Result:
    workload = a_workload(a_table("a", 1000), a_table("b", 50))
    return solve(Problem(workload, a_topology(2), device_bound()), Stop(0.001), 0)


def result(number: int = 0) -> Result:
    return replace(a_result(), evaluations=number, stopped_by="work")


def counted(calls: list[int], result: Result) -> Callable[[], Result]:
    def search() -> Result:
        calls.append(1)
        return result

    return search


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


def test_the_same_input_is_searched_once(tmp_path: Path) -> None:
    calls: list[int] = []
    cache = ResultCache(tmp_path / "kept")
    for from_cache in (False, True, True):
        assert cache.recall(("a", 1), counted(calls, result(1))) == (result(1), from_cache)
    assert cache.recall(("a", 2), counted(calls, result(2))) == (result(2), False)
    assert len(calls) == 2
    assert not os.stat(tmp_path / "kept").st_mode & 0o077, "only its user may look"


def test_other_code_has_other_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ResultCache(tmp_path)
    cache.recall(1, result)
    monkeypatch.setattr("shardopt.api.cache.code_digest", lambda: "another")
    assert cache.recall(1, lambda: result(2)) == (result(2), False)


@pytest.mark.parametrize("stopped_by", ["time", "interrupted"])
def test_what_is_not_final_is_not_kept(tmp_path: Path, stopped_by: str) -> None:
    cut = replace(result(), stopped_by=stopped_by)
    for _ in range(2):
        assert ResultCache(tmp_path).recall(1, lambda: cut) == (cut, False)
    assert not entries(tmp_path)


def signed(content: bytes) -> bytes:
    return sha256(content).hexdigest().encode() + b"\n" + content


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"short", bytes(100)),
        # nothing else than a result is made of it, whatever its digest says
        *map(signed, (b"[]", b'{"plans": []}', b"[" * 100_000, b"cos\nsystem\n(S'id'\ntR.")),
    ],
    ids=len,
)
def test_damaged_entries_are_not_there(tmp_path: Path, content: bytes) -> None:
    cache = ResultCache(tmp_path)
    cache.recall(1, result)
    (entry,) = entries(tmp_path)
    undamaged = entry.read_bytes()
    # another number in a result that can be read
    changed = undamaged.replace(b'"evaluations":0', b'"evaluations":1')
    assert changed != undamaged
    for damaged in (content, undamaged[:-1], changed):
        entry.write_bytes(damaged)
        assert cache.recall(1, result) == (result(), False)
        assert entry.read_bytes() == undamaged, "it was written again"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, make) -> None:
    cache = ResultCache(tmp_path)
    cache.recall(1, result)
    (entry,) = entries(tmp_path)
    entry.unlink()
    make(entry)
    assert cache.recall(1, result) == (result(), False)


def test_where_nothing_can_be_kept_it_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert ResultCache(file / "below").recall(1, result) == (result(), False)
    for _ in range(2):  # of unknown content
        assert ResultCache(tmp_path).recall(object(), result) == (result(), False)
    ResultCache(tmp_path).recall(1, result)
    monkeypatch.setattr(os, "getuid", lambda: -1)  # of another user
    assert ResultCache(tmp_path).recall(1, result) == (result(), False)


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    ResultCache(tmp_path).recall(0, result)
    size = entries(tmp_path)[0].stat().st_size
    cache = ResultCache(tmp_path, most_bytes=3 * size + size // 2)
    for number in range(3):
        cache.recall(number, result)
        for age, path in enumerate(entries(tmp_path)):  # older by their names, but for the next one
            os.utime(path, (age, age))
    first = entries(tmp_path)[0]
    os.utime(first)
    cache.recall(3, result)
    remaining = entries(tmp_path)
    assert len(remaining) == 3
    assert first in remaining, "it was used last"
    ResultCache(tmp_path, most_bytes=size // 2).recall(4, result)
    assert entries(tmp_path) == remaining, "what is larger than all may be is not kept"


def keep_some(folder: Path) -> bool:
    cache = ResultCache(folder, most_bytes=20_000)
    recalled = ((n % 7, cache.recall(n % 7, lambda n=n: result(n % 7))[0]) for n in range(60))
    return all(recalled_result == result(n) for n, recalled_result in recalled)


def test_processes_share_it(tmp_path: Path) -> None:
    a_result()
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert all(pool.map(keep_some, [tmp_path] * 2))
    assert {path.suffix for path in tmp_path.iterdir()} == {ENDING}


def test_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ResultCache.of_user() == ResultCache(tmp_path / "shardopt" / "answers")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert ResultCache.of_user() == ResultCache(Path.home() / ".cache" / "shardopt" / "answers")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert ResultCache.of_user() is None


class Kind(StrEnum):
    ONE = "one"


@dataclass(frozen=True)
class Holder:
    a: object
    b: object = None
    aside: object = field(default=None, compare=False)


DIFFERENT = [
    *(None, 0, 0.0, False, "", "0", b"0", (), ((), ()), ("ab",), ("a", "b"), {"a": 1}, {"a": "1"}),
    *(frozenset({1, 2}), frozenset({1, 3}), Kind.ONE, "one", Path("one"), np.zeros(2)),
    *(np.zeros(2, dtype=np.float32), np.zeros((2, 1)), np.array([0.0, 1.0])),
    *(Holder(1), Holder(1, 2), Holder((1, 2))),
]


def test_what_differs_has_another_digest() -> None:
    assert len({digest(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_what_is_alike_has_the_same() -> None:
    assert digest([1, 2]) == digest((1, 2)), "how a list is kept says nothing"
    assert digest(Holder(1, aside=2)) == digest(Holder(1))
    assert digest(frozenset({"a", "b", "c"})) == digest({"c", "b", "a"})


def test_models_and_profiles(model: Path) -> None:
    workload, hardware = load_model(model), load_hardware("h100-sxm")
    assert digest(workload, hardware) == digest(load_model(model), load_hardware("h100-sxm"))
    assert digest(workload) != digest(replace(workload, batch_size=2 * workload.batch_size))
    assert digest(hardware) != digest(load_hardware("a100-80gb"))


def test_code_and_versions() -> None:
    assert len(code_digest()) == 64
    assert set(solver_versions()) == {"python", "numpy", "ortools", "optuna"}
