"""Which tensor of a trace is which, though its ids are used again."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from predictor.trace.execution import Argument
from shardopt.replay.program.program import TensorSpec
from shardopt.replay.program.tensors import Tensors, TensorUse, tensors_of
from tests.shardopt.replay.nodes import plain, tensor


def one(argument: Argument) -> TensorUse:
    (item,) = tensors_of(argument)
    assert item is not None
    return item


def taking(*arguments: Argument) -> dict[int, dict[int, TensorSpec]]:
    """Return the operands of an op, each with a storage of its own."""
    items = [one(argument) for argument in arguments]
    return {item.tensor.storage: {item.tensor.id: item.spec} for item in items}


def test_another_view_under_the_id_of_a_dead_one_hides_nothing() -> None:
    tensors = Tensors()
    base = tensors.give(one(tensor(5, 9, (2, 3))), {})
    flat = tensors.give(one(tensor(6, 9, (6,))), taking(tensor(5, 9, (2, 3))))
    # the object of the whole tensor died, which autograd keeps
    column = tensors.give(one(tensor(5, 9, (2,), strides=(3,))), taking(tensor(6, 9, (6,))))
    assert tensors.take(one(tensor(7, 9, (2, 3)))) == base
    assert len({base, flat, column}) == 3
    assert not tensors.made


def test_a_tensor_reshaped_in_place_is_another() -> None:
    tensors = Tensors()
    tensors.give(one(tensor(5, 9, (2, 3))), {})
    after = tensor(5, 9, (3, 2), strides=(1, 3))
    turned = tensors.give(one(after), taking(tensor(5, 9, (2, 3))))
    assert tensors.find(one(after)) == turned
    assert tensors.find(one(tensor(6, 9, (2, 3)))) is None


def test_views_that_no_op_gave_share_memory() -> None:
    tensors = Tensors()
    base, part, unrelated, bits = (
        tensors.take(one(argument))
        for argument in (
            tensor(1, 9, (2, 3)),
            tensor(2, 9, (2,), offset=1),
            tensor(3, 10, (2, 3)),
            tensor(4, 9, (2, 3), "int"),
        )
    )
    stores = [tensors.made[n].storage for n in (base, part, unrelated, bits)]
    assert stores[0] == stores[1]
    # a type of its own has memory of its own: a storage is made in one type
    assert len(set(stores)) == 3
    assert tensors.hidden_views == 0


def test_a_view_that_no_op_shows_is_made_apart_and_counted() -> None:
    tensors = Tensors()
    tensors.give(one(tensor(1, 9, (2, 3))), {})
    hidden = tensors.take(one(tensor(2, 9, (3,))))
    assert tensors.made.keys() == {hidden}
    assert tensors.hidden_views == 1


def test_lists_keep_the_place_of_what_is_no_tensor() -> None:
    a, b = tensor(1, 2), tensor(3, 4, (), "long int")
    listed = Argument(
        (a.value, None, b.value),
        (a.shape, (), ()),
        "GenericList[Tensor(float),None,Tensor(long int)]",
        (a.strides, (), ()),
    )
    items = tensors_of(listed)
    assert [item and (item.spec.shape, item.spec.dtype) for item in items] == [
        ((2, 3), "float32"),
        None,
        ((), "int64"),
    ]
    assert tensors_of(plain(3)) == [None]


@dataclass
class Living:
    """A tensor that a job holds, also while only autograd does."""

    argument: Argument
    number: int | None


@given(st.data())
def test_numbers_follow_tensors_while_ids_are_used_again(data: st.DataObject) -> None:
    """A job of few ids and storages, each free again once what had it died."""
    tensors, living = Tensors(), list[Living]()
    shapes = st.sampled_from([(2, 3), (6,), (3, 2)])

    def free(used: set[int], start: int) -> int:
        return data.draw(st.sampled_from([n for n in range(start, start + 9) if n not in used]))

    for _ in range(data.draw(st.integers(1, 25))):
        ids = {alive.argument.value.id for alive in living}
        stores = {alive.argument.value.storage for alive in living}
        does = data.draw(st.sampled_from(["make", "view", "read", "saved", "die"]))
        if does == "make" and len(living) < 6:
            argument = tensor(free(ids, 1), free(stores, 100), data.draw(shapes))
            living.append(Living(argument, tensors.give(one(argument), {})))
        if not living:
            continue
        alive = data.draw(st.sampled_from(living))
        value = alive.argument.value
        if does == "view" and len(living) < 6:
            shape = data.draw(shapes)
            argument = tensor(free(ids, 1), value.storage, shape)
            same = [o for o in living if o.argument.value.storage == value.storage]
            number = tensors.give(one(argument), taking(alive.argument))
            earlier = next((o.number for o in same if o.argument.shape == shape), None)
            assert earlier is None or number is None
            if earlier is None and number is None:
                # a view that died, of memory that did not: it is the same view
                number = tensors.find(one(argument))
            living.append(Living(argument, earlier if earlier is not None else number))
        elif does == "read":
            assert tensors.take(one(alive.argument)) == alive.number
        elif does == "saved":
            alive.argument = tensor(free(ids - {value.id}, 1), value.storage, alive.argument.shape)
            assert tensors.take(one(alive.argument)) == alive.number
        elif does == "die":
            living.remove(alive)
    assert not tensors.made
