"""The file of a checkpoint: complete or not there, and never loaded with other content than was saved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.team import checkpoints
from paceline.team.checkpoints import read, write
from paceline.team.checksum import checksum


def content() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "version": 7,
        "note": "épreuve",
        "rates": (0.1, None, True),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_a_checkpoint_is_read_as_it_was_written_and_by_plain_torch(tmp_path: Path) -> None:
    path = tmp_path / "a" / "ck.pt"
    for _ in range(2):  # also over one that is there
        write(path, content())
        assert equal(read(path), content())
        plain = torch.load(path, weights_only=True)
        assert equal({name: plain[name] for name in content()}, content())
        assert [one.name for one in path.parent.iterdir()] == ["ck.pt"]


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "ck.pt")
    assert equal(read(tmp_path / "ck.pt"), content())


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ck.pt"
    write(path, content())
    data = path.read_bytes()
    refused = 0
    for place in range(0, len(data), 97):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            loaded = read(path)
        except UsageError as error:
            refused += 1
            assert str(path) in str(error)
            assert "\n" not in str(error)
        else:
            assert equal({name: loaded.get(name) for name in content()}, content()), place
    assert refused > len(data) / 97 / 2


@pytest.mark.parametrize("kind", ["truncated", "garbage", "empty", "foreign", "list", "object", "folder"])
def test_another_file_is_refused_in_one_sentence_that_names_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "ck.pt"
    write(path, content())
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind in ("garbage", "empty"):
        path.write_bytes(os.urandom(5000) if kind == "garbage" else b"")
    elif kind == "foreign":
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind == "object":
        torch.save({"model": {}, "optimizer": {}, "net": torch.nn.Linear(2, 2)}, path)
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(UsageError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_value_and_its_place_count() -> None:
    same = checksum({"a": torch.ones(2, 3), "b": [1, 2.0]})
    assert same == checksum({"a": torch.ones(3, 2).t(), "b": [1, 2.0]})
    others: list[dict[str, Any]] = [
        {"a": torch.ones(2, 3), "b": [1, 2]},
        {"a": torch.ones(2, 3), "b": (1, 2.0)},
        {"a": torch.ones(3, 2), "b": [1, 2.0]},
        {"a": torch.ones(2, 3).double(), "b": [1, 2.0]},
        {"b": [1, 2.0], "a": torch.ones(2, 3)},
        {"a": torch.ones(2, 3), "c": [1, 2.0]},
    ]
    assert len({same, *map(checksum, others)}) == len(others) + 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(1.5),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(4, dtype=torch.bool),
        torch.ones(4, dtype=torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.arange(12.0).view(3, 4)[:, ::2],
    ],
    ids=["empty", "scalar", "conjugate", "bool", "bfloat16", "sparse", "strided"],
)
def test_tensors_of_any_kind_are_written_and_read(tensor: torch.Tensor, tmp_path: Path) -> None:
    write(tmp_path / "ck.pt", {"model": {"w": tensor}, "optimizer": {}})
    loaded = read(tmp_path / "ck.pt")["model"]["w"]
    assert torch.equal(loaded.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("nameless", [True, False], ids=["nameless", "named"])
def test_a_kill_while_it_is_written_leaves_the_earlier_file_and_nothing_else(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ck.pt"
    write(path, content())
    if not nameless:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_RDWR)  # as where the file system has none
    reached = tmp_path / "reached"

    def hang(_content: Any, file: Any, **_options: Any) -> None:
        file.write(b"the beginning")
        file.flush()
        reached.touch()
        time.sleep(600)

    child = os.fork()
    if child == 0:
        checkpoints._save = hang
        write(path, {**content(), "version": 8})
        os._exit(0)
    while not reached.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reached.unlink()
    assert equal(read(path), content())
    if nameless:
        assert [one.name for one in tmp_path.iterdir()] == ["ck.pt"]
    write(path, content())
    assert [one.name for one in tmp_path.iterdir()] == ["ck.pt"]


def test_a_checkpoint_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written: File exists"):
        write(tmp_path / "file" / "ck.pt", content())
