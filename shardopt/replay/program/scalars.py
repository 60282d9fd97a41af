"""Python numbers among the tensors that ops take.

PyTorch hands an op a Python number as a tensor that no recorded op makes. Its memory may be that of
any tensor that died, also of one inside an op before it: its ids say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from predictor.errors import InputError
from predictor.trace.execution import Argument, Node, Tensor
from shardopt.replay.program.program import ITEMS, Number
from shardopt.replay.program.schema import Parameter, parse_schema

PLAIN = {"int64": 1, "float64": 1.0, "bool": True}
"""What stands for a Python number, by the type of the tensor that PyTorch makes of it."""
NAMES = frozenset({"other", "exponent"})
"""Arguments that may be Python numbers where the schema says ``Tensor``."""


def python_number(parameter: Parameter, argument: Argument) -> Number | None:
    """What stands for a Python number that an op takes as a tensor; None if it is no such."""
    if parameter.name not in NAMES or parameter.written or parameter.base != "Tensor":
        return None
    value = argument.value
    if not isinstance(value, Tensor) or argument.shape or value.device not in ("cpu", ""):
        return None
    dtype = ITEMS.get(argument.type.removeprefix("Tensor(").removesuffix(")"), "")
    return Number(PLAIN[dtype]) if dtype in PLAIN else None


def read_by(node: Node) -> Iterator[Argument]:
    """The inputs of an op that are no Python numbers."""
    try:
        parameters = parse_schema(node.schema).parameters
    except InputError:
        parameters = ()
    for i, argument in enumerate(node.inputs):
        if i >= len(parameters) or python_number(parameters[i], argument) is None:
            yield argument
