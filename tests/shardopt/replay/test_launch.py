"""Ranks that die, are killed or cannot start: one message, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from shardopt.replay.generate import generate
from shardopt.replay.launch import ReplayError, replay
from tests.quick import quick_first
from tests.shardopt.replay.captured import attribute, edited

pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).parents[3]
LINEAR = ("aten::linear", "aten::addmm")
QUICK = ["--device", "cpu", "--warm-up", "0", "--iterations", "1"]
COMMAND = """
import signal
from shardopt.cli.app import main

# a shell's background jobs ignore interrupts, and so do their children
signal.signal(signal.SIGINT, signal.default_int_handler)
raise SystemExit(main())
"""
OPS = """
import os, signal, time
import torch

torch.library.define("unkind::relu", "(Tensor self) -> Tensor")

@torch.library.impl("unkind::relu", "CPU")
def relu(x):
    {body}
    return x.relu()
"""


@pytest.fixture(scope="module")
def unkind(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark with an op `unkind::relu`."""

    def rename(node: dict) -> None:
        if node["name"] == "aten::relu":
            schema = attribute(node, "op_schema")
            schema["value"] = schema["value"].replace("aten::relu", "unkind::relu")

    place = tmp_path_factory.mktemp("unkind")
    generate([edited(traces / "rank0.et.json", rename)], place)
    return place


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module in which the op does as told."""

    def write(body: str) -> str:
        (tmp_path / "unkind_ops.py").write_text(OPS.format(body=body))
        return "unkind_ops"

    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPOSITORY}")
    return write


@pytest.mark.slow
def test_an_op_that_ends_the_process_is_left_out(
    unkind: Path, module: Callable[[str], str]
) -> None:
    name = module("os.kill(os.getpid(), signal.SIGSEGV)")
    result = replay(unkind, [*QUICK, "--import", name])
    assert result["not_replayed"] == {"unkind::relu.default: ends the process here": 1}
    assert result["ops_replayed"] == result["ops_total"] - 1 > 0


@pytest.mark.slow
def test_a_rank_that_the_system_kills(unkind: Path, module: Callable[[str], str]) -> None:
    name = module("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ReplayError, match=r"rank 0 .* SIGKILL \(the system may have run out of"):
        replay(unkind, [*QUICK, "--import", name])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.is_file() or status.read_text().split()[2] != "Z"


@pytest.fixture
def busy(
    unkind: Path, module: Callable[[str], str], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command whose rank is in an op that takes minutes, and the rank's process id."""
    place = tmp_path / "pid"
    body = f"open({str(place) + '.new'!r}, 'w').write(str(os.getpid()))"
    body += f"; os.replace({str(place) + '.new'!r}, {str(place)!r}); time.sleep(600)"
    words = ["bench", "replay", str(unkind), "--device", "cpu", "--import", module(body)]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ends = time.monotonic() + 240
        while not place.exists() and time.monotonic() < ends:
            time.sleep(0.05)
        yield process, int(place.read_text())
    finally:
        process.kill()
        process.communicate()


def check_gone(pid: int) -> None:
    ends = time.monotonic() + 120
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not alive(pid)


def test_an_interrupt_ends_all(busy: tuple[subprocess.Popen[str], int]) -> None:
    process, rank = busy
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=240)
    assert (process.returncode, stdout, stderr) == (130, "", "shardopt: error: interrupted\n")
    check_gone(rank)


def test_a_rank_that_somebody_kills(busy: tuple[subprocess.Popen[str], int]) -> None:
    process, rank = busy
    os.kill(rank, signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=240)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.startswith("shardopt: error: rank 0 died of signal SIGKILL (the system may have")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.slow
def test_ranks_end_with_the_command(
    busy: tuple[subprocess.Popen[str], int], number: signal.Signals
) -> None:
    process, rank = busy
    process.send_signal(number)
    process.wait(timeout=240)
    check_gone(rank)


def changed(unkind: Path, place: Path, change: Callable[[dict], object]) -> Path:
    folder = place / "changed"
    shutil.copytree(unkind, folder)
    data = json.loads((folder / "rank0.json").read_text())
    change(data)
    (folder / "rank0.json").write_text(json.dumps(data))
    return folder


def test_more_than_the_memory_there_is(unkind: Path, tmp_path: Path) -> None:
    def swell(data: dict) -> None:
        read = {n for call in data["calls"] if call["op"] in LINEAR for n in call["reads"]}
        number = next(n for n in read if str(n) in data["made"])
        data["made"][str(number)].update(shape=[1 << 45], strides=[1])

    folder = changed(unkind, tmp_path, swell)
    with pytest.raises(ReplayError, match=r"take 13\d{4}\.\d GiB .*try fewer --ranks") as error:
        replay(folder, QUICK)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    quick_first(
        1,
        [
            ("--ops", "aten::ad", r"no op is one of --ops aten::ad .*near it: aten::add"),
            ("--import", "no_such", r"--import no_such: No module named 'no_such'; put"),
        ],
    ),
)
def test_options_that_cannot_be_used(unkind: Path, flag: str, value: str, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        replay(unkind, [*QUICK, flag, value])


@pytest.mark.slow
def test_calls_that_cannot_be_used(unkind: Path, tmp_path: Path) -> None:
    folder = changed(unkind, tmp_path, lambda data: data["calls"][0].pop("op"))
    with pytest.raises(ReplayError, match=r"^rank0\.json: .* has no key 'op'; generate"):
        replay(folder, QUICK)


def test_data_that_cannot_be_used(unkind: Path, tmp_path: Path) -> None:
    folder = changed(unkind, tmp_path, lambda data: None)
    (folder / "data.json").write_text('{"schema": "shardopt.replay/1", "world_size": "two"}')
    with pytest.raises(InputError, match=r"data\.json: `world_size` must be a whole number"):
        replay(folder, QUICK)


def test_iterations_are_counted_down(traces: Path, tmp_path: Path) -> None:
    generate([traces / "rank0.et.json"], tmp_path / "b")
    calls: list[tuple[int, int, float]] = []
    words = ["--device", "cpu", "--warm-up", "2", "--iterations", "3"]
    replay(tmp_path / "b", words, on_iteration=lambda *progress: calls.append(progress))
    assert [(done, total) for done, total, _ in calls] == [(1, 5), (2, 5), (3, 5), (4, 5)]
    remaining = [left_s for *_, left_s in calls]
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[-1] > 0
