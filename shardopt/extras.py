"""Packages that `pip install shardopt` leaves out, and what to say when one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from predictor.errors import ShardoptError

EXTRAS = {"scipy": "calibrate", "pyarrow": "stats", "psycopg2": "tune"}
"""Package -> the extra that installs it; torch and TorchRec have commands of their own."""
TORCHREC = ("torch", "torchrec", "fbgemm_gpu", "tensordict", "torchmetrics")
# 'cpu' needs two steps: torchrec's metadata asks for the CUDA wheel fbgemm-gpu, whose files would
# overwrite those of fbgemm-gpu-cpu.
TORCHREC_COMMANDS = """\
  with GPUs:     pip install 'shardopt[cuda]'
  without GPUs:  pip install 'shardopt[cpu]' && pip install torchrec==1.8.0 --no-deps"""


class MissingPackageError(ShardoptError, ImportError):
    """An optional package cannot be imported; says how to install it."""


@contextmanager
def needs_torchrec() -> Iterator[None]:
    """Turn a failing import of torch, fbgemm_gpu or torchrec into the commands that mend it."""
    try:
        yield
    except ImportError as error:
        raise _torchrec_missing(error) from error


def require_packages(*names: str) -> None:
    """Refuse to go on without some packages, before any work and without importing them.

    Raises:
        MissingPackageError: one is not installed; says how to install it.
    """
    for name in names:
        if find_spec(name) is None:
            missing = ModuleNotFoundError(f"No module named '{name}'", name=name)
            raise missing_package(missing) or missing


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Say what to install where an optional package is missing; None if it is another module."""
    package = (error.name or "").partition(".")[0]
    if package in TORCHREC:
        return _torchrec_missing(error)
    if package in EXTRAS:
        return MissingPackageError(
            f"this needs {package}, which is not installed: "
            f"pip install 'shardopt[{EXTRAS[package]}]'"
        )
    return None


def _torchrec_missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        f"this needs TorchRec, which cannot be imported here ({error}). Install it:\n"
        f"{TORCHREC_COMMANDS}"
    )
