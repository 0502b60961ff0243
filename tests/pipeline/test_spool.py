"""Spool files: bytes come back, space is accounted for, and no name is ever left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_pack.errors import LimitError
from stream_pack.pipeline.chunks import Zeros
from stream_pack.pipeline.spool import Spool, SpoolFile
from tests.support.spools import needs_memory_files, without_a_folder


def test_appended_bytes_and_zeros_come_back_in_chunks(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with spool.open(why="a test", nbytes=10) as file:
        file.append(b"abc")
        file.append(Zeros(4))
        file.append(memoryview(b"xyz"))
        assert file.nbytes == 10
        chunks = [bytes(chunk) for chunk in file.read(1, 9, chunk_nbytes=3)]
        assert chunks == [b"bc\0", b"\0\0\0", b"xy"]


def test_nothing_has_a_name_while_the_file_is_open(tmp_path: Path) -> None:
    with Spool(tmp_path).open(why="a test", nbytes=3) as file:
        file.append(b"abc")
        assert list(tmp_path.iterdir()) == []


def test_the_peak_is_what_was_held_at_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    first, second = (spool.open(why="a test", nbytes=9) for _ in range(2))
    first.append(b"123456")
    second.append(b"123")
    first.close()
    first.close()
    second.append(b"4567")
    assert spool.peak_nbytes == 9
    second.close()


def test_without_any_folder_the_refusal_names_the_bytes() -> None:
    with without_a_folder(), pytest.raises(LimitError, match=r"a reason: .*123 bytes.*--spool-dir") as caught:
        Spool(None).open(why="a reason", nbytes=123)
    assert caught.value.value == 123


def test_without_a_choice_files_are_in_the_folder_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lines: list[str] = []
    with Spool(None, announce=lines.append).open(why="a test", nbytes=3) as file:
        assert os.fstat(file.fileno()).st_dev == tmp_path.stat().st_dev
    assert lines == [f"a test: using up to 3 B of disk space temporarily in {tmp_path}"]


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Spool(tmp_path / "nowhere").open(why="a test", nbytes=1)


def test_space_is_announced_once_and_only_when_it_is_needed(tmp_path: Path) -> None:
    lines: list[str] = []
    spool = Spool(tmp_path, announce=lines.append)
    assert lines == []
    spool.allot(memory_nbytes=0, disk_nbytes=2048, why="a reason")
    spool.open(why="another", nbytes=5).close()
    assert lines == [f"a reason: using up to 2.00 KiB of disk space temporarily in {tmp_path}"]


def is_on_disk(file: SpoolFile) -> bool:
    """Linux says of a file in memory that it is a memfd."""
    return "memfd:" not in os.readlink(f"/proc/self/fd/{file.fileno()}")


@needs_memory_files
def test_little_waits_in_memory_and_nothing_is_said_of_it() -> None:
    lines: list[str] = []
    spool = Spool("nowhere", memory_nbytes=10, announce=lines.append)
    with spool.open(why="a test", nbytes=10) as file:
        file.append(b"abc")
        file.append(Zeros(4))
        file.append(b"xyz")
        assert b"".join(file.read(0, 10, chunk_nbytes=3)) == b"abc\0\0\0\0xyz"
        assert not is_on_disk(file)
        assert (file.place, spool.peak_nbytes, lines) == ("in memory", 0, [])


@needs_memory_files
def test_what_all_files_have_of_memory_is_bounded(tmp_path: Path) -> None:
    spool = Spool(tmp_path, memory_nbytes=10)
    first, second, third = (spool.open(why="a test", nbytes=nbytes) for nbytes in (6, 5, 4))
    assert [is_on_disk(file) for file in (first, second, third)] == [False, True, False]
    first.close()
    with spool.open(why="a test", nbytes=6) as fourth:
        assert not is_on_disk(fourth)
    for file in (second, third):
        file.close()


@needs_memory_files
def test_what_the_plan_sends_to_disk_is_all_on_disk(tmp_path: Path) -> None:
    spool = Spool(tmp_path, memory_nbytes=10)
    spool.allot(memory_nbytes=0, disk_nbytes=11, why="a plan")
    with spool.open(why="a test", nbytes=1) as file:
        assert is_on_disk(file)


@needs_memory_files
@pytest.mark.parametrize("step", [1, 3, 10, 11])
@pytest.mark.parametrize("nbytes", [0, 9, 10, 11, 40])
def test_what_is_collected_moves_to_disk_when_it_becomes_too_long(nbytes: int, step: int, tmp_path: Path) -> None:
    data = bytes(range(nbytes))
    lines: list[str] = []
    spool = Spool(tmp_path, memory_nbytes=10, announce=lines.append)
    with spool.collect((data[k : k + step] for k in range(0, nbytes, step)), why="a pipe") as file:
        assert os.read(file.fileno(), 100) == data
        assert is_on_disk(file) == (nbytes > 10)
    assert spool.peak_nbytes == (nbytes if nbytes > 10 else 0)
    assert lines == ([f"a pipe: using disk space temporarily in {tmp_path}"] if nbytes > 10 else [])
    with spool.open(why="a test", nbytes=10) as file:  # the memory was given back
        assert not is_on_disk(file)


@needs_memory_files
def test_chunks_that_fail_leave_no_descriptor_behind(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"12345"
        yield b"67890"
        raise OSError(5, "a broken pipe")

    before = os.listdir("/proc/self/fd")
    for memory_nbytes in (0, 7, 10):
        with pytest.raises(OSError, match="a broken pipe"):
            Spool(tmp_path, memory_nbytes=memory_nbytes).collect(chunks(), why="a test")
    assert os.listdir("/proc/self/fd") == before


@needs_memory_files
def test_where_files_in_memory_are_forbidden_they_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memfd_create(_name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with Spool(tmp_path, memory_nbytes=10).open(why="a test", nbytes=10) as file:
        assert is_on_disk(file)
