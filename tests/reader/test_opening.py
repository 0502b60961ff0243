"""Opening proves what it must, and says what stands there instead of a pack."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    OptionError,
    RawPayloadError,
    StreamPackError,
    TrailingBytesError,
    TruncatedError,
)
from tests.support.packs import LOCATOR, pack_bytes, places, reseal, tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


@pytest.fixture
def data(path: Path) -> bytes:
    return pack_bytes(path)


def refused(path: Path, data: bytes, error: type[StreamPackError]) -> StreamPackError:
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        stream_pack.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"GGUF\3\0\0\0" + bytes(100), "GGUF"),
        (b"loading weights...\n" * 3, "text"),
    ],
)
def test_something_else_is_named(path: Path, start: bytes, words: str) -> None:
    # ET#2533
    error = refused(path, start, NotAPackError)
    assert words.lower() in str(error).lower()


def test_a_wrong_magic_is_shown_beside_the_right_one(path: Path, data: bytes) -> None:
    # ET#2533
    error = refused(path, b"\0\0\0\0XH01" + data[8:], NotAPackError)
    assert "58 48 30 31" in str(error)
    assert "4d 50 30 30" in str(error)
    assert "58 48 30 30" in str(error)


def test_folders_and_files_that_are_not_there_are_the_systems_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        stream_pack.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        stream_pack.open(tmp_path / "nothing")


def test_a_fifo_is_refused_without_waiting_for_its_writer(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        stream_pack.open(path)


def test_a_cut_file_is_truncated_wherever_it_is_cut(path: Path, data: bytes) -> None:
    # ET#14091: at every byte of head, checksums and footer, and at every 512th of the rest
    at = places(data)
    stops = {*range(8, at.region + 300), *range(at.region, at.region_end, 512), *range(at.region_end, len(data))}
    for nbytes in sorted(stops, reverse=True):
        os.truncate(path, nbytes)
        with pytest.raises(TruncatedError) as caught:
            stream_pack.open(path)
        assert caught.value.actual_nbytes == nbytes
        if nbytes >= at.region:
            assert caught.value.expected_nbytes == len(data)


def test_a_file_cut_in_its_first_bytes_is_no_pack(path: Path, data: bytes) -> None:
    for nbytes in range(8):
        refused(path, data[:nbytes], NotAPackError)


def test_bytes_that_were_appended_are_refused(path: Path, data: bytes) -> None:
    error = refused(path, data + b"\0", TrailingBytesError)
    assert isinstance(error, TrailingBytesError)
    assert (error.expected_nbytes, error.actual_nbytes) == (len(data), len(data) + 1)


@pytest.mark.parametrize("record", ["locator", "footer"])
def test_a_newer_version_is_refused_as_newer(path: Path, data: bytes, record: str) -> None:
    # ET#2533
    end = places(data).region if record == "locator" else len(data)
    changed = bytearray(data)
    struct.pack_into("<I", changed, end - 12, 2)
    error = refused(path, reseal(changed), NewerVersionError)
    assert isinstance(error, NewerVersionError)
    assert (error.version, error.supported) == (2, 1)
    assert "newer stream_pack" in str(error)


def test_one_record_without_the_other_is_damage_and_never_a_raw_payload(path: Path, data: bytes) -> None:
    region = places(data).region
    for end in (region, len(data)):
        changed = bytearray(data)
        changed[end - 1] ^= 1
        error = refused(path, bytes(changed), FormatError)
        assert not isinstance(error, RawPayloadError)
    changed[region - 1] ^= 1
    error = refused(path, bytes(changed), RawPayloadError)
    assert "kind='mps'" in str(error)


def test_a_head_that_was_changed_is_damage_even_where_it_looks_possible(path: Path, data: bytes) -> None:
    changed = bytearray(data)
    place = data.index(b"embed")
    changed[place : place + 5] = b"embee"
    error = refused(path, bytes(changed), ChecksumError)
    assert isinstance(error, ChecksumError)
    assert error.part == "head"
    assert (error.file_begin, error.file_end) == (0, places(data).region)


EDGES = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def test_no_number_in_header_or_locator_leads_outside(path: Path, data: bytes) -> None:
    # ET#19268, ET#19860, ET#19055, ET#17163: each field at each edge, with checksums that agree
    at = places(data)
    fields = {
        "region file offset": 8,
        "region nbytes": 16,
        "index file offset": at.locator,
        "index nbytes": at.locator + 8,
        "pack nbytes": at.locator + 16,
        "locator nbytes and version": at.locator + 32,
    }
    spared = {
        fields["index nbytes"]: range(at.index_end - at.index - 1, at.locator - at.index + 1),
        fields["locator nbytes and version"]: [(1 << 32) + LOCATOR.size + 64],
    }
    tried = 0
    for field in fields.values():
        (right,) = struct.unpack_from("<Q", data, field)
        for value in (*EDGES, len(data), len(data) + 1, right - 1, right + 1, right - 64, right + 64, right + 16384):
            if value == right or not 0 <= value < 2**64:
                continue
            # An index may have bytes that nothing in it refers to, and a later locator may be longer.
            if value in spared.get(field, ()):
                continue
            changed = bytearray(data)
            struct.pack_into("<Q", changed, field, value)
            refused(path, reseal(changed, at), FormatError)
            tried += 1
    assert tried > 60


def test_a_pack_inside_another_file_opens_at_its_offset(path: Path, data: bytes) -> None:
    # PT#145610: positions are multiples of the page of whoever wrote, not of whoever maps
    expected = tensors()
    for before in (1, 4096, 5000, 65536):
        path.write_bytes(b"\xff" * before + data + b"\xff" * 100)
        for nbytes in (None, len(data), len(data) + 50):
            with stream_pack.open(path, offset=before, nbytes=nbytes, verify="full") as pack:
                assert (pack.offset, pack.nbytes) == (before, len(data))
                for name, tensor in expected.items():
                    assert torch.equal(pack[name].torch(), tensor)
                view = pack["embed"]
                begin = before + view.file_offset
                assert path.read_bytes()[begin : begin + view.nbytes] == view.raw()


def test_a_pack_inside_another_file_may_be_cut_too(path: Path, data: bytes) -> None:
    path.write_bytes(b"\xff" * 100 + data)
    with pytest.raises(TruncatedError, match="at byte 100"):
        stream_pack.open(path, offset=100, nbytes=len(data) - 1)
    with pytest.raises(NotAPackError):
        stream_pack.open(path, offset=101)
    with pytest.raises(NotAPackError, match=f"nothing is there: the file has only {len(data) + 100} bytes"):
        stream_pack.open(path, offset=2**40)


def test_a_locator_with_fields_of_a_later_minor_version_opens(path: Path, data: bytes) -> None:
    at = places(data)
    changed = bytearray(data)
    struct.pack_into("<Q", changed, at.locator - 8, 1234)  # in what was padding
    struct.pack_into("<I", changed, at.region - 16, LOCATOR.size + 8)
    path.write_bytes(reseal(changed))
    with stream_pack.open(path, verify="full") as pack:
        assert torch.equal(pack["embed"].torch(), tensors()["embed"])


def test_arguments_that_mean_nothing_are_refused(path: Path, data: bytes) -> None:
    for arguments in (
        {"offset": -1},
        {"nbytes": -1},
        {"offset": "a"},
        {"offset": 1.5},
        {"nbytes": "3"},
        {"verify": "always"},
        {"kind": "zip"},
    ):
        with pytest.raises(OptionError, match="expected"):
            stream_pack.open(path, **arguments)
