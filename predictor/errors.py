"""Errors with their exit codes, so that CLI, hook and library report the same.

Exit codes are those of the command-line contract: 2 bad usage or input, 3 no feasible plan,
4 hardware profile missing or asked outside its measured range.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ShardoptError(Exception):
    """Base of every error a user can cause; its text is a complete message, no traceback needed.

    The text names no flag of the command line, because scripts and the TorchRec hook read it too.

    Args:
        message: what was given, where, what is allowed and what to try.
        inputs: options that are wrong or should change, as the command line's names with
            underscores, such as ``("gpus", "hbm_gib")``. `shardopt.cli` shows their flags.
    """

    exit_code = 2

    def __init__(self, message: str = "", inputs: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


class InputError(ShardoptError):
    """A file, flag or value that cannot be used; says what was given and what is allowed."""


class PlanError(InputError):
    """A sharding plan that does not fit its model or topology."""


class InfeasibleError(ShardoptError):
    """No plan satisfies the memory caps and constraints; says what is missing and what to try."""

    exit_code = 3


class ProfileError(ShardoptError):
    """A hardware profile that is missing, malformed, or lacks a group that is needed."""

    exit_code = 4


class RangeError(ProfileError):
    """A cost asked outside the range that the profile was measured in (refused if strict)."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest allowed name, or an empty string."""
    near = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""
