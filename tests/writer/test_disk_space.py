"""A conversion takes the disk space of its pack, and of what it says that it spools: never a copy of the checkpoint."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stream_pack
from tests.sources.byte_sources import Dribble
from tests.support.torch_zips import saved

FD = Path("/proc/self/fd")
NBYTES = 16 << 20

pytestmark = pytest.mark.skipif(not FD.exists(), reason="open files are listed by Linux's /proc")


def open_files() -> dict[tuple[int, int], tuple[str, int]]:
    """Where every regular file that this process has open stands, and what it takes on disk, by its identity."""
    found = {}
    for fd in os.listdir(FD):
        try:
            status, place = os.stat(FD / fd), os.readlink(FD / fd)
        except FileNotFoundError:  # that of the listing itself
            continue
        if stat.S_ISREG(status.st_mode):
            found[status.st_dev, status.st_ino] = place, status.st_blocks * 512
    return found


class Watch:
    """The most that files in ``folder`` took at any time, those without a name included; pass it as ``progress``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = set(open_files())
        self.peak_nbytes = 0
        self.spools: set[str] = set()
        self.elsewhere: set[str] = set()

    def __call__(self, _done: int, _total: int) -> None:
        taken = {}
        for identity, (place, nbytes) in open_files().items():
            if identity in self._before:
                continue
            if Path(place).parent == self._folder:
                taken[identity] = nbytes
            if place.endswith(" (deleted)"):  # it has no name
                (self.spools if Path(place).parent == self._folder else self.elsewhere).add(place)
        for entry in os.scandir(self._folder):
            status = entry.stat()
            taken[status.st_dev, status.st_ino] = status.st_blocks * 512
        self.peak_nbytes = max(self.peak_nbytes, sum(taken.values()))


def tensors() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(NBYTES // 16, dtype=torch.int32).reshape(1024, -1) + number
        for number, name in enumerate("abcd")
    }


def a_file(data: bytes, folder: Path) -> object:
    (folder / "model.pt").write_bytes(data)
    return folder / "model.pt"


def a_pipe(data: bytes, _folder: Path) -> object:
    return Dribble(data, step=1 << 20)


@pytest.mark.parametrize("make", [a_file, a_pipe])
@pytest.mark.parametrize("old", [False, True])
def test_free_disk_space_for_the_pack_and_a_twentieth_is_enough(
    make: Callable[[bytes, Path], object], old: bool, tmp_path: Path
) -> None:
    source = make(saved(tensors(), _use_new_zipfile_serialization=not old), tmp_path)
    folder = tmp_path / "packs"
    folder.mkdir()
    watch = Watch(folder)
    report = stream_pack.convert(source, folder / "pack", progress=watch)  # type: ignore[arg-type]
    # What a stage further on still has in hand is not on disk when it is looked at last.
    assert NBYTES * 9 // 10 <= watch.peak_nbytes <= 1.05 * report.target_nbytes
    assert not watch.elsewhere


@pytest.mark.usefixtures("spools_on_disk")
def test_what_is_spooled_lies_beside_the_target_and_never_in_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    folder = tmp_path / "packs"
    folder.mkdir()
    given = tensors()
    given["b"] = given["b"].t()  # has to be gathered, and a pipe brings it once
    watch = Watch(folder)
    report = stream_pack.convert(Dribble(saved(given), step=1 << 20), folder / "pack", progress=watch)
    assert report.spool_nbytes == NBYTES // 4
    assert watch.peak_nbytes <= 1.05 * (report.target_nbytes + NBYTES // 4)
    assert watch.spools
    assert not watch.elsewhere
    assert os.listdir(folder) == ["pack"]


@pytest.mark.usefixtures("spools_on_disk")
def test_a_folder_that_is_named_for_it_holds_what_waits_for_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    folder = tmp_path / "spool"
    folder.mkdir()
    watch = Watch(folder)
    with open(tmp_path / "pack", "wb") as target:
        report = stream_pack.convert(
            Dribble(saved(dict(reversed(tensors().items()))), step=1 << 20),
            target,
            order="name",
            spool_dir=folder,
            progress=watch,
        )
    assert report.spool_nbytes == NBYTES // 4 * 3
    assert len(watch.spools) > 1
    assert watch.peak_nbytes <= 1.05 * report.spool_nbytes
    assert not watch.elsewhere
    assert os.listdir(folder) == []
