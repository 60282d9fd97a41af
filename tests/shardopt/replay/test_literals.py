"""Values of arguments as source: what stays, and what is not kept."""

import pytest

from shardopt.replay.literals import UnwritableError, literal
from shardopt.replay.program import Number, Word
from shardopt.replay.schema import Parameter


def of(kind: str) -> Parameter:
    return Parameter("x", kind, keyword=False, default=None, written=False)


def test_enumerations_and_lists() -> None:
    assert literal(6, of("ScalarType?"), "aten::to") == Word("torch.float32")
    assert literal("cuda:3", of("Device?"), "aten::to") == Word("device")
    assert literal((2, 3), of("SymInt[]"), "aten::view") == (Number(2), Number(3))
    assert literal(None, of("MemoryFormat?"), "aten::clone") is None
    assert literal(float("-inf"), of("float"), "aten::f") == Word('float("-inf")')


def test_texts_are_words_or_refused() -> None:
    assert literal("mean", of("str"), "aten::scatter_reduce") == Word("'mean'")
    assert literal("ibnd, jbnd->bnij", of("str"), "aten::einsum") == Word("'abcd,ebcd->bcae'")
    for text in ("alice", "/data/users", "summary"):
        with pytest.raises(UnwritableError):
            literal(text, of("str"), "aten::f")


def test_scalars_that_may_be_ids_or_data_are_not_kept() -> None:
    assert literal(4815162342, of("Scalar"), "aten::eq") == Number(1)
    assert literal(-1e9, of("Scalar"), "aten::masked_fill") == Number(-1e9)
    assert literal(3.14159, of("Scalar"), "aten::fill_") == Number(3.0)
    assert literal(100_000, of("Scalar"), "aten::arange") == Number(100_000)
    assert literal(0.9, of("Scalar"), "aten::mul") == Number(0.9)


def test_objects_are_refused() -> None:
    with pytest.raises(UnwritableError, match="Generator"):
        literal("<Object>", of("Generator?"), "aten::bernoulli_")
    with pytest.raises(UnwritableError, match="enumeration"):
        literal(99, of("ScalarType"), "aten::to")
