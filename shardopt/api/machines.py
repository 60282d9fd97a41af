"""One model on several machines: a plan for each, and what it gives for the money."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InfeasibleError
from predictor.hardware.loader import DEFAULT_HARDWARE
from search.stop import Stop
from shardopt.api import answer
from shardopt.api.answer import Answer, Inputs, find_answer, read_inputs
from shardopt.api.cache import ResultCache
from shardopt.api.request import PlanRequest
from shardopt.config import read_model


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
            best_answer = answer.followed_up(find_answer(inputs, budget, cache), budget)
        except InfeasibleError as error:
            name = machine.hardware or DEFAULT_HARDWARE
            yield OnMachine(name, machine.gpus or 0, None, str(error))
            continue
        yield OnMachine(name, machine.gpus or 0, best_answer, price=prices.get(name))
