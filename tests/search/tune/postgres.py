"""A PostgreSQL server of our own on loopback, for tests that need a real one."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INSTALLED = "/usr/lib/postgresql/*/bin/initdb"
USERS = ("postgres", "nobody")
"""The server refuses to run as root."""


def programs() -> Path | None:
    """The directory with initdb and pg_ctl; None if no server is installed."""
    debian = sorted(Path("/").glob(INSTALLED.lstrip("/")), reverse=True)
    for found in [*debian, Path(shutil.which("initdb") or "/nowhere")]:
        folder = Path(os.path.realpath(found)).parent
        if (folder / "initdb").is_file() and (folder / "pg_ctl").is_file():
            return folder
    return None


@contextmanager
def server() -> Iterator[str]:
    """URL of an empty database; the server is gone afterwards."""
    pytest.importorskip("psycopg2", reason="the PostgreSQL driver psycopg2 is not installed")
    folder = programs()
    if folder is None:
        pytest.skip("no PostgreSQL server is installed (no initdb)")
    # not pytest's directory, which only its owner may enter
    place = Path(tempfile.mkdtemp(prefix="shardopt-pg-"))
    user = _owner(place)
    data, port = place / "data", _free_port()
    try:
        _run(user, folder / "initdb", "-D", data, "-U", "tuner", "-A", "trust", "--no-sync")
        options = f"-p {port} -k {place} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = place / "log"
        _run(user, folder / "pg_ctl", "-D", data, "-o", options, "-l", log, "-w", "start")
        try:
            yield f"postgresql://tuner@127.0.0.1:{port}/postgres"
        finally:
            _run(user, folder / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _owner(place: Path) -> str | None:
    """The user that the server runs as, who owns the directory; None for the one we are."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next((name for name in USERS if name in names), None)
    if user is None or shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no other user to run it as")
    shutil.chown(place, user)
    return user


def _run(user: str | None, *command: object) -> None:
    words = [str(word) for word in command]
    if user is not None:
        group = pwd.getpwnam(user).pw_gid
        words = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *words]
    # files, not pipes: the server would hold a pipe open as long as it runs
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(words, stdout=said, stderr=said, cwd="/", timeout=60)
        said.seek(0)
        assert done.returncode == 0, said.read().decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
