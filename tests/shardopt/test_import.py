"""What importing shardopt costs, and what it offers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardopt

ROOT = Path(shardopt.__file__).resolve().parent.parent
HEAVY = ("torch", "torchrec", "fbgemm_gpu", "ortools", "optuna", "scipy", "pandas", "sklearn")

PRINT_MODULES = """
import json, sys
try:
    {body}
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def run(*args: str, cwd: Path, path: Path | str = ROOT) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds shardopt on `path`, behind its own working directory."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def modules_after(body: str, cwd: Path) -> set[str]:
    done = run("-c", PRINT_MODULES.format(body=body), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_import_loads_no_package_of_ours_or_others(tmp_path: Path) -> None:
    loaded = modules_after("import shardopt", tmp_path)
    assert not loaded & {*HEAVY, "numpy", "pydantic", "predictor", "search"}


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    body = "import shardopt.cli.app as app; sys.argv = ['shardopt', '--help']; app.main()"
    loaded = modules_after(body, tmp_path)
    assert "shardopt.cli.app" in loaded
    assert not loaded & set(HEAVY)


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
