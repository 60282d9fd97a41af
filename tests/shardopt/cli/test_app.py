"""The command itself: help, version, what it imports, how it ends."""

import ast
import json
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typer

import shardopt
from predictor.errors import InputError
from shardopt import __version__
from shardopt.cli.app import app, main

ROOT = Path(shardopt.__file__).parent.parent
HEAVY = {
    "torch",
    "torchrec",
    "ortools",
    "optuna",
    "scipy",
    "pandas",
    "matplotlib",
    "numpy",
    "predictor.hardware.loader",
}
COMMANDS = ("plan", "predict", "explain", "diff", "hardware")


def python(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_no_words_show_the_help(run) -> None:
    done = run()
    assert (done.code, done.err) == (0, "")
    for command in COMMANDS:
        assert command in done.out


def test_version(run) -> None:
    done = run("--version")
    assert (done.code, done.out) == (0, f"shardopt {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command: str) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert "--json" in done.out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import json, sys; from shardopt.cli.app import main; code = main(['plan', '--help']); "
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stderr))


def test_planning_imports_neither_torch_nor_torchrec(model: Path) -> None:
    code = (
        "import sys; from shardopt.cli.app import main; "
        f"code = main(['plan', {str(model)!r}, '--gpus', '2', '--effort', '0.05', '--quiet']); "
        "assert not {'torch', 'torchrec', 'fbgemm_gpu'} & set(sys.modules); sys.exit(code)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_terminal_without_our_characters_is_no_error(model: Path) -> None:
    code = "import sys; from shardopt.cli.app import main; sys.exit(main(['hardware', 'h100-sxm']))"
    done = python("-c", code, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    code = "from shardopt.cli.app import main; raise SystemExit(main(['hardware', 'h100-sxm']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode != 0


def test_an_interrupted_search_ends_at_once_with_130_and_writes_nothing(
    model: Path, tmp_path: Path
) -> None:
    code = "from shardopt.cli.app import main; print('begun', flush=True); raise SystemExit(main())"
    out = tmp_path / "plan.json"
    words = ["plan", str(model), "--gpus", "16", "--effort", "500", "-o", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts what runs in the background without it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(2)  # into the search; an interrupt before it must end in the same words
    process.send_signal(signal.SIGINT)
    try:
        shown, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, shown) == (130, "")
    assert said == "shardopt: error: interrupted\n"
    assert not out.exists()


def test_an_error_in_place_of_the_interrupt_is_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Command:
        def main(self, *_: object, **__: object) -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise RuntimeError("error return without exception set") from None

    monkeypatch.setattr("typer.main.get_command", lambda app: Command())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "shardopt: error: interrupted\n"


def test_an_error_that_names_inputs_is_shown_with_their_flags(run, monkeypatch) -> None:
    def fail(name: str) -> None:
        raise InputError("12 GPUs do not fill hosts of 8", inputs=("gpus", "gpus_per_node"))

    monkeypatch.setattr("predictor.hardware.loader.load_hardware", fail)
    done = run("hardware", "h100-sxm")
    assert done.code == 2
    assert done.err == (
        "shardopt: error: 12 GPUs do not fill hosts of 8\n  flags: --gpus, --gpus-per-node\n"
    )


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("scipy.optimize", "pip install 'shardopt[calibrate]'"),
        ("pyarrow", "pip install 'shardopt[stats]'"),
        ("psycopg2", "pip install 'shardopt[tune]'"),
        ("torch", "pip install 'shardopt[cpu]'"),
        ("fbgemm_gpu.split_embedding_configs", "pip install 'shardopt[cuda]'"),
    ],
)
def test_a_missing_package_names_its_extra(run, monkeypatch, module: str, command: str) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr("predictor.hardware.loader.load_hardware", fail)
    done = run("hardware", "h100-sxm")
    assert (done.code, done.out) == (2, "")
    assert command in done.err
    monkeypatch.setattr("predictor.hardware.loader.load_hardware", lambda name: import_module("no"))
    with pytest.raises(ModuleNotFoundError, match="'no'"):
        run("hardware", "h100-sxm")


def named_inputs() -> dict[str, str]:
    """Every input that an error of ours names -> a file that names it."""
    found = {}
    for package in ("predictor", "search", "shardopt"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for error in (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)):
                if isinstance(error, ast.Call):
                    given = [*error.args[1:], *(k.value for k in error.keywords)]
                    lists = (x for of in given for x in ast.walk(of) if isinstance(x, ast.Tuple))
                    names = (name for of in lists for name in of.elts)
                    found.update({n.value: str(path) for n in names if isinstance(n, ast.Constant)})
    return found


def test_every_input_that_an_error_names_is_an_option() -> None:
    def flags(command: object) -> set[str]:
        own = {flag for option in command.params for flag in option.opts}
        return own.union(*(flags(sub) for sub in getattr(command, "commands", {}).values()))

    known = flags(typer.main.get_command(app))
    wrong = {n: at for n, at in named_inputs().items() if f"--{n.replace('_', '-')}" not in known}
    assert not wrong


def test_the_contract_of_commands_lists_all_of_them() -> None:
    def modules(command: object) -> set[str]:
        below = getattr(command, "commands", {}).values()
        own = set() if below else {command.callback.__module__}
        return own.union(*(modules(sub) for sub in below))

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (listed,) = (c["modules"] for c in contracts["contracts"] if c["type"] == "independence")
    assert set(listed) == modules(typer.main.get_command(app))
