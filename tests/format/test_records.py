"""Header, locator and footer, against bytes made by hand from docs/FORMAT.md, sections 2 and 3."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_pack.errors import FormatError, LimitError, NewerVersionError, NotAPackError
from stream_pack.format.header import Header
from stream_pack.format.header_kinds import KINDS, decode_header
from stream_pack.format.records import FOOTER_NBYTES, LOCATOR_NBYTES, Footer, Locator, uncover

U64 = st.integers(0, 2**64 - 1)
EDGES = (0, 1, 15, 16, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)


def at_the_edges(test: Callable[..., None]) -> Callable[..., None]:
    """Where others' lengths wrapped or were cut, in any case (ET#2714, FB#6942)."""
    for nbytes in EDGES:
        test = example(offset=nbytes % 2**32, nbytes=nbytes)(test)
    return test


LOCATOR_MAGIC = bytes.fromhex("89 53 50 4c 0d 0a 1a 0a")
FOOTER_MAGIC = bytes.fromhex("89 53 50 46 0d 0a 1a 0a")
LOCATOR = struct.pack("<4Q2I", 1, 2, 3, 4, 48, 1) + LOCATOR_MAGIC
FOOTER = struct.pack("<Q2I", 5, 24, 1) + FOOTER_MAGIC


@at_the_edges
@given(offset=U64, nbytes=U64)
def test_the_header_is_the_one_of_executorch_for_every_64_bit_number(offset: int, nbytes: int) -> None:
    data = b"\0\0\0\0MP00" + struct.pack("<QQ", offset, nbytes)
    written = KINDS["mps"].pack(b"graph", offset, nbytes)
    assert b"".join(written) == data + b"graph"
    assert decode_header(data) == Header(KINDS["mps"], offset, nbytes, 24, None)


@at_the_edges
@given(offset=st.integers(0, 2**32 - 1), nbytes=U64)
def test_that_of_xnnpack_has_32_bits_for_the_region_and_the_exact_length_of_the_graph(offset: int, nbytes: int) -> None:
    data = b"\0\0\0\0XH00" + struct.pack("<HIIIQ", 30, 32, 5, offset, nbytes) + bytes(2)
    written = KINDS["xnnpack"].pack(b"graph", offset, nbytes)
    assert b"".join(written) == data + b"graph"
    assert decode_header(data) == Header(KINDS["xnnpack"], offset, nbytes, 32, 5)


@at_the_edges
@given(offset=U64, nbytes=U64)
def test_that_of_a_ptd_stands_inside_its_flatbuffer(offset: int, nbytes: int) -> None:
    flatbuffer = struct.pack("<I", 16) + b"FT01" + bytes(range(100))
    data = (
        struct.pack("<I", 16 + 48)
        + b"FT01"
        + b"FH01"
        + struct.pack("<IQQQQ", 40, 48, 108, offset, nbytes)
        + bytes(8)
        + bytes(range(100))
    )
    written = KINDS["ptd"].pack(flatbuffer, offset, nbytes)
    assert b"".join(written) == data
    assert KINDS["ptd"].before_graph_nbytes + len(flatbuffer) == len(data) == 156
    assert decode_header(data[:56]) == Header(KINDS["ptd"], offset, nbytes, 0, 156)


def test_a_region_that_the_header_of_xnnpack_cannot_point_at_is_refused() -> None:
    with pytest.raises(LimitError, match="32 bits") as caught:
        KINDS["xnnpack"].pack(b"graph", 2**32, 0)
    assert (caught.value.value, caught.value.limit) == (2**32, 2**32 - 1)


XH00 = b"\0\0\0\0XH00"
FT01 = b"\x40\0\0\0FT01FH01"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are too few"),
        (b"\0\0\0\0MP00" + bytes(15), "23 bytes are too few"),
        (XH00 + bytes(23), "31 bytes are too few"),
        (FT01 + bytes(43), "55 bytes are too few .* 56"),
        (b"\0\0\0\1MP00" + bytes(16), "00 00 00 01"),
        (b"\0\0\0\0MP01" + bytes(16), "4d 50 30 31"),
        (b"\0\0\0\1XH00" + bytes(24), "00 00 00 01"),
        (b"\x40\0\0\0FT01FH02" + bytes(44), "FH01"),
        (b"\x40\0\0\0FT02FH01" + bytes(44), "FT01"),
    ],
)
def test_what_is_no_header_is_refused_and_shown(data: bytes, words: str) -> None:
    with pytest.raises(NotAPackError, match=words):
        decode_header(data)


@pytest.mark.parametrize(("nbytes", "more"), [(39, 48), (40, 39), (2**32 - 1, 48)])
def test_a_header_that_would_not_fit_into_its_gap_is_refused(nbytes: int, more: int) -> None:
    with pytest.raises(FormatError, match="inserted"):
        decode_header(FT01 + struct.pack("<IQQQQ", nbytes, more, 100, 16384, 0) + bytes(8))


@pytest.mark.parametrize(("nbytes", "more"), [(40, 48), (40, 40), (48, 48), (40, 64)])
def test_a_longer_header_of_a_ptd_is_read(nbytes: int, more: int) -> None:
    data = FT01 + struct.pack("<IQQQQ", nbytes, more, 100, 16384, 32768) + bytes(8)
    assert decode_header(data) == Header(KINDS["ptd"], 16384, 32768, 0, more + 100)


def test_locator_and_footer_are_the_bytes_of_the_format() -> None:
    assert Locator(index_file_offset=1, index_nbytes=2, pack_nbytes=3, checksum=4).encode() == LOCATOR
    assert Footer(checksum=5).encode() == FOOTER
    assert (LOCATOR_NBYTES, FOOTER_NBYTES) == (len(LOCATOR), len(FOOTER)) == (48, 24)


@given(fields=st.tuples(U64, U64, U64, U64), before=st.binary(max_size=40))
def test_a_record_is_read_from_its_end_whatever_stands_before(fields: tuple[int, int, int, int], before: bytes) -> None:
    data = before + struct.pack("<4Q2I", *fields, 48, 1) + LOCATOR_MAGIC
    assert Locator.decode(data) == (Locator(*fields), 48)
    assert Locator.decode(memoryview(data)) == (Locator(*fields), 48)


@given(more=st.integers(0, 5))
def test_fields_of_a_later_version_stand_in_front_and_are_skipped(more: int) -> None:
    data = bytes(7) + b"\xee" * 8 * more + struct.pack("<Q2I", 5, 24 + 8 * more, 1) + FOOTER_MAGIC
    assert Footer.decode(data) == (Footer(5), 24 + 8 * more)


@pytest.mark.parametrize("place", range(8))
def test_every_byte_of_the_magic_counts(place: int) -> None:
    changed = bytearray(LOCATOR)
    changed[len(changed) - 8 + place] ^= 1
    with pytest.raises(FormatError, match="no locator"):
        Locator.decode(bytes(changed))


def test_one_record_is_not_taken_for_the_other() -> None:
    assert Locator.stands_before(LOCATOR)
    assert not Locator.stands_before(FOOTER)
    assert not Footer.stands_before(b"")
    with pytest.raises(FormatError, match="no footer"):
        Footer.decode(LOCATOR)


@pytest.mark.parametrize(("nbytes", "version"), [(0, 1), (40, 1), (49, 1), (56, 1), (2**32 - 1, 1), (48, 0)])
def test_impossible_lengths_and_versions_are_damage(nbytes: int, version: int) -> None:
    data = LOCATOR[:32] + struct.pack("<2I", nbytes, version) + LOCATOR_MAGIC
    with pytest.raises(FormatError, match="the file is damaged"):
        Locator.decode(data)


def test_a_record_that_is_no_row_of_64_bit_fields_is_damage() -> None:
    data = bytes(64) + LOCATOR[:32] + struct.pack("<2I", 52, 1) + LOCATOR_MAGIC
    with pytest.raises(FormatError, match="52 bytes"):
        Locator.decode(data)


@pytest.mark.parametrize("nbytes", range(48))
def test_a_cut_record_is_damage(nbytes: int) -> None:
    with pytest.raises(FormatError):
        Locator.decode(LOCATOR[len(LOCATOR) - nbytes :] if nbytes else b"")


def test_a_greater_version_is_said_to_be_newer_whatever_its_length() -> None:
    data = struct.pack("<2I", 16, 7) + FOOTER_MAGIC
    with pytest.raises(NewerVersionError, match="newer stream_pack") as caught:
        Footer.decode(data)
    assert (caught.value.version, caught.value.supported) == (7, 1)


def test_a_checksum_does_not_cover_itself() -> None:
    assert uncover(LOCATOR) == LOCATOR[:24] + LOCATOR[32:]
    assert uncover(memoryview(FOOTER)) == FOOTER[8:]
    assert Locator(1, 2, 3, 99).covered() == Locator(1, 2, 3, 4).covered()


@pytest.mark.parametrize("kind", [Locator, Footer])
def test_a_record_longer_than_a_page_is_refused(kind: type[Locator] | type[Footer]) -> None:
    claimed = bytes(8192 - 16) + struct.pack("<II8s", 4104, 1, kind.MAGIC)
    with pytest.raises(FormatError, match="4096 at most"):
        kind.decode(claimed)
