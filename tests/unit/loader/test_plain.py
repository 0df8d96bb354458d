"""Which batches take the quick way through the codec, and that they arrive as they were."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stoker.loader import plain
from stoker.loader.room import Room, tensor_over

SMALL = 1024


def room() -> Room:
    return Room(np.zeros(1 << 16, np.uint8), lambda nbytes: np.zeros(nbytes, np.uint8))


def inside(ground: Room, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    tensor = tensor_over(ground.memory, ground.reserve(nbytes), dtype, shape)
    return tensor.copy_(torch.arange(tensor.numel()).reshape(shape))


def there_and_back(batch: object, ground: Room) -> Any:
    tree = plain.describe(batch, ground, SMALL)
    assert tree is not None
    return plain.rebuild(marshal.loads(marshal.dumps(tree, 2)), memoryview(ground.memory))


def test_tensors_in_the_room_arrive_as_views_of_it() -> None:
    ground = room()
    batch = {"x": inside(ground, (4, 5)), "more": [inside(ground, (3,), torch.bfloat16)]}
    arrived = there_and_back(batch, ground)
    assert list(arrived) == ["x", "more"]
    assert torch.equal(arrived["x"], batch["x"])
    assert torch.equal(arrived["more"][0], batch["more"][0])
    batch["x"].zero_()
    assert not arrived["x"].any()


def test_what_is_small_and_elsewhere_arrives_as_a_writable_copy() -> None:
    labels = torch.arange(16)
    arrived = there_and_back((labels, [labels + 1]), room())
    assert type(arrived) is tuple
    assert torch.equal(arrived[0], torch.arange(16))
    arrived[0].zero_()
    assert torch.equal(labels, torch.arange(16))
    assert torch.equal(arrived[1][0], labels + 1)


def _shared_list() -> Any:
    one = [torch.ones(2)]
    return [one, one]


def _overlapping() -> Any:
    whole = torch.arange(8)
    return [whole, whole[2:4]]


def _endless() -> Any:
    batch: list[Any] = []
    batch.append([batch])
    return batch


@pytest.mark.parametrize(
    "make",
    [
        lambda: "text",
        lambda: [torch.ones(2), "text"],
        lambda: {1: torch.ones(2)},
        lambda: OrderedDict(x=torch.ones(2)),
        lambda: torch.ones(SMALL),  # not in the room, and not small
        lambda: [torch.ones(200) for _ in range(20)],  # small each, not together
        lambda: torch.ones(3, 4).t(),
        lambda: torch.empty_strided((1, 4), (77, 1)),
        lambda: torch.ones(0),
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.conj(torch.ones(2, dtype=torch.complex64)),
        lambda: torch.conj(torch.ones(2, dtype=torch.complex64)).imag,
        lambda: torch.ones(2, device="meta"),
        _shared_list,
        _overlapping,
        _endless,
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_plain_takes_the_general_way(make: Callable[[], Any]) -> None:
    assert plain.describe(make(), room(), SMALL) is None
