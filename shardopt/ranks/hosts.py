"""Two hosts with a slow link on one Linux machine: network namespaces joined by a shaped veth pair.

A rank that enters a host reaches the other only over the link, which carries `Link.gbit_s` each
way. Needs root and iproute2; names carry the process id, so that what a killed run left is found.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as counter
from pathlib import Path

from predictor.errors import InputError

NETNS = Path("/run/netns")
"""Folder in which iproute2 keeps the names."""
PREFIX = "shardopt"
CLONE_NEWNET = 0x40000000
LOWEST_GBIT_S, HIGHEST_GBIT_S = 0.001, 100.0
BURST_S = 0.25e-3
"""Burst in s that an idle link lets through at once; the queue wakes some 0.1 ms late."""
MIN_BURST_BYTES = 8 * 2**10
"""A packet beyond the burst is dropped, and an Ethernet frame has 1.5 kB."""
QUEUE_BYTES = 32 * 2**20
"""Length of the queue: more than TCP hands down before it waits, so nothing is dropped."""
HOSTS = 2

_serial = counter()


@dataclass(frozen=True)
class Link:
    """Link between two hosts; as fast in both directions at once."""

    gbit_s: float


@dataclass(frozen=True)
class Host:
    """A network namespace, and its end of the link."""

    namespace: str
    interface: str
    address: str


def check_hosts(link: Link, backend: str = "gloo") -> None:
    """Refuse a link that this machine cannot make.

    Raises:
        InputError: a backend that may not use it, a rate out of range, no Linux, iproute2 missing,
            or not root.
    """
    if backend != "gloo":
        raise InputError(
            f"a link limits TCP, which gloo uses and {backend} may not; choose gloo",
            inputs=("link", "backend"),
        )
    if not LOWEST_GBIT_S <= link.gbit_s <= HIGHEST_GBIT_S:
        raise InputError(
            f"the link has {link.gbit_s:g} Gbit/s; it must have at least {LOWEST_GBIT_S:g} and at "
            f"most {HIGHEST_GBIT_S:g}",
            inputs=("link",),
        )
    if sys.platform != "linux":
        raise InputError(
            f"a link between two hosts on one machine needs Linux's network namespaces, but this "
            f"is {sys.platform}; run without a link, or join ranks of real hosts with torchrun",
            inputs=("link",),
        )
    lacks = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if lacks:
        raise InputError(
            f"a link needs {' and '.join(lacks)}, not found here; install iproute2 "
            "(apt-get install iproute2), or run without a link",
            inputs=("link",),
        )
    if os.geteuid():
        raise InputError(
            "a link needs network namespaces, which only root may make; run as root, or without "
            "a link",
            inputs=("link",),
        )


@contextmanager
def shaped_hosts(link: Link) -> Iterator[list[Host]]:
    """Hosts joined by the link, for as long as the context lasts; also after errors none is left.

    Raises:
        InputError: see `check_hosts`; or the system refuses, and why.
    """
    check_hosts(link)
    for path in NETNS.glob(f"{PREFIX}-*-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():  # a killed process left it
            _quietly(["ip", "netns", "del", path.name])
    serial = next(_serial)
    # addresses may repeat, as no namespace sees another's
    hosts = [
        Host(f"{PREFIX}-{os.getpid()}-{serial}-{i}", f"link{i}", f"10.213.0.{i + 1}")
        for i in range(HOSTS)
    ]
    try:
        for command in _commands(hosts, link):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise InputError(
                    f"the link cannot be made: `{' '.join(command)}` failed: {done.stderr.strip()};"
                    " the kernel may lack network namespaces, veth or sch_tbf, or a container the "
                    "right to them (CAP_NET_ADMIN, CAP_SYS_ADMIN): add them, or run without a link",
                    inputs=("link",),
                )
        yield hosts
    finally:
        # processes that still are in a namespace would keep the pair alive
        _quietly(["ip", "-n", hosts[0].namespace, "link", "del", hosts[0].interface])
        for host in hosts:
            _quietly(["ip", "netns", "del", host.namespace])


def _commands(hosts: list[Host], link: Link) -> list[list[str]]:
    """Return the commands that make the hosts, in order."""
    first, second = hosts
    pair = ["ip", "-n", first.namespace, "link", "add", first.interface, "type", "veth"]
    commands = [["ip", "netns", "add", host.namespace] for host in hosts]
    commands.append([*pair, "peer", "name", second.interface, "netns", second.namespace])
    for host in hosts:
        inside, own = ["ip", "-n", host.namespace], ["dev", host.interface]
        commands += [
            # no address of IPv6, which gloo might choose before it is usable
            [*inside, "link", "set", *own, "addrgenmode", "none"],
            [*inside, "address", "add", f"{host.address}/24", *own],
            [*inside, "link", "set", "dev", "lo", "up"],
            ["tc", "-n", host.namespace, "qdisc", "add", *own, "root", *_shaping(link)],
            [*inside, "link", "set", *own, "up"],
        ]
    return commands


def _shaping(link: Link) -> list[str]:
    """A token bucket; it cuts what TCP segments late into packets that fit the burst."""
    rate = link.gbit_s * 1e9
    burst = max(MIN_BURST_BYTES, round(rate / 8 * BURST_S))
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{QUEUE_BYTES}b"]


def enter(host: Host) -> None:
    """Move this process into a host, before it has threads: those that run stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NETNS / host.namespace).open("rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"setns: {os.strerror(error)}", host.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface


def _quietly(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=False)
