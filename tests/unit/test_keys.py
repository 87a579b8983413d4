"""What a sampler calls its samples is what the dataset is asked for, on whichever worker."""

from typing import Any

import msgspec
import numpy
import pytest
import torch

from paceline.data.keys import pack, restored


def travelled(drawn: Any, *, batches: bool = False) -> Any:
    order = msgspec.msgpack.decode(pack(drawn, batches=batches))
    if not batches:
        return restored(msgspec.msgpack.decode(msgspec.msgpack.encode(order)))  # in leases, once more
    return [restored(keys) for keys in msgspec.msgpack.decode(msgspec.msgpack.encode(order))]


@pytest.mark.parametrize(
    "keys",
    [
        [3, 1, 2],
        ["b", "a"],
        [(0, "left"), (1, "right")],
        [((0, 1), [2, (3, 4)]), ()],
        [{"scene": (1, 2), "frame": 3}],
        [None, 2.5, True, b"raw"],
    ],
)
def test_keys_are_the_same_at_the_other_end(keys: list[Any]) -> None:
    there = travelled(keys)
    assert there == keys
    assert repr(there) == repr(keys)


@pytest.mark.parametrize("give", [numpy.array, torch.tensor])
def test_numbers_of_other_libraries_are_numbers(give: Any) -> None:
    assert travelled(give([2, 0, 1])) == [2, 0, 1]
    assert travelled([(give(2), give([0, 1]))]) == [(2, [0, 1])]
    assert travelled(give([[0, 1], [2, 3]]), batches=True) == [[0, 1], [2, 3]]


def test_a_batch_may_be_any_sequence_of_keys() -> None:
    assert travelled([(0, 1), range(2, 4), [(4, 5)]], batches=True) == [[0, 1], [2, 3], [(4, 5)]]
