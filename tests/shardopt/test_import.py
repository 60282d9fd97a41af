"""What importing shardopt costs, what it offers, and what it refuses."""

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


@pytest.mark.parametrize("package", ["predictor", "search"])
@pytest.mark.parametrize("layout", ["{}.py", "{}/__init__.py"])
def test_a_users_module_that_shadows_ours_is_named(
    tmp_path: Path, package: str, layout: str
) -> None:
    shadow = tmp_path / layout.format(package)
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("raise RuntimeError('must not be imported')\n")
    done = run("-c", "import shardopt", cwd=tmp_path)
    named = shadow if shadow.parent == tmp_path else shadow.parent
    assert done.returncode == 1
    assert f"ImportError: {named.resolve()} shadows shardopt's own package" in done.stderr
    assert "rename that file or directory" in done.stderr


def test_a_script_called_predictor_is_named(tmp_path: Path) -> None:
    script = tmp_path / "predictor.py"
    script.write_text("import shardopt\n")
    done = run(str(script), cwd=ROOT)
    assert done.returncode == 1
    assert f"{script.resolve()} shadows" in done.stderr


def test_a_shadow_imported_before_us_is_named(tmp_path: Path) -> None:
    """Taking the directory off the path again does not help: the module is there already."""
    (tmp_path / "search.py").write_text("")
    body = "import sys, search; sys.path.remove(''); del search.__spec__; import shardopt"
    done = run("-c", body, cwd=tmp_path)
    assert done.returncode == 1
    assert f"{(tmp_path / 'search.py').resolve()} shadows" in done.stderr


def test_a_plain_directory_called_predictor_is_harmless(tmp_path: Path) -> None:
    """A namespace package never wins over a real one, so it is no reason to refuse."""
    (tmp_path / "predictor").mkdir()
    (tmp_path / "predictor" / "weights.txt").write_text("")
    done = run("-c", "import shardopt, predictor; print(predictor.__file__)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "predictor" / "__init__.py"


def copy_of_shardopt_alone(into: Path) -> Path:
    """A broken installation: the door without the two packages behind it."""
    target = into / "site" / "shardopt"
    target.mkdir(parents=True)
    for name in ("__init__.py", "version.py"):
        (target / name).write_text((ROOT / "shardopt" / name).read_text())
    (target / "__main__.py").write_text("print('reached')\n")
    return target.parent


def test_a_plain_directory_in_place_of_ours_is_named(tmp_path: Path) -> None:
    site = copy_of_shardopt_alone(tmp_path)
    (tmp_path / "predictor").mkdir()
    done = run("-S", "-c", "import shardopt", cwd=tmp_path, path=site)
    assert done.returncode == 1
    assert f"ImportError: {(tmp_path / 'predictor').resolve()} shadows" in done.stderr


def test_missing_packages_are_named(tmp_path: Path) -> None:
    site = copy_of_shardopt_alone(tmp_path)
    done = run("-S", "-c", "import shardopt", cwd=tmp_path, path=site)
    assert done.returncode == 1
    assert "'predictor', which is missing" in done.stderr


@pytest.mark.parametrize("how", ["script", "module"])
def test_the_command_ends_with_one_line_and_exit_2(tmp_path: Path, how: str) -> None:
    """Importing must raise, but whoever typed a command gets a message and no traceback."""
    (tmp_path / "predictor.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "shardopt").write_text("from shardopt.cli.app import main\nmain()\n")
    args = {"script": ["bin/shardopt", "--help"], "module": ["-m", "shardopt", "--help"]}
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run(*args[how], cwd=tmp_path, path=path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"shardopt: {(tmp_path / 'predictor.py').resolve()} shadows")
    assert len(done.stderr.splitlines()) == 1
