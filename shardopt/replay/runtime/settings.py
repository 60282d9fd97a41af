"""Options of a benchmark, and rank and device of this process."""

from __future__ import annotations

import argparse
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .checks import COMMS, read

HOME = Path(os.environ.get("BENCHMARK_FOLDER") or Path(__file__).resolve().parent.parent)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replay a traced iteration.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--warm-up", type=int, default=5, metavar="N")
    parser.add_argument("--iterations", type=int, default=20, metavar="N")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="0: none.")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--subset", choices=("all", "compute", "comms"), default="all")
    parser.add_argument("--ops", action="append", default=[], metavar="NAME")
    parser.add_argument("--from-annotation", metavar="NAME")
    parser.add_argument("--indices", metavar="uniform|zipf:ALPHA")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("--last-op", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=int, metavar="PIPE", help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, metavar="FILE", help="JSON of rank 0.")
    return parser.parse_args()


settings = _arguments()
rank = int(os.environ.get("RANK", "0"))
cpu = torch.device("cpu")
on_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else cpu
stream: Any = torch.cuda.Stream(device) if on_gpu else None
reports = None if settings.report is None else Connection(settings.report, readable=False)
# beside its data only where it was copied into a benchmark; in the library there is none to read
data: dict[str, Any] = read(HOME / "data.json") if __package__ == "runtime" else {}


def is_selected(name: str) -> bool:
    """Return True if the user selected an op, given as ``namespace::op.overload``."""
    if settings.subset != "all" and (settings.subset == "comms") != name.startswith(COMMS):
        return False
    op = name.split(".")[0]
    same = {name, op, name.rpartition("::")[2], op.rpartition("::")[2]}
    return not settings.ops or not same.isdisjoint(settings.ops)
