"""Two hosts on one machine: what makes them, what is refused, and how fast the link is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from predictor.errors import InputError, PlanError
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import DenseArch
from shardopt.bench.job import Job, check_job
from shardopt.bench.rows import read_rows
from shardopt.bench.run import run_bench
from shardopt.calibrate import points as design
from shardopt.calibrate import run
from shardopt.calibrate.collectives import collective_points
from shardopt.calibrate.points import CalibrationSettings, Point
from shardopt.ranks import hosts
from shardopt.ranks.hosts import NETNS, Host, Link, check_hosts, shaped_hosts
from tests.builders import a_table, a_workload, cut

PACKAGES = Path(__file__).resolve().parents[3]
TRIES = 2
TCP = """
import socket, sys, time
from shardopt.ranks.hosts import Host, enter
enter(Host(*sys.argv[2:5]))
if sys.argv[1] == "send":
    peer, size = socket.create_connection((sys.argv[6], 5001)), int(sys.argv[5])
    peer.sendall(bytes(size))
    sys.exit()
server = socket.create_server((sys.argv[4], 5001))
print("listens", flush=True)
peer, _ = server.accept()
buffer, got, size = bytearray(2**20), 0, int(sys.argv[5])
first, begin = peer.recv_into(buffer), time.monotonic()
got = first
while got < size:
    got += peer.recv_into(buffer)
print((got - first) * 8e-9 / (time.monotonic() - begin))
"""


def own() -> list[str]:
    """Namespaces of this process."""
    return [path.name for path in NETNS.glob(f"{hosts.PREFIX}-{os.getpid()}-*")]


@pytest.fixture(scope="module")
def can_make_hosts() -> None:
    try:
        with shaped_hosts(Link(1.0)):
            pass
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("gbit_s", [0.0, -1.0, 101.0, float("nan")])
def test_a_rate_out_of_range(gbit_s: float) -> None:
    with pytest.raises(InputError, match=r"the link has .* at least 0.001 and at most 100"):
        check_hosts(Link(gbit_s))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None if name == "tc" else "/bin/ip")
    with pytest.raises(InputError, match=r"a link needs tc, not found here; install iproute2"):
        check_hosts(Link(1.0))
    monkeypatch.setattr(hosts.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="run as root"):
        check_hosts(Link(1.0))
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(InputError, match="this is darwin"):
        check_hosts(Link(1.0))


def test_sizes_end_where_a_call_takes_too_long() -> None:
    for gbit_s, most in ((0.001, 2**14), (0.5, 2**22), (1.0, 2**24), (4.0, 2**26), (100.0, 2**26)):
        points = collective_points(design.FULL, 2, gbit_s)
        largest = max(points, key=lambda point: point.params["bytes"])
        assert largest.params["bytes"] == most
        assert not largest.test, "the last octave is fitted"
        assert {point.params["link_gbit_s"] for point in points} == {gbit_s}
    assert all("link_gbit_s" not in p.params for p in collective_points(design.FULL, 2))


@pytest.mark.parametrize(
    ("backend", "ranks", "message"),
    [("gloo", 4, "2 hosts of one rank, not 4"), ("nccl", 2, "choose gloo")],
)
def test_calibrate_refuses_other_ranks(
    backend: str, ranks: int, message: str, tmp_path: Path
) -> None:
    settings = CalibrationSettings(backend, ranks, design.TINY, tmp_path / "rows.csv", Link(1.0))
    with pytest.raises(InputError, match=message):
        run.check_calibration(settings)


def make_job(ranks_a_host: int = 1, **settings: object) -> Job:
    table = a_table("a", 100, 8)
    workload = a_workload(table, batch_size=16, dense=DenseArch(4, (8,), (8, 1), "dot"))
    shards = {workload.keys[0]: cut(table, ShardingType.ROW_WISE, [0, 1])}
    return Job(
        workload, {"plan": ShardingPlan(shards, 2, ranks_a_host)}, link=Link(0.5), **settings
    )


def test_plans_for_other_hosts_are_refused() -> None:
    with pytest.raises(PlanError, match="a link joins 2 hosts of one rank"):
        check_job(make_job(ranks_a_host=2))
    with pytest.raises(InputError, match="choose gloo"):
        check_job(make_job(backend="nccl"))
    with pytest.raises(InputError, match="run without torchrun"):
        check_job(make_job(), joined=True)


@pytest.mark.usefixtures("can_make_hosts")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    def fail() -> None:
        with shaped_hosts(Link(1.0)) as machines:
            assert sorted(own()) == [host.namespace for host in machines]
            raise error

    with pytest.raises(error):
        fail()
    assert not own()


@pytest.mark.usefixtures("can_make_hosts")
def test_nothing_is_left_of_hosts_that_were_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_shaping", lambda link: ["no_such_discipline"])
    with (
        pytest.raises(InputError, match=r"cannot be made: `tc -n .*no_such_discipline` failed: "),
        shaped_hosts(Link(1.0)),
    ):
        pass
    assert not own()


@pytest.mark.usefixtures("can_make_hosts")
def test_what_a_killed_process_left_is_removed_and_others_stay() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    orphan = f"{hosts.PREFIX}-{child.pid}-0-0"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    with shaped_hosts(Link(1.0)) as outer:
        assert not (NETNS / orphan).exists()
        with shaped_hosts(Link(1.0)):
            assert all((NETNS / host.namespace).exists() for host in outer)
            assert len(own()) == 4
    assert not own()


def measured_gbit_s(link: Link, seconds: float) -> float:
    """Measure the rate of one TCP connection."""
    size = str(int(link.gbit_s / 8 * 1e9 * seconds))

    def start(role: str, host: Host, *more: str) -> "subprocess.Popen[str]":
        place = [host.namespace, host.interface, host.address]
        return subprocess.Popen(
            [sys.executable, "-c", TCP, role, *place, size, *more],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        )

    with shaped_hosts(link) as (first, second), start("receive", first) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listens\n"
        with start("send", second, first.address):
            return float(receiver.stdout.readline())


@pytest.mark.slow
@pytest.mark.usefixtures("can_make_hosts")
def test_a_link_carries_no_more_than_its_rate_and_a_faster_one_carries_more() -> None:
    # other work on this machine may slow a transfer, nothing hastens it
    slow, fast = (
        max(measured_gbit_s(Link(gbit_s), 0.3) for _ in range(TRIES)) for gbit_s in (0.5, 4.0)
    )
    assert slow < 0.5
    assert slow < fast < 4.0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("can_make_hosts")
def test_an_all_to_all_takes_the_time_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    points = [
        Point("collective", {"op": op, "bytes": 2**22, "ranks": 2, "link_gbit_s": 0.5})
        for op in ("all_to_all", "all_reduce")
    ]
    settings = CalibrationSettings("gloo", 2, design.TINY, tmp_path / "rows.csv", Link(0.5))
    monkeypatch.setattr(run, "points_of", lambda _: ([], points))
    file = run.measure(settings, print)
    assert file is not None
    rows = file.rows
    half_us, full_us = (2**21 * 8 / 0.5e9 * 1e6 * buffers for buffers in (1, 2))
    assert rows[0].median_us > 0.95 * half_us
    assert rows[1].median_us > 0.95 * full_us
    assert not own()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("can_make_hosts")
def test_a_plan_runs_over_the_link(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    path = tmp_path / "rows.json"
    rows = run_bench(make_job(rounds=2, block=3, warmup=1), path)
    assert rows is not None
    assert read_rows(path) == rows
    assert rows.settings["link_gbit_s"] == 0.5
    # the reference exchange carries 2 MiB each way: the ranks did talk over the link
    for times in zip(*rows.rounds[0]["reference_ms"]["all_to_all"], strict=True):
        assert max(times) > 30.0
    assert not own()
