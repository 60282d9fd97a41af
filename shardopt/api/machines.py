"""One model on several machines: a plan for each, and what it gives for the money."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InfeasibleError
from predictor.hardware.loader import DEFAULT_HARDWARE
from search.stop import Stop
from shardopt.api.answer import Answer, find_answer, followed_up
from shardopt.api.cache import ResultCache
from shardopt.api.document import MachineAnswer
from shardopt.api.inputs import Inputs, read_inputs
from shardopt.api.request import PlanRequest
from shardopt.config import read_model

MS_PER_HOUR = 3.6e6
PARTS = {
    "embedding_forward": "lookups",
    "embedding_backward": "lookups",
    "prefetch": "lookups",
    "input_dist": "communication",
    "output_dist_forward": "communication",
    "output_dist_backward": "communication",
    "all_reduce": "communication",
    "dense_forward": "dense part",
    "dense_backward": "dense part",
    "optimizer": "dense part",
}
"""Phase of a breakdown -> the part of a machine that is short; others by their own names."""


@dataclass(frozen=True)
class OnMachine:
    """The answer on one machine.

    Args:
        hardware: name or file, as given.
        answer: None where no plan fits.
        lacks: why none does.
        price: of a GPU for an hour; None where it is not known.
    """

    hardware: str
    gpus: int
    answer: Answer | None
    lacks: str = ""
    price: float | None = None

    def document(self) -> MachineAnswer:
        """The machine as it is shown."""
        named = {"hardware": self.hardware, "gpus": self.gpus}
        if self.answer is None:
            keys = {**dict.fromkeys(MachineAnswer.model_fields), "no_plan": self.lacks}
            return MachineAnswer.model_validate({**keys, **named})
        plan, samples = self.answer.document(), self.answer.setting.workload.batch_size
        rate = 1e3 * samples / plan.iteration_ms
        parts: dict[str, float] = {}
        for phase, ms in plan.best.breakdown.items():
            part = PARTS.get(phase, phase.replace("_", " "))
            parts[part] = parts.get(part, 0.0) + ms
        price = None
        if self.price is not None:
            price = 1e6 * self.price * plan.iteration_ms / MS_PER_HOUR / samples
        keys = {
            "samples_per_s": rate * self.gpus,
            "samples_per_s_per_gpu": rate,
            "hbm_bytes": max(rank.peak_reserved_bytes for rank in plan.best.memory),
            "bound_by": max(parts, key=lambda part: parts[part]),
            "price_per_million_samples": price,
            "tables": plan.best.sharding_plan,
            "no_plan": None,
            "plan": plan,
        }
        return MachineAnswer.model_validate({**vars(plan), **keys, **named})


def plan_machines(
    request: PlanRequest,
    hardware: Sequence[str | None],
    gpus: Sequence[int],
    prices: Mapping[str, float],
    cache: ResultCache | None,
    stop: Callable[[Inputs], Stop],
) -> Iterator[OnMachine]:
    """A plan for every hardware with every number of GPUs, in this order; the model is read once.

    Args:
        stop: a new one for each search, by its inputs.

    Raises:
        InputError: the model or a machine cannot be used.
        ProfileError: there is no such hardware profile.
    """
    assert request.model is not None
    model = read_model(request.model, batch_size=request.batch_size)
    requests = [replace(request, hardware=name, gpus=ranks) for name in hardware for ranks in gpus]
    for machine in requests:
        try:
            inputs = read_inputs(machine, model)
            name = inputs.setting.hardware_name
            budget = stop(inputs)
            best_answer = followed_up(find_answer(inputs, budget, cache), budget)
        except InfeasibleError as error:
            name = machine.hardware or DEFAULT_HARDWARE
            yield OnMachine(name, machine.gpus or 0, None, str(error))
            continue
        yield OnMachine(name, machine.gpus or 0, best_answer, price=prices.get(name))
