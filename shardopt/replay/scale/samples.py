"""How many samples of a rank a program works on, where its lookups tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from predictor.errors import InputError
from shardopt.replay.program.program import Call, RankProgram, Slot, TensorSpec
from shardopt.replay.program.values import is_lookup
from shardopt.replay.scale.walk import BAGS, numbered

LENGTHS = "fbgemm::permute_2D_sparse_data"
"""Takes a row of lengths a feature, with one of each sample."""


def samples_of(program: RankProgram, given: int | None) -> int:
    """Samples of a rank: the fewest bags of a lookup, those of its own batch.

    Args:
        given: as the user says.

    Raises:
        InputError: there are no lookups and nothing is given, or both disagree.
    """
    bags = set(_bags(program))
    if given is None and not bags:
        raise InputError(
            "--scale batch: the trace has no lookups that tell its batch; give --batch N, the "
            "samples of a rank in the trace, or --doubled TRACE"
        )
    samples = min(bags) if given is None else given
    odd = sorted(n for n in bags if n % samples)
    if odd:
        raise InputError(
            f"--scale batch: lookups of rank {program.rank} have {odd[0]} bags, which is no "
            f"multiple of {samples} samples" + ("; give another --batch" if given else "")
        )
    if samples < 2:
        raise InputError(
            "--scale batch: a batch of one sample does not tell its sizes from others; give "
            "--doubled TRACE, the same job captured at twice the batch"
        )
    return samples


def _bags(program: RankProgram) -> Iterator[int]:
    specs: dict[int, TensorSpec] = dict(program.made)
    for call in program.calls:
        specs.update(numbered(call.outputs, call.specs))
        first = call.specs[0] if call.specs else None
        if not isinstance(first, TensorSpec) or not first.shape:
            continue
        if call.op in BAGS or _pools(call, first.shape[0], program, specs):
            yield first.shape[0]
        lengths = call.arguments[1] if call.op == LENGTHS else None
        if isinstance(lengths, Slot) and lengths.number in specs:
            yield specs[lengths.number].shape[-1]


def _pools(call: Call, rows: int, program: RankProgram, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether a lookup of FBGEMM gives a row a bag: its offsets, behind its ids, have that many."""
    if not is_lookup(call.op) or "backward" in call.op:
        return False
    slots = [term.number for term in call.arguments if isinstance(term, Slot)]
    kinds = [program.fills.get(n, {}).get("kind") for n in slots]
    if "table_ids" not in kinds[:-1]:
        return False
    offsets = specs.get(slots[kinds.index("table_ids") + 1])
    return offsets is not None and bool(rows) and (offsets.shape[0] - 1) % rows == 0
