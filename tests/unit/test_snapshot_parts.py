"""The parts of a snapshot: its file and checksum, places of loaders, random numbers, schedulers."""

from __future__ import annotations

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler

from paceline.config import parse_snapshot
from paceline.data.epochs import EpochLeft
from paceline.data.ledger import Ledger
from paceline.data.place import LoaderPlace, generators_of, sampler_state
from paceline.errors import UsageError
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout
from paceline.team.checkpoints import read, write
from paceline.team.checksum import checksum, is_whole
from paceline.team.random_state import RandomState, random_state
from paceline.team.schedulers import Schedulers
from paceline.team.snapshot_files import KEPT, SECTION, SnapshotFiles, path_of, read_newest, snapshots_in
from paceline.transport import Memory


def content(version: int) -> dict[str, Any]:
    values = torch.arange(50_000, dtype=torch.float32) + version
    return {
        "model": {"weight": values},
        "optimizer": {"state": {}, "param_groups": []},
        SECTION: {},
        "version": version,
    }


@pytest.mark.parametrize(("at", "byte"), [(0, 1), (70_000, 0x80), (131_071, 7), (199_999, 255)])
def test_a_checksum_of_sums_finds_a_changed_byte_wherever_it_is(at: int, byte: int) -> None:
    first = content(3)
    told = checksum(first, "sums")
    assert told.startswith("sums:") and is_whole(first, told)
    raw = first["model"]["weight"].view(torch.uint8)
    raw[at] ^= byte
    assert not is_whole(first, told)


def test_a_checksum_of_sums_is_the_same_for_a_view_of_other_memory() -> None:
    whole = torch.zeros(3 + 100_000, dtype=torch.uint8)
    part = whole[3:].view(torch.uint8)
    part.copy_(torch.arange(100_000) % 251)
    assert checksum({"a": part}, "sums") == checksum({"a": part.clone()}, "sums")


def test_the_last_snapshots_are_kept_and_the_newest_that_is_whole_is_read(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    for version in (8, 9, 10, 11, 100):
        if version == 11:  # one that another run has, too, must not be overwritten
            os.link(path_of(tmp_path, 9), tmp_path / "of_another_run.pt")
        files.write(content(version), version)
        assert read(path_of(tmp_path, version))["version"] == version
    assert read(tmp_path / "of_another_run.pt")["version"] == 9
    files.close()
    assert not list((tmp_path / "snapshots").glob(".*"))
    assert [path.name for path in snapshots_in(tmp_path)] == ["00000100.pt", "00000011.pt"][:KEPT]
    assert read_newest(tmp_path)[1]["version"] == 100
    newest = path_of(tmp_path, 100)
    newest.write_bytes(newest.read_bytes()[:-5000])
    path, found, damaged = read_newest(tmp_path)
    assert (path.name, found["version"], len(damaged)) == ("00000011.pt", 11, 1)
    for one in snapshots_in(tmp_path):
        one.unlink()
    with pytest.raises(UsageError, match="has no snapshot to go on from"):
        read_newest(tmp_path)


def test_only_snapshots_are_written_without_torchs_own_sums(tmp_path: Path) -> None:
    SnapshotFiles(tmp_path).write(content(1), 1)
    for number in (2, 3, 4):  # the last of them is written over the first
        SnapshotFiles(tmp_path).write(content(number), number)
        write(tmp_path / "own.pt", content(number))
        torch.save(content(number), tmp_path / "plain.pt")
        for name in ("own.pt", "plain.pt"):
            with zipfile.ZipFile(tmp_path / name) as file:
                assert file.testzip() is None
        with zipfile.ZipFile(path_of(tmp_path, number)) as file:
            assert {one.CRC for one in file.infolist()} == {0}
        assert torch.equal(torch.load(path_of(tmp_path, number))["model"]["weight"], content(number)["model"]["weight"])


def test_a_checkpoint_that_is_no_snapshot_is_not_gone_on_from(tmp_path: Path) -> None:
    plain = {key: value for key, value in content(5).items() if key != SECTION}
    write(path_of(tmp_path, 5), plain)
    assert read(path_of(tmp_path, 5))["version"] == 5
    with pytest.raises(UsageError, match="is no snapshot"):
        read_newest(tmp_path)


def test_a_place_survives_a_file(tmp_path: Path) -> None:
    state = torch.Generator().manual_seed(4).get_state()
    for place in (
        LoaderPlace(2, [(1, "a"), 3, [4, 5]], generators=[state]),
        LoaderPlace(0, [[1, 2], [3]], batches=True, sampler={"epoch": 7}),
        LoaderPlace(4),
    ):
        torch.save(place.content(), tmp_path / "place.pt")
        found = LoaderPlace.of(torch.load(tmp_path / "place.pt", weights_only=True))
        assert (found.epoch, found.left, found.batches, found.sampler) == (
            place.epoch,
            place.left,
            place.batches,
            place.sampler,
        )
        assert all(torch.equal(one, other) for one, other in zip(found.generators, place.generators, strict=True))


def test_generators_of_loader_and_sampler_are_found_once() -> None:
    one, other = torch.Generator(), torch.Generator()
    assert generators_of(DataLoader([1, 2], shuffle=True)) == []
    assert generators_of(DataLoader([1, 2], shuffle=True, generator=one)) == [one]
    loader = DataLoader([1, 2], sampler=RandomSampler([1, 2], generator=other), generator=one)
    assert generators_of(loader) == [one, other]
    assert sampler_state(loader) is None


def test_leases_that_are_out_are_left_and_done_ones_are_not() -> None:
    ledger = Ledger([0, 1], in_turns=False)
    ledger.open(0, 3, list("abcdef"), [2], drop_last=False)
    ledger.enter(0, 0)
    ledger.enter(1, 0)
    first, second = ledger.lease(0, 0), ledger.lease(1, 0)
    assert first is not None and second is not None
    ledger.done([first.number])
    assert sorted(ledger.left(0).parts) == [(2, ["c", "d"]), (4, ["e", "f"])]
    assert ledger.loaders() == [0]


def test_a_gradient_that_is_carried_to_the_next_epoch_is_left_of_the_one_before() -> None:
    ledger = Ledger([0], in_turns=False)
    ledger.open(0, 0, [1, 2], [1], drop_last=False)
    ledger.enter(0, 0)
    one, two = ledger.lease(0, 0), ledger.lease(0, 0)
    assert one is not None and two is not None
    ledger.done([one.number])
    ledger.carry(0, 0)
    assert ledger.is_over(0)
    assert ledger.left(0) == EpochLeft(0, [(1, [2])])
    ledger.open(0, 1, [3], [1], drop_last=False)
    ledger.enter(0, 0)
    assert ledger.left(0) == EpochLeft(1, [(0, [3]), (-1, [2])])


def test_nothing_is_left_of_an_epoch_that_all_scripts_have_left() -> None:
    ledger = Ledger([0], in_turns=False)
    ledger.open(0, 0, [1, 2], [1], drop_last=False)
    ledger.enter(0, 0)
    ledger.quit(0, 0, 0)
    assert ledger.left(0) == EpochLeft(0, [])


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    np.random.normal()  # leaves one more Gaussian number
    torch.save(random_state().content(), tmp_path / "random.pt")
    drawn = (float(torch.rand(())), random.random(), float(np.random.normal()))
    state = RandomState.of(torch.load(tmp_path / "random.pt", weights_only=True))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    state.restore()
    assert (float(torch.rand(())), random.random(), float(np.random.normal())) == drawn


def test_schedulers_are_found_by_their_optimizer_whenever_they_are_made() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, other = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)
    first = StepLR(optimizer, 1)
    known = Schedulers(optimizer)
    assert [one["class"] for one in known.state()] == ["StepLR"]
    later, foreign = ReduceLROnPlateau(optimizer), CosineAnnealingLR(other, 3)
    optimizer.step()
    first.step()
    states = known.state()
    assert [one["class"] for one in states] == ["ReduceLROnPlateau", "StepLR"]
    first.step()
    later.step(1.0)
    assert Schedulers(optimizer).restore(states) and first.last_epoch == 1 and later.last_epoch == 0
    assert not Schedulers(other).restore(states) and foreign.last_epoch == 0


def test_a_kept_version_has_every_parameter_where_the_layout_has_it() -> None:
    named = [("a", torch.nn.Parameter(torch.ones(3, 5))), ("b", torch.nn.Parameter(torch.ones(7).double()))]
    layout = Layout(named, 2)
    kept = KeptVersion(layout, Memory.create(KeptVersion.memory_size(layout, 100)))
    assert kept.complete == 0
    kept.complete = 7
    for values in kept.values:
        values.fill_(2.0)
    found = kept.by_parameter(layout)
    assert [tuple(found[id(parameter)].shape) for _, parameter in named] == [(3, 5), (7,)]
    assert all(bool((found[id(parameter)] == 2).all()) for _, parameter in named)
    assert kept.complete == 7 and not any(kept.memory.bytes(kept.state, 100))


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("0s", 0), ("1.5min", 90), ("2h", 7200), ("off", None)])
def test_times_between_snapshots(text: str, seconds: float | None) -> None:
    assert parse_snapshot(text) == seconds
