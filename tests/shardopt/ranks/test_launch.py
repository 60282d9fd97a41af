"""Ranks that report, fail, are killed or hang: who is blamed, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.ranks import launch
from shardopt.ranks.launch import LOST, Command, rank_environment, run_commands, run_ranks
from shardopt.ranks.rank import RankDiedError, error_facts

REPOSITORY = Path(__file__).resolve().parents[3]
BODIES = """
import os, signal, sys, time

from predictor.errors import InfeasibleError


def talk(rank, report, text):
    for at in range(3):
        report((rank.index, rank.world_size, f"{text} {at}"))


def variables(rank, report):
    report({name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")})


def fail(rank, report, which):
    report(os.getpid())
    if rank.index == which:
        raise ValueError("no such row\\nmore")
    time.sleep(60)


def refuse(rank, report):
    raise InfeasibleError("too large by 3 B")


def kill(rank, report):
    if rank.index == 1:
        print("terminate called\\n\\nwithout an active exception", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang(rank, report, begin=True):
    if begin:
        report(os.getpid())
    print("cannot find the disk", flush=True)
    time.sleep(60)
"""
COMMAND = """
import bodies
from shardopt.ranks.launch import run_ranks

run_ranks(bodies.hang, 2, on_report=lambda _, pid: print(pid, flush=True))
"""


@pytest.fixture
def bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that ranks can import."""
    (tmp_path / "bodies.py").write_text(BODIES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPOSITORY}")
    monkeypatch.syspath_prepend(str(tmp_path))
    import bodies

    yield bodies
    del sys.modules["bodies"]


def test_reports_arrive_in_order_with_their_rank(bodies) -> None:
    heard: list[tuple[int, tuple[int, int, str]]] = []
    run_ranks(bodies.talk, 2, "word", on_report=lambda rank, report: heard.append((rank, report)))
    for index in range(2):
        of_rank = [report for rank, report in heard if rank == index]
        assert of_rank == [(index, 2, f"word {at}") for at in range(3)]


def test_ranks_have_the_variables_of_torchrun(bodies) -> None:
    heard: dict[int, dict[str, str]] = {}
    run_ranks(bodies.variables, 2, local_world_size=1, on_report=heard.__setitem__)
    assert heard == {
        rank: {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for rank in range(2)
    }


def test_the_rank_that_fails_is_named_and_the_others_are_ended(
    bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    pids: list[int] = []
    with pytest.raises(RankDiedError) as caught:
        run_ranks(bodies.fail, 2, 1, on_report=lambda _, pid: pids.append(pid))
    assert str(caught.value).startswith("rank 1 died of ValueError at ")
    assert str(caught.value).endswith(": no such row")
    assert (caught.value.rank, caught.value.signal) == (1, None)
    assert pids
    assert not any(alive(pid) for pid in pids)


def test_an_error_of_ours_keeps_its_text_and_exit_code(bodies) -> None:
    with pytest.raises(RankDiedError, match=r"^too large by 3 B$") as caught:
        run_ranks(bodies.refuse, 1)
    assert caught.value.exit_code == 3


def test_a_rank_that_is_killed(bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    with pytest.raises(RankDiedError) as caught:
        run_ranks(bodies.kill, 2)
    assert str(caught.value) == (
        "rank 1 died of signal SIGKILL (the system may have run out of memory); its log ends with: "
        "terminate called / without an active exception"
    )
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)


def test_ranks_that_hang(bodies) -> None:
    with pytest.raises(RankDiedError, match="no rank reported anything"):
        run_ranks(bodies.hang, 1, True, silence_s=0.5)


@pytest.mark.slow
def test_ranks_that_do_not_begin(bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have more time for that, even on a busy machine, and what they said is shown."""
    monkeypatch.setattr(launch, "START_S", 30.0)
    with pytest.raises(RankDiedError, match=r"no rank had begun.*rank 0: cannot find the disk"):
        run_ranks(bodies.hang, 1, False, silence_s=0.5)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().split()[2] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.usefixtures("bodies")
def test_ranks_end_with_the_process_that_started_them(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # a shell starts what runs in the background without it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    process.wait(timeout=240)
    process.stdout.close()
    if number is signal.SIGTERM:
        assert process.returncode == 143
        assert list(tmp_path.glob("shardopt-*")) == [], "its folder is gone"
    ends = time.monotonic() + 240
    while any(alive(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_programs_that_know_nothing_of_shardopt(tmp_path: Path) -> None:
    def command(index: int, program: str) -> Command:
        return Command([sys.executable, "-c", program], rank_environment(index, 2))

    write = "import os; open(os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    write = f"import os; os.chdir({str(tmp_path)!r}); {write}"
    run_commands([command(0, write), command(1, write)], tmp_path)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["2", "2"]
    broken = "import sys; print('[W1121 noise'); sys.exit('no such op')"
    with pytest.raises(RankDiedError, match=r"rank 1 died with exit code 1; its log ends with: no"):
        run_commands([command(0, write), command(1, broken)], tmp_path)
    with pytest.raises(InputError, match="the ranks cannot be started"):
        run_commands([Command(["/no/such/program"], {})], tmp_path)


def test_no_place_for_temporary_files(bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(InputError, match=r"no place for temporary files: .* set TMPDIR"):
        run_ranks(bodies.talk, 1, "word")


def leave_error(folder: Path, rank: int, error: Exception, at: float) -> None:
    """Write the error that a rank leaves before it ends."""
    try:
        raise error
    except Exception as caught:
        (folder / f"error.{rank}").write_text(json.dumps({**error_facts(caught), "at": at}))


def test_the_first_error_is_the_cause(tmp_path: Path) -> None:
    leave_error(tmp_path, 0, RuntimeError("Connection closed by peer"), at=2.0)
    leave_error(tmp_path, 1, ValueError("no such row\nmore"), at=1.0)
    message = str(launch._cause(tmp_path, {0: (1, 3.0), 1: (1, 3.0)}))
    assert message.startswith("rank 1 died of ValueError at ranks/test_launch.py:")
    assert message.endswith(": no such row")


def test_ranks_that_lost_another_are_not_to_blame(tmp_path: Path) -> None:
    leave_error(tmp_path, 0, RuntimeError("Connection closed by peer"), at=1.0)
    assert launch._cause(tmp_path, {0: (1, 1.0), 1: (-9, 2.0)}).rank == 1
    assert launch._cause(tmp_path, {1: (LOST, 1.0), 2: (2, 2.0)}).rank == 2
    assert launch._cause(tmp_path, {1: (LOST, 2.0), 2: (LOST, 1.0)}).rank == 2
    assert launch._cause(tmp_path, {1: (2, 1.0), 2: (-11, 2.0)}).signal == signal.SIGSEGV


SLEEP = "import time; print(flush=True); time.sleep(600)"
SPIN = "print(flush=True)\nwhile True: pass"


def words(pids: list[int]) -> str:
    return str(launch._hung(pids, 5.0, True, Path()))


@contextmanager
def programs(*texts: str) -> Iterator[list[int]]:
    processes = [subprocess.Popen([sys.executable, "-c", p], stdout=subprocess.PIPE) for p in texts]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_what_every_rank_does_is_said() -> None:
    with programs(SLEEP, SLEEP, SPIN) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        every = "rank 0 waits", "rank 1 is stopped", "rank 2 computes"
        while not all(part in words(pids) for part in every):
            pass
