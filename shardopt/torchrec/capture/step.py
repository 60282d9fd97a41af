"""One training step of a module on fake tensors: forward, backward, dense optimizer.

The module is copied with fake parameters, its embedding modules are replaced by stand-ins that note
when their lookups are due, and what goes wrong is told in terms of the user's own code.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from predictor.errors import InputError
from predictor.model.op_calls import Lookup, LookupBackward, Operand
from shardopt.extras import needs_torchrec
from shardopt.torchrec.private import remaps_ids
from shardopt.torchrec.tables import (
    configs_of,
    find_embedding_modules,
    is_pooled,
    trained_copy,
)

with needs_torchrec():
    import fbgemm_gpu
    import torch
    import torchrec
    from torch import nn
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.nn import functional
    from torch.utils._pytree import tree_leaves, tree_map
    from torchrec.modules.embedding_modules import get_embedding_names_by_table
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    from shardopt.torchrec.capture.inputs import BatchNumbers, Maker, dense_tensors, tensors_in
    from shardopt.torchrec.capture.recorder import OpRecorder, Recording

OTHER_WAYS = (
    "'dense: {measured: {...}}' in the model file (dense= of to_yaml) with times from a trace, or "
    "a DLRM that comes near, 'dense: {bottom_mlp: ..., top_mlp: ...}'"
)
_LONGEST = 300
LONGEST_LINE = 160


@contextlib.contextmanager
def blamed(recorder: OpRecorder) -> Iterator[None]:
    """Turn what goes wrong within into an error that names the op and the user's line.

    Raises:
        InputError: with the other ways to describe the dense part.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(_why(error, recorder)) from error


def _why(error: Exception, recorder: OpRecorder) -> str:
    refused = getattr(error, "func", None)  # by fake tensors; other errors do not tell
    op = str(refused) if isinstance(refused, torch._ops.OpOverload) else recorder.under_way
    where = _user_line(error.__traceback__)
    ways = f"other ways in: {OTHER_WAYS}"
    part = list(recorder.recording.marks or {"forward": 0})[-1]
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        problem = "depends on the values of its input, and a capture computes none"
    elif isinstance(error, UnsupportedOperatorException | NotImplementedError):
        problem = "has no kernel for fake tensors; register one with torch.library.register_fake"
    else:
        reason = " ".join(str(error).split())[:_LONGEST]
        problem = f"fails: {type(error).__name__}: {reason}"
        ways = f"other ways in: example_inputs= with a batch that the module can run, {OTHER_WAYS}"
    at = f" at {where}" if where else f" in the {part}"
    return f"the module cannot be captured: {f'op {op}' if op else 'it'}{at} {problem}; {ways}"


def _user_line(trace: TracebackType | None) -> str:
    """File, line and text of the innermost frame that is the user's own."""
    libraries = [
        Path(str(package.__file__)).parent for package in (torch, torchrec, fbgemm_gpu, contextlib)
    ]
    inside = tuple(f"{folder}{os.sep}" for folder in (*libraries, Path(__file__).parents[2]))
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if not f.filename.startswith((*inside, "<"))]
    if not own:
        return ""
    frame = own[-1]
    first = frame.lineno or 1
    lines = range(first, (frame.end_lineno or first) + 1)  # a call may go over several
    text = " ".join(linecache.getline(frame.filename, number).strip() for number in lines)
    return f"{frame.filename}:{first} ({textwrap.shorten(text or frame.name, LONGEST_LINE)})"


DEEPEST = 8


def fake_copy(module: nn.Module, stubs: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The module in training; to be called under a fake mode.

    Every tensor becomes a fake one on the CPU, each once, so that tied weights stay tied.

    Args:
        stubs: what takes the place of which child.

    Raises:
        InputError: a parameter has no shape yet, or the module cannot be copied.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
            raise InputError(
                f"parameter '{name}' has no shape before the first batch; run the module once on a "
                "real batch, then again"
            )
    memo: dict[int, Any] = {id(child): stub for child, stub in stubs.items()}
    for tensor in _tensors(module, set(memo)):
        memo.setdefault(id(tensor), _fake(tensor))
    return trained_copy(module, memo)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _tensors(value: Any, visited: set[int], depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module, but for those of children visited before."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, nn.Module):
        if id(value) in visited:
            return
        visited.add(id(value))
        value, depth = vars(value), 0
    inner = value.values() if isinstance(value, Mapping) else value
    if depth < DEEPEST and isinstance(value, Mapping | list | tuple):
        for item in inner:
            yield from _tensors(item, visited, depth + 1)


Shapes = list[tuple[int, int]]


class EmbeddingSource(nn.Module):
    """Gives back what an embedding module would, of nothing.

    Args:
        name: of the module in the workload's tables; None if its lookups are not noted.
        whole: the module as it is sharded.
        collection: what in it has the configs.
        ids: of every feature in the batch, for features whose tensor does not say it.

    Outputs are fp32, as FBGEMM gives them, whatever the tables hold.
    """

    def __init__(
        self,
        name: str | None,
        whole: nn.Module,
        collection: Any,
        recorder: OpRecorder,
        ids: Mapping[str, int],
    ) -> None:
        super().__init__()
        # out of sight: the tables are no parameters of the dense part
        self.__dict__["whole"] = whole
        self.name, self.recorder, self.ids = name, recorder, ids
        self.pooled = is_pooled(collection)
        configs = configs_of(collection)
        self.keys = [
            (key, feature, config.embedding_dim)
            for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
            for key, feature in zip(names, config.feature_names, strict=True)
        ]
        self.indices = not self.pooled and collection.need_indices()
        self.remaps = remaps_ids(whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingSource:
        return self

    def __getattr__(self, name: str) -> Any:
        """Return another attribute that the model reads, such as the module's configs."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["whole"], name)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Return a module's own kind of output: a `KeyedTensor`, or a `JaggedTensor` a feature."""
        with self.recorder.pause():
            output = self._pooled(features) if self.pooled else self._sequences(features)
        return (output, None) if self.remaps else output

    def _pooled(self, features: KeyedJaggedTensor) -> KeyedTensor:
        widths = [width for _, _, width in self.keys]
        (values,) = self._made([(features.stride(), sum(widths))])
        return KeyedTensor([key for key, _, _ in self.keys], widths, values)

    def _sequences(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        lengths_by_key = features.length_per_key_or_none()
        counts = self.ids
        if lengths_by_key is not None:
            counts = dict(zip(features.keys(), lengths_by_key, strict=True))
        shapes = [(counts[feature], width) for _, feature, width in self.keys]
        lengths = torch.empty(features.stride(), dtype=features.lengths().dtype)
        return {
            key: JaggedTensor(
                values=values,
                lengths=lengths,
                weights=torch.empty(len(values), dtype=torch.int64) if self.indices else None,
            )
            for (key, _, _), values in zip(self.keys, self._made(shapes), strict=True)
        }

    def _made(self, shapes: Shapes) -> tuple[torch.Tensor, ...]:
        anchor = torch.empty(0, requires_grad=True)
        outputs: tuple[torch.Tensor, ...] = _Looked.apply(self, shapes, anchor)
        if self.name is not None:
            self.recorder.note(Lookup(self.name, self.recorder.operands(outputs)))
        return outputs


class _Looked(torch.autograd.Function):
    """Outputs of a lookup; notes when all their gradients are there."""

    @staticmethod
    def forward(
        ctx: Any, stub: EmbeddingSource, shapes: Shapes, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.stub = stub
        ctx.set_materialize_grads(False)
        return tuple(torch.empty(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        stub = ctx.stub
        if stub.name is not None:
            present = [gradient for gradient in gradients if gradient is not None]
            stub.recorder.note(LookupBackward(stub.name, stub.recorder.operands(present)))
        return None, None, None


DENSE_OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
DenseOptimizer = str | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
GIVEN = "what forward gives back"
LOUD = ("torch._subclasses.fake_tensor", "torch.fx._symbolic_trace")


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step.

    Args:
        resident: parameters and buffers.
        state_bytes: of the optimizer.
        loss: how it was found in what the module gives back.
        input_elements: of forward's input tensors, ids left out.
    """

    recording: Recording
    resident: tuple[Operand, ...]
    state_bytes: int
    loss: str
    input_elements: int


class ModulePaths:
    """Which module an op belongs to: the innermost one that runs, and in the backward the one whose
    op is undone.

    Autograd numbers its nodes as ops make them, so an op sees the number after that of its node.

    Args:
        module: whose submodules tell when they run.
    """

    def __init__(self, module: nn.Module) -> None:
        self.running: list[str] = []
        self.made: dict[int, str] = {}
        for path, child in module.named_modules():
            if path and not isinstance(child, torch.jit.ScriptModule):
                child.register_forward_pre_hook(self._enter(path))
                child.register_forward_hook(self._leave, always_call=True)

    def now(self) -> str:
        """Path of the module of an op that is called now; empty for the whole module's own."""
        node = torch._C._current_autograd_node()
        if node is not None and not self.running:
            return self.made.get(node._sequence_nr() + 1, "")
        path = self.running[-1] if self.running else ""
        self.made[torch.autograd._get_sequence_nr()] = path
        return path

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: self.running.append(path)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.running.pop()


def record_step(
    module: nn.Module,
    names: Mapping[str, str],
    inputs: Maker,
    optimizer: DenseOptimizer,
    bf16: bool,
    gpu: bool,
    numbers: BatchNumbers,
    *,
    sizes_only: bool = False,
) -> RecordedStep:
    """Record a step; nothing is computed, and the module is untouched.

    Args:
        names: of the embedding modules in the workload, by path; others are not noted.
        inputs: makes what forward takes.
        optimizer: one of `DENSE_OPTIMIZERS`, or what makes one of a list of parameters.
        bf16: forward runs under autocast.
        gpu: attention with dropout is one op, as on GPUs, where PyTorch has one, an optimizer
            steps all parameters at once, and autocast leaves more ops in fp32.
        sizes_only: do not note when memory is given back, nor the optimizer, whose tensors are of
            one size at any batch.

    Raises:
        InputError: the module does not run on fake tensors; names the op and the user's line.
    """
    recorder = OpRecorder(custom=True, frees=not sizes_only)
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_gpu(gpu), _quiet():
        stubs: dict[nn.Module, nn.Module] = {
            whole: EmbeddingSource(names.get(path), whole, inner, recorder, numbers.ids)
            for path, whole, inner in find_embedding_modules(module)
        }
        copied = fake_copy(module, stubs)
        if not sizes_only:
            recorder.path_now = ModulePaths(copied).now
        arguments = inputs(numbers)
        resident = recorder.keep([*copied.parameters(), *copied.buffers()])
        dense_inputs = dense_tensors(tuple(arguments))
        recorder.keep(dense_inputs)
        parameters = [p for p in copied.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(recorder.gradient)
        with blamed(recorder), _fused_attention(gpu), recorder:
            recorder.mark(FORWARD)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs = copied(*arguments.positional, **arguments.named)
            loss, how = find_loss(outputs)
            recorder.mark(BACKWARD)
            if loss is not None:
                loss.backward()
            del loss
            stepped = None if sizes_only else _optimizer(copied, optimizer, gpu)
            recorder.mark(OPTIMIZER)
            if stepped is not None:
                with recorder.pause():
                    stepped.step()  # makes its states
                stepped.step()
        states = tree_leaves(list(stepped.state.values())) if stepped is not None else []
        state_bytes = sum(s.nbytes for s in states if isinstance(s, torch.Tensor))
    # labels, one a sample, are no features
    elements = sum(t.numel() for t in dense_inputs if t.is_floating_point() and t.dim() > 1)
    return RecordedStep(recorder.recording, resident, state_bytes, how, elements)


def _optimizer(module: nn.Module, kind: DenseOptimizer, gpu: bool) -> torch.optim.Optimizer | None:
    parameters = dict(in_backward_optimizer_filter(module.named_parameters()))
    used = [parameter for parameter in parameters.values() if parameter.grad is not None]
    if not used:
        return None
    built: torch.optim.Optimizer = (
        DENSE_OPTIMIZERS[kind](used, lr=0.01) if isinstance(kind, str) else kind(used)
    )
    # what PyTorch takes for CUDA tensors where nobody asks (`_default_to_fused_or_foreach`); the
    # fakes are of the CPU, for which it takes the loop
    for group in built.param_groups if gpu else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return built


def name_of_optimizer(optimizer: DenseOptimizer) -> str:
    """The one of `DENSE_OPTIMIZERS` that is asked for, or whose states are as many.

    Raises:
        InputError: there is none.
    """
    names = [*DENSE_OPTIMIZERS.items(), ("adam", torch.optim.AdamW)]
    built = optimizer([nn.Parameter(torch.empty(0))]) if callable(optimizer) else None
    for name, kind in names:
        if optimizer == name or isinstance(built, kind):
            return name
    raise InputError(
        f"dense_optimizer is {optimizer if built is None else type(built).__name__!r}; allowed are "
        f"{', '.join(DENSE_OPTIMIZERS)}, or what makes a torch.optim SGD, Adagrad, Adam or AdamW "
        "of a list of parameters, such as functools.partial(torch.optim.AdamW, fused=True)"
    )


def find_loss(outputs: Any) -> tuple[torch.Tensor | None, str]:
    """Return the tensor that the backward starts from, and how it was found.

    A scalar is the loss; so is the first of a tuple, as TorchRec's train wrappers give it. Else
    the sum of all float outputs stands for it.
    """
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if isinstance(first, torch.Tensor) and first.requires_grad and first.numel() == 1:
        return first.sum() if first.dim() else first, GIVEN
    tensors = [t if isinstance(t, torch.Tensor) else t.values() for t in tensors_in(outputs)]
    floats = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    if not floats:
        return None, "none: no output of forward has a gradient"
    return torch.stack([t.float().sum() for t in floats]).sum(), "the sum of forward's outputs"


@contextlib.contextmanager
def _fused_attention(fused: bool) -> Iterator[None]:
    """Leave dropout out of attention, which would be taken apart into products and a softmax."""
    original = functional.scaled_dot_product_attention

    def attend(
        q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, *more: Any, **named: Any
    ) -> Any:
        return original(q, k, v, mask, 0.0 if fused else dropout, *more, **named)

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs what fake tensors cannot do before it raises, and that is said in our words."""
    with contextlib.ExitStack() as stack:
        for name in LOUD:
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        yield


FP32_ON_GPUS = (
    *("layer_norm", "native_layer_norm", "group_norm", "linalg_vector_norm", "cosine_similarity"),
    *("softmax.int", "log_softmax.int", "logsumexp", "sum", "sum.dim_IntList", "cumsum", "cumprod"),
    *("exp", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "softplus"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
)
"""Ops that autocast runs in fp32 on GPUs, but as they come on CPUs (PyTorch's aten/src/ATen/
autocast_mode.h, AT_FORALL_FP32; losses are on both lists)."""


@contextlib.contextmanager
def _as_on_gpu(gpu: bool) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` of the user's model count, though the fakes are of the CPU;
    if ``gpu``, autocast also leaves the same ops in fp32 as there."""
    kind = torch.amp.autocast_mode.autocast
    original = kind.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    try:
        for name in FP32_ON_GPUS if gpu else ():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(_in_fp32, op), "AutocastCPU")
        with mock.patch.object(kind, "__init__", init):
            yield
    finally:
        del library  # and with it what it registered


def _in_fp32(op: Any, *args: Any, **kwargs: Any) -> Any:
    def whole(value: Any) -> Any:
        low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if low else value

    with torch.autocast("cpu", enabled=False):
        return op(*tree_map(whole, args), **tree_map(whole, kwargs))
