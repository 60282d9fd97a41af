"""The command itself: help, version, what it imports, how it ends."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import typer

import shardopt
from predictor.errors import InputError
from shardopt import __version__
from shardopt.cli.app import app, main
from shardopt.cli.command import describe
from shardopt.cli.interrupts import remember_interrupts
from tests.quick import quick_first

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
INTERRUPTED = (130, "", "shardopt: error: interrupted\n")
TORCH = {"torch", "torchrec", "fbgemm_gpu"}
COMMANDS = ("plan", "predict", "explain", "diff", "hardware", "stats")


def python(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_a_paragraph_of_a_docstring_is_one_line_of_help() -> None:
    head, described = describe(
        "One.\n\nTwo lines\nof text.\n\nOptions:\n    flag: Three\n        four."
    )
    assert head == "One.\n\nTwo lines of text."
    assert described["flag"].help == "Three four."


def test_no_words_show_the_help(run) -> None:
    done = run()
    assert (done.code, done.err) == (0, "")
    assert all(command in done.out for command in COMMANDS)


def test_version(run) -> None:
    assert run("--version") == (0, f"shardopt {__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_the_exit_codes(run, command: str) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert "--json" in done.out
    shown = " ".join(done.out.split())
    codes = shown[shown.index("Exit codes:") :]
    assert [int(code) for code in re.findall(r"\b\d+\b", codes)] == [0, 2, 3, 4, 70, 130, 143, 141]


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (("plan", "--help"), HEAVY),
        (("plan", "model.yaml", "--gpus", "2", "--effort", "0.005", "--quiet"), TORCH),
    ],
    ids=["help", "plan"],
)
def test_nothing_heavy_is_imported_and_nothing_of_the_working_directory(
    model: Path, tmp_path: Path, words: tuple[str, ...], unwanted: set[str]
) -> None:
    spy = f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).write_text('ran')"
    for name in ("numpy", "yaml", "typer", "ortools", "random"):
        (tmp_path / f"{name}.py").write_text(spy)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    done = python("-m", "shardopt", *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "shardopt.cli.app" in imported
    assert not unwanted & imported
    assert not (tmp_path / "marker").exists()


PRINTING = quick_first(
    1,
    [
        (["hardware", "h100-sxm"],),
        (["--help"],),
        (["hardware", "h100-sxm", "--json"],),
        (["--version"],),
    ],
)


@pytest.mark.parametrize("words", PRINTING)
@pytest.mark.parametrize(
    ("stdout", "code", "message"),
    [
        ("left", 141, ""),
        ("full", 2, "No space left on device"),
        ("closed", 0, ""),
    ],
)
def test_a_stdout_that_takes_nothing(
    words: list[str], stdout: str, code: int, message: str
) -> None:
    """A reader that leaves early is told nothing, and neither is nobody; a full disk is an error,
    of one message."""
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardopt", *words],
            stdout=full if stdout == "full" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=(lambda: os.close(1)) if stdout == "closed" else None,
        )
    if stdout == "left":
        process.stdout.close()  # type: ignore[union-attr]
        process.stdout = None
    shown = process.communicate(timeout=120)[1]
    assert process.returncode == code
    assert message in shown
    assert shown.count("shardopt: error:") == len(shown.splitlines()) == bool(message)


def test_a_terminal_without_our_characters_is_no_error() -> None:
    done = python("-m", "shardopt", "hardware", "h100-sxm", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("closed", quick_first(1, [True, False]))
def test_an_error_that_nobody_can_read_keeps_its_exit_code(closed: bool) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardopt", "hardware", "nope"],
            stderr=full,
            preexec_fn=(lambda: os.close(2)) if closed else None,
            timeout=120,
            check=False,
        )
    assert done.returncode == 4


@pytest.fixture
def searching(model: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a search that takes minutes, and waits until it has begun.

    The code that begins it says so on stderr.
    """
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        words = ["plan", str(model), "--gpus", "16", "--effort", "500", "--search", "annealing"]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words, "-o", str(tmp_path / "plan.json"), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # a shell starts what runs in the background without it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        started.append(process)
        assert process.stderr is not None
        while "begun" not in process.stderr.readline():
            assert process.poll() is None
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str], code: int, word: str) -> str:
    """Return the output of an interrupted process."""
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == code, stderr
    assert stderr.endswith(f"shardopt: error: {word}\n")
    assert "Traceback" not in stderr
    return stdout


IMPORTING = """
import signal, sys
import shardopt.__main__ as entry

class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
raise SystemExit(entry.main())
"""
SEARCHING = (
    "import sys; from shardopt.__main__ import main; "
    "from search.improve.annealing import Annealer; "
    "improve = Annealer.improve; Annealer.improve = lambda *a: "
    "(print('begun', file=sys.stderr, flush=True), improve(*a))[1]; raise SystemExit(main())"
)


MODULES = ["shardopt.cli.app", "typer", "numpy.linalg", "search.solve", "ortools.linear_solver"]


@pytest.mark.parametrize("module", quick_first(1, MODULES))
def test_an_interrupt_during_imports_is_the_interrupt(model: Path, module: str) -> None:
    done = python("-c", IMPORTING.format(module=module), "plan", str(model), "--gpus", "2")
    assert (done.returncode, done.stdout, done.stderr) == INTERRUPTED


@pytest.mark.slow
@pytest.mark.usefixtures("advice")
def test_names_cannot_steer_the_terminal(run, model: Path, tmp_path: Path) -> None:
    """Escape sequences in every name of a model and a plan, on stdout and on stderr."""
    evil = "\\e]0;owned\\a\\e[2J\\u202e\\x9b31m"
    text = model.read_text().replace("name: small", f'name: "{evil}"')
    model.write_text(text.replace("name: users", f'name: "users{evil}"'))
    done = [run("plan", model, "--gpus", 2, "--effort", 0.005, "-o", "p.json")]
    done.append(run("explain", model, "p.json"))
    done.append(run("predict", model, "p.json"))
    plan = json.loads((tmp_path / "p.json").read_text())
    plan["tables"]["\x1b[31mother"] = plan["tables"].pop(next(iter(plan["tables"])))
    plan["hard\x1b[31mware"] = "\x1b[31m"
    (tmp_path / "q.json").write_text(json.dumps(plan))
    done.append(run("diff", "p.json", "q.json"))
    done.append(run("predict", model, "q.json"))
    assert [run_.code for run_ in done] == [0, 0, 0, 0, 2], done
    for run_ in done:
        assert not set("\x1b\x07\x9b\u202e") & set(run_.out + run_.err)
    assert "\\x1b[31mother" in done[-1].err
    assert "\\x1b[31mother" in done[-2].out
    assert "\\x1b]0;owned" in done[0].out


@pytest.mark.parametrize(
    ("number", "code", "word"),
    quick_first(1, [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]),
)
def test_an_interrupted_search_writes_the_best_plan_so_far(
    searching, model: Path, tmp_path: Path, number: int, code: int, word: str
) -> None:
    process = searching(SEARCHING)
    process.send_signal(number)
    document = json.loads(ended(process, code, word))
    assert document["stopped_by"] == "interrupted"
    assert document["lower_bound_ms"] <= document["iteration_ms"]
    assert document["iteration_ms"] <= min(document["baselines"].values()) * (1 + 1e-9)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["stopped_by"] == "interrupted"
    assert written["iteration_ms"] == pytest.approx(document["iteration_ms"])
    assert main(["predict", str(model), str(tmp_path / "plan.json")]) == 0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_inside_a_finalizer_is_not_lost() -> None:
    """There Python ignores what a handler raises."""

    class Ends:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def lose() -> None:
        Ends()
        time.sleep(30)

    codes: list[int] = []
    with pytest.raises(KeyboardInterrupt), remember_interrupts(codes):
        lose()
    assert codes == [130]


@pytest.mark.usefixtures("ctrl_c")
def test_sigterm_ends_what_a_shell_started_in_the_background() -> None:
    """There SIGINT is ignored, and a SIGTERM that is passed on as one would be lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes: list[int] = []
    with pytest.raises(KeyboardInterrupt), remember_interrupts(codes):
        signal.raise_signal(signal.SIGTERM)
    assert codes == [143]


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(searching, tmp_path: Path) -> None:
    process = searching(SEARCHING)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert ended(process, 130, "interrupted") == ""
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_an_error_in_place_of_the_interrupt_is_the_interrupt(run, monkeypatch) -> None:
    class Command:
        def main(self, *_: object, **__: object) -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise RuntimeError("error return without exception set") from None

    monkeypatch.setattr("typer.main.get_command", lambda app: Command())
    assert run() == INTERRUPTED


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_before_the_command_begins(run, monkeypatch) -> None:
    monkeypatch.setattr(Thread, "start", lambda _: signal.raise_signal(signal.SIGINT))
    assert run("--version") == INTERRUPTED


def failing_hardware(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the load of a profile fail in `shardopt hardware`."""

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("predictor.hardware.loader.load_hardware", fail)


def test_an_error_that_names_inputs_is_shown_with_their_flags(run, monkeypatch) -> None:
    failing_hardware(monkeypatch, InputError("what", inputs=("gpus", "gpus_per_node")))
    done = run("hardware", "h100-sxm")
    assert done.code == 2
    assert done.err == "shardopt: error: what\n  flags: --gpus, --gpus-per-node\n"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("scipy.optimize", "calibrate"),
        ("pyarrow", "stats"),
        ("psycopg2", "tune"),
        ("torch", "cpu"),
        ("fbgemm_gpu.split_embedding_configs", "cuda"),
    ],
)
def test_a_missing_package_names_its_extra(run, monkeypatch, module: str, extra: str) -> None:
    failing_hardware(monkeypatch, ModuleNotFoundError(f"No module named '{module}'", name=module))
    done = run("hardware", "h100-sxm")
    assert (done.code, done.out) == (2, "")
    assert f"pip install 'shardopt[{extra}]'" in done.err


def test_an_error_that_nobody_foresaw_is_one_message(run, monkeypatch) -> None:
    failing_hardware(monkeypatch, ModuleNotFoundError(name="no"))
    done = run("hardware", "h100-sxm")
    assert (done.code, done.out) == (70, "")
    assert all(word in done.err for word in ("ModuleNotFoundError", __version__, "--debug"))
    assert "Traceback" not in done.err
    for words in (("--debug", "hardware", "h100-sxm"), ("hardware", "h100-sxm", "--debug")):
        with pytest.raises(ModuleNotFoundError):
            run(*words)


def test_a_terminal_without_width_is_80_wide(monkeypatch, capsys, model: Path) -> None:
    for columns in ("0", "00", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["hardware", "h100-sxm"]) == 0
        out = capsys.readouterr().out
        assert 60 < max(map(len, out.splitlines())) <= 80


def named_inputs() -> dict[str, str]:
    """Every input that an error of ours names -> a file that names it."""
    inputs = {}
    for package in ("predictor", "search", "shardopt"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            tree = ast.parse(text if "Error(" in text else "")
            for error in (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)):
                if isinstance(error, ast.Call):
                    arguments = [*error.args[1:], *(k.value for k in error.keywords)]
                    lists = (x for e in arguments for x in ast.walk(e) if isinstance(x, ast.Tuple))
                    names = (name for e in lists for name in e.elts)
                    inputs.update(
                        {n.value: str(path) for n in names if isinstance(n, ast.Constant)}
                    )
    return inputs


def test_every_input_that_an_error_names_is_an_option() -> None:
    def flags(command: object) -> set[str]:
        own = {flag for option in command.params for flag in option.opts}
        return own.union(*(flags(sub) for sub in getattr(command, "commands", {}).values()))

    options = flags(typer.main.get_command(app))
    wrong = {n: at for n, at in named_inputs().items() if f"--{n.replace('_', '-')}" not in options}
    assert not wrong


def test_the_contract_of_commands_lists_all_of_them() -> None:
    def modules(command: object) -> set[str]:
        below = getattr(command, "commands", {}).values()
        own = set() if below else {command.callback.__module__}
        return own.union(*(modules(sub) for sub in below))

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (listed,) = (c["modules"] for c in contracts["contracts"] if c["type"] == "independence")
    ours = {module for module in listed if module.startswith("shardopt.")}
    assert ours == modules(typer.main.get_command(app))
