"""Answers that are kept: the right ones, whole, and not too many."""

import hashlib
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import NoneType

import pytest

from search.problem import Result
from search.solve import solve
from search.stop import Stop
from shardopt.api.cache import ENDING, ResultCache
from tests.search.problems import random_problem


def always(answer: object) -> bool:
    return True


def counted(calls: list[int], answer: object) -> Callable[[], object]:
    def compute() -> object:
        calls.append(1)
        return answer

    return compute


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


def test_the_same_input_is_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []
    cache = ResultCache(tmp_path / "kept")
    for _ in range(3):
        assert cache.recall(("a", 1), dict[str, float], counted(calls, {"x": 1.5}), always) == {
            "x": 1.5
        }
    assert cache.recall(("a", 2), NoneType, counted(calls, None), always) is None
    assert cache.recall(("a", 2), NoneType, counted(calls, None), always) is None, (
        "None is an answer too"
    )
    assert len(calls) == 2
    assert not os.stat(tmp_path / "kept").st_mode & 0o077, "only its user may look"


def test_other_code_has_other_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    cache = ResultCache(tmp_path)
    cache.recall(1, str, counted(calls, "old"), always)
    monkeypatch.setattr("shardopt.api.cache.code_digest", lambda: "another")
    assert cache.recall(1, str, counted(calls, "new"), always) == "new"


def test_what_is_not_final_is_not_kept(tmp_path: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        ResultCache(tmp_path).recall(1, str, counted(calls, "cut"), lambda answer: False)
    assert len(calls) == 2
    assert not entries(tmp_path)


def test_unknown_content_is_computed(tmp_path: Path) -> None:
    assert ResultCache(tmp_path).recall(object(), int, lambda: 3, always) == 3
    assert ResultCache(tmp_path).recall(1, int, lambda: 1j, always) == 1j


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100), None])
def test_damaged_entries_are_not_there(tmp_path: Path, damage: bytes | None) -> None:
    calls: list[int] = []
    cache = ResultCache(tmp_path)
    cache.recall(1, str, counted(calls, "answer"), always)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    entry.write_bytes(content[:-1] if damage is None else damage)
    assert cache.recall(1, str, counted(calls, "answer"), always) == "answer"
    assert len(calls) == 2
    assert entry.read_bytes() == content, "it was written again"


def test_what_is_kept_is_read_as_its_type_and_runs_nothing(tmp_path: Path) -> None:
    calls: list[int] = []
    cache = ResultCache(tmp_path)
    cache.recall(1, str, counted(calls, "answer"), always)
    (entry,) = entries(tmp_path)
    mark = tmp_path / "ran"
    for content in (b"[1]", b"not JSON", pickle.dumps(Runs(mark))):
        entry.write_bytes(hashlib.sha256(content).digest() + content)
        assert cache.recall(1, str, counted(calls, "answer"), always) == "answer"
    assert len(calls) == 4
    assert not mark.exists()


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_entry(tmp_path: Path, make: Callable[[Path], None]) -> None:
    cache = ResultCache(tmp_path)
    cache.recall(1, str, lambda: "answer", always)
    (entry,) = entries(tmp_path)
    entry.unlink()
    make(entry)
    assert cache.recall(1, str, lambda: "answer", lambda answer: False) == "answer"


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", fail)
    assert ResultCache.of_user().recall(1, str, lambda: "answer", always) == "answer"


def test_a_result_is_read_as_it_was(tmp_path: Path) -> None:
    result = solve(random_problem(3), Stop(effort=0.01), 0)
    cache = ResultCache(tmp_path)
    for compute in (lambda: result, pytest.fail):
        assert cache.recall(1, Result, compute, always) == result


def test_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    cache = ResultCache(tmp_path)
    cache.recall(1, str, counted(calls, "answer"), always)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    cache.recall(1, str, counted(calls, "answer"), always)
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert ResultCache(taken / "below").recall(1, str, lambda: "answer", always) == "answer"


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path, most_bytes=3500)
    for number in range(3):
        cache.recall(number, str, lambda: "x" * 998, always)
        for age, path in enumerate(entries(tmp_path)):  # older by their names, but for the next one
            os.utime(path, (age, age))
    first = entries(tmp_path)[0]
    os.utime(first)
    cache.recall(3, str, lambda: "x" * 998, always)
    left = entries(tmp_path)
    assert len(left) == 3
    assert first in left, "it was used last"
    cache.recall(4, str, lambda: "x" * 5000, always)
    assert entries(tmp_path) == left, "what is larger than all may be is not kept"


def keep_some(folder: Path) -> bool:
    cache = ResultCache(folder, most_bytes=20_000)
    return all(
        cache.recall(n % 7, str, lambda n=n: str(n % 7) * 1000, always) == str(n % 7) * 1000
        for n in range(60)
    )


def test_processes_share_it(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert all(pool.map(keep_some, [tmp_path] * 2))
    assert {path.suffix for path in tmp_path.iterdir()} == {ENDING}


def test_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ResultCache.of_user().folder == tmp_path / "shardopt" / "answers"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert ResultCache.of_user().folder == Path.home() / ".cache" / "shardopt" / "answers"
