"""One model on several machines: a plan for each, and what it gives for the money."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InfeasibleError, InputError
from predictor.hardware.loader import DEFAULT_HARDWARE
from search.stop import Stop
from shardopt.api.answer import Answer, find_answer, read_inputs
from shardopt.api.cache import ResultCache
from shardopt.api.request import PlanRequest
from shardopt.config import read_model
from shardopt.files import decode, read_bytes

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

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together."""
        if self.answer is None:
            return None
        return 1e3 * self.gpus * self._batch_size / self.answer.best.iteration_ms

    @property
    def price_per_million(self) -> float | None:
        """Of a million samples, in the currency of the price file."""
        if self.answer is None or self.price is None:
            return None
        hours = self.answer.best.iteration_ms / MS_PER_HOUR
        return 1e6 * self.price * hours / self._batch_size

    @property
    def bound_by(self) -> str | None:
        """What takes most of the iteration."""
        if self.answer is None:
            return None
        parts: dict[str, float] = {}
        for phase, ms in self.answer.best.breakdown.items():
            part = PARTS.get(phase, phase.replace("_", " "))
            parts[part] = parts.get(part, 0.0) + ms
        return max(parts, key=lambda part: parts[part])

    @property
    def _batch_size(self) -> int:
        assert self.answer is not None
        return self.answer.setting.workload.batch_size


def plan_machines(
    request: PlanRequest,
    hardware: Sequence[str | None],
    gpus: Sequence[int],
    prices: Mapping[str, float],
    cache: ResultCache | None,
    stop: Callable[[], Stop],
) -> Iterator[OnMachine]:
    """A plan for every hardware with every number of GPUs, in this order; the model is read once.

    Args:
        stop: a new one for each search.

    Raises:
        InputError: the model or a machine cannot be used.
        ProfileError: there is no such hardware profile.
    """
    assert request.model is not None
    model = read_model(request.model, batch_size=request.batch_size)
    asked = [replace(request, hardware=name, gpus=ranks) for name in hardware for ranks in gpus]
    for one in asked:
        try:
            inputs = read_inputs(one, model)
            name = inputs.setting.hardware_name
            answer = find_answer(inputs, stop(), cache)
        except InfeasibleError as error:
            yield OnMachine(one.hardware or DEFAULT_HARDWARE, one.gpus or 0, None, str(error))
            continue
        yield OnMachine(name, one.gpus or 0, answer, price=prices.get(name))


def read_prices(path: Path) -> dict[str, float]:
    """Hardware -> price of a GPU for an hour, of a YAML file of such lines.

    Raises:
        InputError: it cannot be read, or a price is no number above 0.
    """
    problems = Problems(str(path))
    raw = parse_yaml(decode(read_bytes(path, "file of prices"), path), problems)
    problems.raise_if_any()
    if not isinstance(raw, dict) or not raw:
        raise InputError(f"{path}: give a line 'hardware: price of a GPU for an hour' for each")
    for name, price in raw.items():
        fine = isinstance(price, int | float) and not isinstance(price, bool)
        if not fine or not 0 < price < 1e9:
            raise InputError(
                f"{problems.place((name,))}: {name} is {shown(price)}; give the price of a GPU for "
                "an hour, a number above 0"
            )
    return {str(name): float(price) for name, price in raw.items()}
