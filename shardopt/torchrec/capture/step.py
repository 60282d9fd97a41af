"""One training step of a module on fake tensors: forward, backward, dense optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from predictor.errors import InputError
from predictor.model.op_calls import Operand
from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.module_tables import find_embedding_modules

with needs_torchrec():
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn import functional
    from torch.utils._pytree import tree_leaves
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from shardopt.torchrec.capture.blame import blamed
    from shardopt.torchrec.capture.fake_module import fake_copy
    from shardopt.torchrec.capture.inputs import Maker, Numbers, dense_tensors
    from shardopt.torchrec.capture.recorder import Recorder, Recording
    from shardopt.torchrec.capture.stand_ins import EmbeddingSource
    from shardopt.torchrec.training.optimizers import DENSE_OPTIMIZERS

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
GIVEN = "what forward gives back"
LOUD = ("_subclasses.fake_tensor", "fx._symbolic_trace")


@dataclass(frozen=True)
class Step:
    """What was recorded.

    Args:
        resident: parameters and buffers.
        state_bytes: of the optimizer.
        loss: how it was found in what the module gives back.
        input_elements: of the tensors that forward is given, but for ids.
    """

    recording: Recording
    resident: tuple[Operand, ...]
    state_bytes: int
    loss: str
    input_elements: int


@dataclass(frozen=True)
class CapturedModule:
    """What is captured, and how.

    Args:
        names: of the embedding modules in the workload, by path; others are not noted.
        inputs: makes what forward takes.
        bf16: forward runs under autocast.
        gpu: attention with dropout is one op, as on GPUs; on CPUs PyTorch has none for it.
    """

    module: nn.Module
    names: dict[str, str]
    inputs: Maker
    optimizer: str
    bf16: bool = False
    gpu: bool = False


def record_step(subject: CapturedModule, numbers: Numbers, *, sizes_only: bool = False) -> Step:
    """Record a step; nothing is computed, and the module is untouched.

    Args:
        sizes_only: do not note when memory is given back, nor the optimizer, whose tensors are of
            one size at any batch.

    Raises:
        InputError: the module does not run on fake tensors; names the op and the user's line.
    """
    recorder = Recorder(custom=True, frees=not sizes_only)
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_gpu(), _quiet():
        stubs: dict[nn.Module, nn.Module] = {
            whole: EmbeddingSource(subject.names.get(path), whole, inner, recorder, numbers.ids)
            for path, whole, inner in find_embedding_modules(subject.module)
        }
        copied = fake_copy(subject.module, stubs)
        arguments = subject.inputs(numbers)
        resident = recorder.keep([*copied.parameters(), *copied.buffers()])
        inputs = list(dense_tensors(tuple(arguments)))
        recorder.keep(inputs)
        parameters = [p for p in copied.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(recorder.gradient)
        with blamed(recorder), _fused_attention(subject.gpu), recorder:
            recorder.mark(FORWARD)
            with torch.autocast("cpu", torch.bfloat16, enabled=subject.bf16):
                outputs = copied(*arguments.positional, **arguments.named)
            loss, how = find_loss(outputs)
            recorder.mark(BACKWARD)
            if loss is not None:
                loss.backward()
            del loss
            stepped = None if sizes_only else _optimizer(copied, subject.optimizer)
            recorder.mark(OPTIMIZER)
            if stepped is not None:
                with recorder.pause():
                    stepped.step()  # makes its states
                stepped.step()
        states = tree_leaves(list(stepped.state.values())) if stepped is not None else []
        state_bytes = sum(s.nbytes for s in states if isinstance(s, torch.Tensor))
    # labels, one a sample, are no features
    elements = sum(t.numel() for t in inputs if t.is_floating_point() and t.dim() > 1)
    return Step(recorder.recording, resident, state_bytes, how, elements)


def _optimizer(module: nn.Module, name: str) -> torch.optim.Optimizer | None:
    given = dict(in_backward_optimizer_filter(module.named_parameters()))
    used = [parameter for parameter in given.values() if parameter.grad is not None]
    optimizer: torch.optim.Optimizer = DENSE_OPTIMIZERS[name](used, lr=0.01) if used else None
    return optimizer


def find_loss(outputs: Any) -> tuple[torch.Tensor | None, str]:
    """What the backward starts from, and how it was found.

    A scalar is the loss; so is the first of a tuple, as TorchRec's train wrappers give it. Else
    the sum of all float outputs stands for it.
    """
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if isinstance(first, torch.Tensor) and first.requires_grad and first.numel() == 1:
        return first.sum() if first.dim() else first, GIVEN
    floats = [t for t in _leaves(outputs) if t.requires_grad and t.is_floating_point()]
    if not floats:
        return None, "none: no output of forward has a gradient"
    return torch.stack([t.float().sum() for t in floats]).sum(), "the sum of forward's outputs"


def _leaves(outputs: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "values") and callable(leaf.values):
            values = leaf.values()
            yield from _leaves(list(values) if not isinstance(values, torch.Tensor) else values)


@contextlib.contextmanager
def _fused_attention(wanted: bool) -> Iterator[None]:
    """Leave dropout out of attention, which would be taken apart into products and a softmax."""
    original = functional.scaled_dot_product_attention

    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kept = 0.0 if wanted else dropout_p
        return original(query, key, value, attn_mask, kept, *args, **kwargs)

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs what fake tensors cannot do before it raises, and that is said in our words."""
    loggers = [logging.getLogger(f"torch.{name}") for name in LOUD]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` of the user's model count, though the fakes are of the CPU."""
    kind = torch.amp.autocast_mode.autocast
    original = kind.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    with mock.patch.object(kind, "__init__", init):
        yield


def names_of(module: nn.Module, modules: Collection[str]) -> dict[str, str]:
    """Names in a workload of the embedding modules below a module, by path."""
    paths = [path for path, _, _ in find_embedding_modules(module)]
    return {path: path or "ebc" for path in paths if (path or "ebc") in modules}


def refuse_without_gradient(step: Step) -> None:
    """An answer without a backward is none.

    Raises:
        InputError: no output of forward has a gradient.
    """
    if BACKWARD not in step.recording.marks or step.loss.startswith("none"):
        raise InputError(
            "no output of forward depends on a parameter, so there is no backward to capture; "
            "give back the loss, or the outputs that the loss is made of"
        )
