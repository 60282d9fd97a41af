"""Arguments of an op out of what a Kineto trace says of its inputs.

A Kineto trace names no tensors. Every call takes tensors made up front, which calls share: the n-th
call of an op takes the n-th tensor of a shape, strides and type, as the n-th layer or parameter
would, and tensors that fill a cache anyway come round again so that memory stays bounded. Inputs of
one call that look alike have tensors of their own, and so have whole numbers that are written or
must be legal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from predictor.trace.comms import item_bytes
from predictor.trace.execution import Argument, Node, Tensor, Value
from shardopt.replay.kineto.inputs import Autograd, Input, derive_value, value_of
from shardopt.replay.program.program import WHOLE
from shardopt.replay.program.schema import Parameter, Schema, UnwritableError
from shardopt.replay.program.tensors import tensors_of
from shardopt.replay.program.values import LISTS, has_roles, is_lookup

COMPLEX_BYTES = 16
"""Of ``complex<double>``, the one type that `item_bytes` does not know."""
DEVICE, HOST = "cuda:0", "cpu"
NUMBERS = frozenset({"other", "exponent", "value"})
"""Arguments that are Python numbers where they have no dimension and another type."""
PYTHON = frozenset({"double", "long int", "long", "bool"})
ON_HOST = {
    ("aten::copy_", "HtoD"): "src",
    ("aten::copy_", "DtoH"): "self",
    ("aten::_to_copy", "HtoD"): "self",
    ("aten::_to_copy", "DtoH"): "device",
}
"""An op and what the GPU copied for it -> the argument that is the host's."""
STAND_INS = {"Scalar": 1, "float": 0.5}
"""What stands for a number whose value is not recorded, where it sets no size and no shape."""
FORMATS = {"contiguous_format": 0, "preserve_format": 1}
AUXILIARY, AUXILIARIES, CACHE_PLACES = "aux_tensor", 16, 3
"""Of newer lookups (FBGEMM `codegen/training/pt2/`): a list that grows from version to version, of
which one table without a cache and with even batches has one entry."""
RING_BYTES = 64 << 20
"""Of tensors that look alike: about what the caches of a CPU hold."""
PARTS = {"placements": "int", "offsets": "long int"}
TEXT = re.compile(r"""["'](\w*)["']$""")


class Arguments:
    """Makes the arguments of ops.

    Args:
        on_gpu: the trace is of a GPU.
        types: shape -> the types of the tensors that have it in this trace.
    """

    def __init__(self, on_gpu: bool, types: Mapping[tuple[int, ...], Counter[str]]) -> None:
        self.on_gpu, self.types = on_gpu, types

    def of(
        self,
        schema: Schema,
        inputs: Sequence[Input],
        other: Autograd,
        has_values: bool,
        copied: str = "",
    ) -> tuple[tuple[Argument, ...], Counter[str]]:
        """One argument a recorded input, with tensors that are in no memory yet.

        Args:
            other: what the op's backward function shows of it, or the op of the one it lies in.
            has_values: the trace records the values of numbers.
            copied: what the GPU copied for the op: ``HtoD``, ``DtoH`` or nothing.

        Returns:
            The arguments; and how many ``number`` and ``tensors`` (lists of them) among them have a
            value or a type that the trace does not hold.

        Raises:
            UnwritableError: the trace holds no value of one, and the shapes leave it open.
        """
        named = {p.name: i for p, i in zip(schema.parameters, inputs, strict=False)}
        on_host = ON_HOST.get((schema.name, copied))
        made = []
        guesses: Counter[str] = Counter()
        for parameter, given in zip(schema.parameters, inputs, strict=False):
            host = parameter.name == on_host or not self.on_gpu
            if given.kind == "tensor":
                shape, strides = given.shapes[0], given.strides[0]
                number = parameter.name in NUMBERS and given.dtype in PYTHON and not shape
                made.append(one_tensor(shape, strides, given.dtype, host or number))
            elif given.kind == "tensors":
                guesses[given.kind] += 1
                made.append(self._tensors(schema, parameter, given, inputs, host))
            elif self.on_gpu and parameter.base == "Device":
                made.append(Argument(HOST if host else DEVICE, (), "str"))
            elif is_lookup(schema.name) and parameter.name == AUXILIARY:
                made.append(self._auxiliary(named))
            else:
                value = given.value
                if value is None:
                    of = (schema.name, parameter.name, parameter.type)
                    value = derive_value(*of, named, other)
                if value is None:
                    guesses[given.kind] += 1
                    value = _fill_in(parameter, given, has_values)
                made.append(Argument(value, (), "None" if value is None else type(value).__name__))
        return tuple(made), guesses

    def _tensors(
        self,
        schema: Schema,
        parameter: Parameter,
        given: Input,
        inputs: Sequence[Input],
        host: bool,
    ) -> Argument:
        if not given.shapes:
            raise UnwritableError(
                f"the trace does not hold the shapes of the list `{parameter.name}`"
            )
        parts = LISTS.get(parameter.name, {}) if is_lookup(schema.name) else {}
        names = parts.get(len(given.shapes))
        if names:  # tensors of a lookup, by FBGEMM's names of them
            types = [PARTS.get(name.rpartition("_")[2], "float") for name in names]
        else:
            types = [self._type_of(given, inputs)] * len(given.shapes)
        return tensor_list(given.shapes, given.strides, types, host)

    def _auxiliary(self, named: Mapping[str, Input]) -> Argument:
        """What a lookup takes besides its tables: places in a cache, of which there is none."""
        largest = named.get("max_B")
        if largest is not None and largest.value != -1:
            raise UnwritableError(f"the trace does not hold `{AUXILIARY}` of uneven batches")
        types = ["int" if at == CACHE_PLACES else "" for at in range(AUXILIARIES)]
        return tensor_list([(0,)] * len(types), [(1,)] * len(types), types, not self.on_gpu)

    def _type_of(self, listed: Input, inputs: Sequence[Input]) -> str:
        """That of the op's other tensors, else the one that most tensors of these shapes have."""
        other = next((i.dtype for i in inputs if i.kind == "tensor"), None)
        votes = sum((self.types.get(shape, Counter()) for shape in listed.shapes), Counter[str]())
        return other or (votes.most_common(1)[0][0] if votes else "float")


def _fill_in(parameter: Parameter, given: Input, has_values: bool) -> Value:
    """What stands for a value that nothing tells."""
    base, default = parameter.base, parameter.default
    if parameter.type == "Device":
        return HOST
    absent = given.kind == "other" and (has_values or "[" not in base)
    if parameter.type.endswith("?") and absent:
        return None
    if default is not None and not (base == "Scalar" and default == "None"):
        text = TEXT.match(default)
        value: Value = text[1] if text else FORMATS.get(default, value_of(default))
        if value is None and default != "None":
            raise UnwritableError(f"the trace does not hold the value of `{parameter.name}`")
        return value
    if base in STAND_INS and given.kind == "number":
        return STAND_INS[base]
    if base == "Tensor" and given.kind == "other":
        return None
    raise UnwritableError(
        f"the trace does not hold the value of `{parameter.name}` ({parameter.type})"
    )


def one_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, host: bool
) -> Argument:
    """A tensor that is in no memory yet, as an execution trace has it."""
    return Argument(_tensor(shape, dtype, host), shape, f"Tensor({dtype})", strides)


def _tensor(shape: Sequence[int], dtype: str, host: bool) -> Tensor:
    return Tensor(
        1, 1, 0, prod(shape), item_bytes(dtype) or COMPLEX_BYTES, HOST if host else DEVICE
    )


def tensor_list(
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    types: Sequence[str],
    host: bool,
) -> Argument:
    """A list of tensors as an execution trace has it; one of no type is not defined."""
    pairs = zip(shapes, types, strict=True)
    values = tuple(_tensor(shape, dtype, host) if dtype else None for shape, dtype in pairs)
    kinds = ",".join(f"Tensor({dtype})" if dtype else "None" for dtype in types)
    return Argument(values, tuple(shapes), f"GenericList[{kinds}]", tuple(strides))


class MemoryPool:
    """Gives tensors their memory."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._turns: Counter[object] = Counter()

    def place(self, node: Node, schema: Schema) -> Node:
        """A call whose tensors are shared with calls that take tensors alike."""
        plain = tuple(a.value for a in node.inputs if not any(True for _ in a.tensors()))
        every = tuple(None if s is None else s.spec for a in node.inputs for s in tensors_of(a))
        turn = self._turns[node.name, every]
        self._turns[node.name, every] += 1
        times: Counter[object] = Counter()
        inputs = []
        for parameter, argument in zip(schema.parameters, node.inputs, strict=False):
            places = []
            for i, of in enumerate(tensors_of(argument)):
                if of is None:
                    continue
                like: object = of.spec
                if of.spec.dtype in WHOLE:
                    used = (node.name, parameter.name, i, plain, every)
                    like = (of.spec, parameter.written, used if has_roles(node.name) else None)
                times[like] += 1
                ring = max(RING_BYTES // max(of.spec.extent * of.tensor.item_bytes, 1), 1)
                key = (like, times[like], turn % ring)
                places.append(self._known.setdefault(key, len(self._known) + 1))
            inputs.append(replace(argument, value=_move(argument.value, iter(places))))
        return replace(node, inputs=tuple(inputs))

    def alone(self, node: Node) -> Node:
        """A call whose tensors no other call takes."""
        inputs = (replace(a, value=_move(a.value, iter(self.fresh, 0))) for a in node.inputs)
        return replace(node, inputs=tuple(inputs))

    def fresh(self) -> int:
        """Memory of its own."""
        return self._known.setdefault(object(), len(self._known) + 1)


def _move(value: Value, places: Iterable[int]) -> Value:
    taken = iter(places)
    if isinstance(value, Tensor):
        number = next(taken)
        return replace(value, id=number, storage=number)
    if isinstance(value, tuple):
        return tuple(_move(item, taken) for item in value)
    return value
