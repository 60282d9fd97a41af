"""Errors of the planner: scripts catch TorchRec's `PlannerError`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from predictor.errors import InputError, ShardoptError
from shardopt.extras import needs_torchrec

with needs_torchrec():
    from torchrec.distributed.planner.types import PlannerError, PlannerErrorType


class PlannerInputError(InputError, PlannerError):
    """Something given cannot be used; says what and what to do. TorchRec's and shardopt's error."""

    def __init__(self, message: str, inputs: Iterable[str] = ()) -> None:
        super().__init__(message, inputs)
        self.error_type = PlannerErrorType.INPUT_VALIDATION


@contextmanager
def as_planner_errors() -> Iterator[None]:
    """Raise shardopt's errors as TorchRec's too."""
    try:
        yield
    except PlannerError:
        raise
    except ShardoptError as error:
        raise PlannerInputError(str(error), error.inputs) from error
