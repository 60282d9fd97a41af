"""A captured program as autocast would run it in bf16.

Autocast runs products, convolutions and attention in bf16, and some sums and losses in fp32; every
other op takes the type of its inputs (aten/src/ATen/autocast_mode.h). It casts a parameter once a
step and every other tensor where an op reads it. In the backward a gradient has the type of the
tensor that it belongs to, so each cast of the forward has one in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from predictor.model.op_calls import (
    DenseProgram,
    Event,
    LookupBackward,
    OpCall,
    Operand,
    free_after_last_use,
    operands_of,
)

HALF = "bf16"
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "matmul"))
# fmt: off
IN_FP32 = frozenset((
    "acos", "asin", "atan", "binary_cross_entropy_with_logits", "cosh", "cumprod", "cumsum",
    "erfinv", "exp", "expm1", "l1_loss", "log", "log10", "log1p", "log2", "_log_softmax",
    "mse_loss", "native_group_norm", "native_layer_norm", "nll_loss_forward", "norm",
    "linalg_vector_norm", "pow", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss",
    "_softmax", "softplus", "tan",
))
# fmt: on
"""Ops of the forward that autocast runs in fp32."""
TO_WIDEST = frozenset(("cat", "stack"))
"""Ops whose inputs autocast casts to the widest type among them."""
FLOATS = (HALF, "fp16", "fp32")


def is_half(program: DenseProgram) -> bool:
    """Return True for a program captured under autocast: its products are in half precision."""
    return any(
        isinstance(event, OpCall) and _in_half(event) and event.outputs[0].item_bytes == 2
        for event in program.forward
        if operands_of(event)
    )


def autocast(program: DenseProgram) -> DenseProgram:
    """Return the program under autocast; one that was captured so stays as it is."""
    return program if is_half(program) else _Autocast(program).run()


def _in_half(call: OpCall) -> bool:
    kind = call.name
    return kind in PRODUCTS or "convolution" in kind or "attention" in kind


@dataclass(frozen=True)
class _Copy:
    """Copy of a tensor in another type, with its stride for each stride of the original."""

    like: Operand
    strides: dict[int, int]

    def seen_as(self, operand: Operand) -> Operand | None:
        """Return the copy's view that matches a view of the original; None if there is none."""
        sides = list(zip(operand.shape, operand.strides, strict=True))
        if operand.elements != math.prod(self.like.shape) or any(
            n > 1 and stride not in self.strides for n, stride in sides
        ):
            return None
        strides = tuple(self.strides.get(stride, 1) for _, stride in sides)
        return replace(self.like, shape=operand.shape, strides=strides)


class _Autocast:
    """Writer of a program under autocast, event by event."""

    def __init__(self, program: DenseProgram) -> None:
        self.program = program
        parts = (program.forward, program.backward, program.optimizer)
        self.given = [o for part in parts for e in part for o in operands_of(e)]
        self.given += program.resident
        self.last = max((o.storage for o in self.given), default=0)
        self.parameters = {o.storage: o for o in program.resident}
        self.stepped = {o.storage for e in program.optimizer for o in operands_of(e)}
        self.saved = {o.storage for e in program.forward for o in operands_of(e)}
        self.saved -= self.parameters.keys()
        self.types: dict[int, str] = {}
        """Storage -> its type, where that is no longer the captured one."""
        self.kept: set[int] = set()
        """Storages that stay in fp32 beside outputs in half precision."""
        self.copies: dict[tuple[int, int, str], _Copy] = {}
        """Storage, offset and type of a tensor -> its latest copy in that type."""
        self.cast: set[int] = set()
        """Copies in half precision that products of the forward read."""
        self.partners: set[int] = set()
        """Storages that a product read beside a tensor that was cast for it: the gradient of that
        tensor, a product with this storage, is cast back."""
        self.events: list[Event] = []
        self.reuses = False
        """True while the backward reads the copies that the forward made."""

    def run(self) -> DenseProgram:
        """Return the whole program."""
        parts: list[list[Event]] = []
        for events, write in (
            (self.program.forward, self._forward),
            (self.program.backward, self._backward),
        ):
            self.events, self.reuses = [], write == self._backward
            for event in events:
                if isinstance(event, OpCall):
                    write(event)
                elif isinstance(event, LookupBackward):
                    wide = tuple(self._as("fp32", self._now(o)) for o in event.gradients)
                    self.events.append(replace(event, gradients=wide))
                else:
                    self.events.append(event)
            parts.append(self.events)
        parts.append(list(self.program.optimizer))
        # a tensor that the backward reads as a copy ends with its last use in the forward
        copied = {storage for storage, *_ in self.copies}
        ends = {s for part in parts for e in part if isinstance(e, OpCall) for s in e.freed}
        copied &= ends
        parts = [[_without(event, copied) for event in part] for part in parts]
        resident = [operand for operand in self.given if operand.storage not in copied]
        forward, backward, optimizer = free_after_last_use(parts, resident)
        return replace(self.program, forward=forward, backward=backward, optimizer=optimizer)

    # --- events ---------------------------------------------------------------------------------

    def _forward(self, call: OpCall) -> None:
        inputs = [self._now(o) for o in call.inputs]
        if _in_half(call):
            self._product(call, inputs)
        elif call.moves and (call.name in IN_FP32 or call.name.startswith("pow_")):
            self._add(call, [self._as("fp32", o) for o in inputs], "fp32")
        else:
            is_bias = self._adds_bias(call, inputs)
            wide = HALF if is_bias else _widest(inputs)
            if is_bias or call.name in TO_WIDEST:
                inputs = [self._as(wide, o) for o in inputs]
            self._add(call, inputs, "fp32" if call.name == "sum" else wide)

    def _product(self, call: OpCall, inputs: Sequence[Operand]) -> None:
        """Add an op in half precision; outputs beside the first, e.g. log-sum-exp, stay."""
        halves = [self._as(HALF, o) for o in inputs]
        self.cast.update(b.storage for a, b in zip(inputs, halves, strict=True) if a is not b)
        if call.name in PRODUCTS:
            first, second = (half.storage for half in halves[-2:])
            self.partners |= {first} if second in self.cast else set()
            self.partners |= {second} if first in self.cast else set()
        self.kept.update(o.storage for o in call.outputs[1:])
        self._add(call, halves, HALF)

    def _backward(self, call: OpCall) -> None:
        inputs = [self._now(o) for o in call.inputs]
        if _in_half(call):
            halves = [self._as(HALF, o) for o in inputs]
            # a gradient comes first, then query, key and value, or the input of a convolution
            count = 0 if call.name in PRODUCTS else 3 if "attention" in call.name else 1
            back = any(o.storage in self.cast for o in halves[1 : 1 + count])
            back |= not count and any(o.storage in self.partners for o in halves)
            wide = {o.storage for o in call.outputs[: count or 1]} if back else set()
            self._add(call, halves, HALF, wide | self.stepped)
            return
        saved_type = _widest([o for o in inputs if o.storage in self.saved])
        if call.moves and saved_type and not call.mutates:
            inputs = [self._as(saved_type, o) for o in inputs]
        self._add(call, inputs, _widest(inputs), self.stepped)

    def _add(
        self,
        call: OpCall,
        inputs: Sequence[Operand],
        data_type: str,
        wide: Set[int] = frozenset(),
    ) -> None:
        """Add the call with outputs of a type.

        Args:
            wide: storages whose outputs in half precision are cast back.
        """
        input_storages = {o.storage for o in inputs}
        outputs, casts = [], []
        for out in call.outputs:
            halved = data_type == HALF and out.data_type == "fp32" and out.storage not in self.kept
            if out.storage in input_storages or not halved:
                outputs.append(self._now(out))
            elif out.storage in wide:
                outputs.append(replace(_half(out), storage=self._new()))
                casts.append(OpCall("_to_copy", (outputs[-1],), (out,), path=call.path))
            else:
                self.types[out.storage] = HALF
                outputs.append(_half(out))
        # a cast reads its input before the input is freed
        freed = () if casts else call.freed
        self.events.append(replace(call, inputs=tuple(inputs), outputs=tuple(outputs), freed=freed))
        self.events += casts
        if casts:
            self.events[-1] = replace(casts[-1], freed=call.freed)

    def _adds_bias(self, call: OpCall, inputs: Sequence[Operand]) -> bool:
        """Return True for the bias sum of a linear layer whose input has more than two axes.

        Autocast runs such a layer in half precision as a whole, its bias too.
        """
        if call.name not in ("add", "add_") or len(inputs) != 2:
            return False
        product, bias = inputs
        is_bias = bias.storage in self.parameters and bias.shape == product.shape[-1:]
        return is_bias and len(product.shape) > 2 and product.data_type == HALF

    # --- tensors --------------------------------------------------------------------------------

    def _new(self) -> int:
        self.last += 1
        return self.last

    def _now(self, operand: Operand) -> Operand:
        """Return a captured operand in the type that its memory has at this point."""
        is_halved = self.types.get(operand.storage) == HALF and operand.data_type == "fp32"
        return _half(operand) if is_halved else operand

    def _as(self, data_type: str, operand: Operand) -> Operand:
        """Return the operand in a type; cast a float of another type where that is allowed."""
        if operand.data_type not in FLOATS or operand.data_type == data_type:
            return operand
        if operand.storage in self.kept:
            return operand
        parameter = self.parameters.get(operand.storage)
        whole = parameter if parameter and parameter.elements == operand.elements else operand
        key = whole.storage, whole.offset, data_type
        copy = self.copies.get(key) if whole is parameter or self.reuses else None
        view = copy.seen_as(operand) if copy else None
        if view is None:
            copy = _copy(whole, data_type, self._new())
            self.events.append(OpCall("_to_copy", (whole,), (copy.like,)))
            self.copies[key] = copy
            view = copy.seen_as(operand) or copy.like
        return view


def _half(operand: Operand) -> Operand:
    size = math.ceil(operand.storage_bytes / 2)
    return replace(operand, storage_bytes=size, item_bytes=2, data_type=HALF)


def _widest(operands: Iterable[Operand]) -> str:
    """Return the widest float type; scalars count only without tensors; empty for no floats."""
    floats = [o for o in operands if o.data_type in FLOATS]
    several = [o for o in floats if o.shape] or floats
    return max((o.data_type for o in several), key=FLOATS.index, default="")


def _copy(operand: Operand, data_type: str, storage: int) -> _Copy:
    """Return a copy without gaps, whose axes keep the order of the original's."""
    axes = sorted(
        {
            stride: n for n, stride in zip(operand.shape, operand.strides, strict=True) if n > 1
        }.items()
    )
    strides, step = {}, 1
    for stride, n in axes:
        strides[stride] = step
        step *= n
    item = 2 if data_type == HALF else 4
    whole = math.prod(operand.shape)
    mapped = tuple(strides.get(stride, 1) for stride in operand.strides)
    like = Operand(storage, whole * item, 0, operand.shape, mapped, item, data_type)
    return _Copy(like, strides)


def _without(event: Event, storages: set[int]) -> Event:
    """Return the event without freeing these storages."""
    if not isinstance(event, OpCall) or not storages.intersection(event.freed):
        return event
    return replace(event, freed=tuple(s for s in event.freed if s not in storages))
