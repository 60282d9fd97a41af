"""References in the docs exist: files, modules, links with anchors, commands and flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lab.cli import app as lab
from shardopt.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if page.name != "CHANGELOG.md"  # it names what was there when it was written
)
FOLDERS = "predictor|search|shardopt|lab|tests|configs|docs|examples"
FILE = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]")
OF_OTHERS = ("tests/data/nccl_", "tests/inputs")
"""Paths in other projects' repositories."""
MODULE = re.compile(r"(?<![\w./-])(?:predictor|search|shardopt|lab)(?:\.\w+)+(?![\w/-])")
LINK = re.compile(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = r"(?:shardopt|python -m lab)"
SPAN = re.compile(rf"(?<!`)`({NAME} [^`]+)`")
LINE = re.compile(rf"^(?:\$ |    |.*--no-python )?(?:\.venv/bin/)?({NAME} .*)$", re.MULTILINE)
NO_COMMANDS = ("on",)
"""Second words of what begins like a command: the planner `shardopt on torchrec's cost`."""
COMMANDS: Any = get_command(app)
LAB: Any = get_command(lab)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    files = {f for f in FILE.findall(text) if not f.startswith(OF_OTHERS)}
    assert not sorted(f for f in files if not any(ROOT.glob(f)))
    assert not sorted(m for m in set(MODULE.findall(text)) if not is_module(m))


def is_module(name: str) -> bool:
    """Return True for the name of a module, or a name in a module's text."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:count])
        module = next(
            (p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None
        )
        if module is not None:
            return all(re.search(rf"\b{word}\b", module.read_text()) for word in parts[count:])
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(f"{target}#{anchor}")
    assert not missing


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_flags_exist(page: Path) -> None:
    wrong = [line for line in command_lines(page.read_text()) if not is_command(line)]
    assert not wrong


def command_lines(text: str) -> Iterator[str]:
    """Every line of a code block, and every span of code, that begins with the command's name."""
    text = text.replace("\\\n", " ")
    yield from (" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text)))
    for block in [*FENCE.findall(text), *re.findall(r"^    .*$", text, flags=re.MULTILINE)]:
        yield from LINE.findall(block)


def is_command(line: str) -> bool:
    """Return True if each word is a command in its place and has each flag on the line."""
    command = LAB if line.startswith("python") else COMMANDS
    words = shlex.split(line.partition(" #")[0].replace("'", ""))[3 if command is LAB else 1 :]
    if words[0] in NO_COMMANDS:
        return True
    while words and words[0][0] != "-" and getattr(command, "commands", None):
        commands = [command.commands.get(name) for name in words.pop(0).split("|")]
        if None in commands:
            return False
        command = commands[0]
    if command.context_settings.get("ignore_unknown_options"):  # a program with its own parser
        return True
    flags = {"--help", *(flag for param in command.params for flag in param.opts)}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    return given <= flags


def test_the_check_sees_what_is_wrong() -> None:
    text = (
        "`shardopt plan M --gpu 8`\n```console\n$ shardopt plam M\n$ shardopt diff A B  # a\n"
        "$ python -m lab validate ops\n$ python -m lab bench\n```\n"
    )
    assert [line for line in command_lines(text) if not is_command(line)] == [
        "shardopt plan M --gpu 8",
        "shardopt plam M",
        "python -m lab bench",
    ]
    assert is_module("search.solve")
    assert not is_module("search.judge")


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    commands = dict(COMMANDS.commands)
    group = commands.pop("bench")
    commands |= {f"bench {name}": command for name, command in group.commands.items()}
    hidden = {name for name, command in commands.items() if command.hidden}
    listed = {name for name in commands if re.search(rf"`shardopt {name}\b", page)}
    assert commands.keys() - hidden == listed
