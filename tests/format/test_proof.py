"""Damage has one wording, whoever reads the pack; what is proved, is proved of it in every reader."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import stream_pack
from stream_pack import ChecksumError, FormatError, StreamPackError, TrailingBytesError, TruncatedError
from stream_pack.reader.verify import verify
from stream_pack.sources.pack.source import PackSource
from tests.sources.byte_sources import file_stream, pipe_stream
from tests.sources.source_suite import collect, options, requests_for
from tests.support.packs import FOOTER, pack_bytes, places, reseal


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return pack_bytes(tmp_path / "whole")


def read(source: PackSource) -> None:
    with source:
        collect(source, requests_for(source.catalog)[1], options())


def refusals(data: bytes, folder: Path) -> list[StreamPackError]:
    """The errors of those that read a pack: opened, verified, converted from a file and from a pipe."""
    path = folder / "pack"
    path.write_bytes(data)
    with pytest.raises(StreamPackError) as opened:
        stream_pack.open(path, verify="full")
    (damage, *_) = verify(path).damages
    errors = [opened.value, damage.error]
    for stream in (file_stream(data, folder), pipe_stream(data)):
        with pytest.raises(StreamPackError) as converted:
            read(PackSource(stream))
        errors.append(converted.value)
    return errors


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_in_the_head(data: bytes) -> bytes:
    return data[: places(data).region - 1]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:20]


def two_joined(data: bytes) -> bytes:
    return data + data


def flipped_in_a_tensor(data: bytes) -> bytes:
    at = places(data).region + 5000
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def flipped_in_the_footer(data: bytes) -> bytes:
    at = places(data).footer
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def flipped_in_the_head(data: bytes) -> bytes:
    at = data.index(b"embed")
    return data[:at] + b"E" + data[at + 1 :]


def short_footer(data: bytes) -> bytes:
    """Eight bytes more than the footer says of itself, and a locator that counts them."""
    at = places(data)
    changed = bytearray(data[: at.footer] + bytes(8) + data[at.footer :])
    struct.pack_into("<Q", changed, at.locator + 16, len(changed))
    return reseal(changed)


def long_footer(data: bytes) -> bytes:
    """A footer that claims eight of the checksums' bytes."""
    changed = bytearray(data)
    struct.pack_into("<I", changed, places(data).footer + 8, FOOTER.size + 8)
    return reseal(changed)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (cut, TruncatedError, "the pack is truncated: expected"),
        (cut_in_the_head, TruncatedError, "the pack is truncated: expected at least"),
        (cut_in_the_header, TruncatedError, "the pack is truncated: expected at least 24 bytes"),
        (two_joined, TrailingBytesError, "follow the pack: expected"),
        (flipped_in_a_tensor, ChecksumError, "block 1 of buffer 0"),
        (flipped_in_the_footer, ChecksumError, "belong to another pack's head"),
        (flipped_in_the_head, ChecksumError, "the head"),
        (short_footer, FormatError, "the footer claims 24 bytes, expected 32"),
        (long_footer, FormatError, "the footer claims"),
    ],
)
def test_every_reader_of_a_pack_says_the_same_of_the_same_damage(
    damage: Callable[[bytes], bytes], error: type[StreamPackError], words: str, data: bytes, tmp_path: Path
) -> None:
    opened, *others = refusals(damage(data), tmp_path)
    name, said = str(opened).split(": ", 1)
    assert name == str(tmp_path / "pack")
    assert type(opened) is error
    assert words in said
    for other in others:
        assert type(other) is error
        text = str(other).removeprefix(f"{name}: ")
        if error is TrailingBytesError and text != said:
            # How much follows in a pipe is not known before all of it has come.
            text = text.replace("more bytes follow", f"{len(data)} bytes follow").replace(
                "found more", f"found {2 * len(data)}"
            )
        assert text == said


def test_a_footer_that_claims_fewer_bytes_than_the_head_leaves_for_it_does_not_open(
    data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "pack"
    path.write_bytes(short_footer(data))
    with pytest.raises(FormatError, match="the footer claims 24 bytes, expected 32"):
        stream_pack.open(path)
