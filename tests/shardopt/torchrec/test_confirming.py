"""Plans in a training script, in a group of one rank: what is copied, and left as it was."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from predictor.errors import InputError
from shardopt.torchrec.confirming import Confirm, confirm, copy_of, untouched
from tests.shardopt.torchrec.hook_models import bag


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_random_generators_go_on_as_if_nothing_had_run() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(3)
    random.seed(3)
    with untouched([]):
        torch.rand(7)
        random.random()
    assert (float(torch.rand(())), random.random()) == expected


def test_a_loader_with_a_generator_of_its_own_begins_anew() -> None:
    def loader() -> torch.utils.data.DataLoader[int]:
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(range(50), shuffle=True, generator=generator)

    confirmed, fresh = loader(), loader()
    with untouched(confirmed):
        next(iter(confirmed))
    assert list(confirmed) == list(fresh)


def test_a_copy_has_real_layers_and_tables_on_the_meta_device() -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    module = nn.Sequential(EmbeddingBagCollection(tables=[bag("t", 9, 4)]), nn.Linear(4, 1))
    weight = module[0].embedding_bags["t"].weight
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    copied = copy_of(module, [EmbeddingBagCollectionSharder()])
    copied_weight = copied[0].embedding_bags["t"].weight
    assert (copied_weight.device.type, weight.device.type) == ("meta", "cpu")
    assert copied_weight._optimizer_classes == [torch.optim.SGD]
    assert copied_weight._optimizer_kwargs == [{"lr": 0.5}]
    copied_weight._optimizer_kwargs[0]["optimizer"] = "as TorchRec does when it shards"
    assert weight._optimizer_kwargs == [{"lr": 0.5}]
    assert torch.equal(copied[1].weight, module[1].weight)
    assert copied[1].weight is not module[1].weight


@pytest.mark.usefixtures("group")
def test_a_module_that_cannot_be_copied_or_a_loader_without_batches_says_so() -> None:
    class Locked(nn.Module):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("locked")

    with pytest.raises(InputError, match="Locked cannot be copied"):
        copy_of(Locked(), [])
    with pytest.raises(InputError, match="no batch"):
        confirm(nn.Linear(1, 1), {}, Confirm([]))


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        confirm(nn.Linear(1, 1), {}, Confirm([1]))
