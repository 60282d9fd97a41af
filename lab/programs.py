"""Parsers of the programs that `python -m lab` starts."""

import argparse
from pathlib import Path


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a tool: its command, and the docstring of its module as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m lab {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def existing_folder(text: str) -> Path:
    """The type of arguments that name a folder to read or to write to."""
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return folder
