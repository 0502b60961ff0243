"""Spool files: bytes come back, space is accounted for, and no name is ever left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_pack.errors import LimitError
from stream_pack.pipeline.spool import Spool


def test_appended_bytes_and_zeros_come_back_in_chunks(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with spool.open(why="a test", nbytes=10) as file:
        file.append(b"abc")
        file.append_zeros(4)
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


def test_without_a_folder_the_refusal_names_the_bytes() -> None:
    with pytest.raises(LimitError, match=r"a reason: .*123 bytes.*--spool-dir") as caught:
        Spool(None).open(why="a reason", nbytes=123)
    assert caught.value.args


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Spool(tmp_path / "nowhere").open(why="a test", nbytes=1)


def test_space_is_announced_once_and_only_when_it_is_needed(tmp_path: Path) -> None:
    lines: list[str] = []
    spool = Spool(tmp_path, announce=lines.append)
    assert lines == []
    spool.require(why="a reason", nbytes=2048)
    spool.open(why="another", nbytes=5).close()
    assert lines == [f"a reason: using up to 2.00 KiB of disk space temporarily in {tmp_path}"]
