"""Cost of importing shardopt, and its public names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardopt

ROOT = Path(shardopt.__file__).resolve().parent.parent
UNWANTED = {
    *("torch", "torchrec", "fbgemm_gpu", "ortools", "optuna", "scipy", "pandas", "sklearn"),
    *("numpy", "pydantic", "predictor", "search"),
}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("shardopt", UNWANTED),
        ("shardopt.cli.app", UNWANTED - {"predictor"}),
        ("search.solve", {"torch", "optuna", "scipy", "pandas"}),
    ],
)
def test_import_loads_no_package_of_ours_or_others(
    module: str, unwanted: set[str], tmp_path: Path
) -> None:
    """From a folder that is not ours; a command imports what is heavy when it runs. CP-SAT, which
    brings pandas, is imported where it is used."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}, sys; print(*sys.modules)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & unwanted


@pytest.mark.parametrize("name", [name for name in shardopt.__all__ if "torchrec" not in name])
def test_public_name_loads(name: str) -> None:
    assert getattr(shardopt, name) is not None
    assert name in dir(shardopt)


@pytest.mark.parametrize("name", ["from_torchrec", "to_torchrec"])
def test_public_name_for_torchrec_loads(name: str) -> None:
    pytest.importorskip("torch")
    assert callable(getattr(shardopt, name))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_plam'"):
        _ = shardopt.load_plam
