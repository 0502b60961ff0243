"""The head as one piece, against positions and checksums computed here from docs/FORMAT.md."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.errors import ChecksumError, FormatError, LimitError
from stream_pack.format.align import Alignment
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import EncodedHead, check_region, decode_head, encode_footer, encode_head
from stream_pack.format.header import Header
from stream_pack.format.header_kinds import KINDS, MPS, PTD, XNNPACK, Front
from stream_pack.format.layout import Layout, Policy, plan
from tests.support.damage import Share, may_refuse, some_or_all
from tests.support.packs import LOCATOR, pack_bytes, places, reseal

POLICY = Policy()


def layout_of(*shapes: tuple[int, ...], policy: Policy = POLICY) -> Layout:
    builder = CatalogBuilder()
    for number, shape in enumerate(shapes):
        builder.add(f"t{number}", BY_NAME["float32"], shape, storage=number, start=0)
    return plan(builder.build(storages_nbytes=0), policy)


def whole(encoded: EncodedHead) -> bytes:
    return encoded.front + bytes(encoded.padding_nbytes) + encoded.locator


FRONTS = (MPS, XNNPACK, PTD)
every_front = pytest.mark.parametrize("front", FRONTS, ids=[front.kind.name for front in FRONTS])
REGION_FIELDS = {MPS: ("<Q", 8), XNNPACK: ("<I", 18), PTD: ("<Q", 32)}
GRAPHS = {
    # Where the flatbuffer begins, and its identifier.
    MPS: (24, b"MP00"),
    XNNPACK: (32, b"XN01"),
    PTD: (0, b"FT01"),
}


@every_front
@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=5))
def test_header_and_locator_lead_to_every_part(shapes: list[tuple[int, ...]], front: Front) -> None:
    layout = layout_of(*shapes)
    encoded = encode_head(layout, front)
    data = whole(encoded)
    code, at = REGION_FIELDS[front]
    (region,) = struct.unpack_from(code, data, at)
    (region_nbytes,) = struct.unpack_from("<Q", data, at + struct.calcsize(code))
    assert region == len(data)
    assert region % 16384 == region_nbytes % 16384 == 0
    index, index_nbytes, nbytes, checksum, *_ = LOCATOR.unpack_from(data, region - 48)
    assert index % 64 == 0
    assert data[index + 4 : index + 8] == b"SPI1"
    assert not data[index + index_nbytes : region - 48].strip(b"\0")
    graph, identifier = GRAPHS[front]
    assert data[graph + 4 : graph + 8] == identifier
    blocks = sum(1 for shape in shapes if np.prod(shape) > 0)
    assert nbytes == region + region_nbytes + 8 * blocks + 24
    assert checksum == xxhash.xxh3_64_intdigest(data[: region - 24] + data[region - 16 :])
    decoded = decode_head(memoryview(data))
    for field in (
        "kind",
        "region_file_offset",
        "region_nbytes",
        "pack_nbytes",
        "index_file_offset",
        "index_nbytes",
        "checksum",
    ):
        assert getattr(decoded, field) == getattr(encoded.head, field)
    assert (decoded.checksums_file_offset, decoded.footer_file_offset) == (region + region_nbytes, nbytes - 24)


@every_front
def test_only_what_stands_before_the_index_depends_on_the_header(front: Front) -> None:
    shapes = ((3,), (0, 2), (1 << 18,), ())
    plain, other = (encode_head(layout_of(*shapes), which) for which in (MPS, front))
    assert plain.head.region_nbytes == other.head.region_nbytes
    assert plain.head.index_nbytes == other.head.index_nbytes
    assert plain.front[plain.head.index_file_offset :] == other.front[other.head.index_file_offset :]


def test_the_footer_covers_the_head_the_checksums_and_itself() -> None:
    encoded = encode_head(layout_of((3,)), MPS)
    checksums = struct.pack("<Q", 12345)
    footer = encode_footer(encoded.head, checksums)
    tail = struct.pack("<2I", 24, 1) + b"\x89SPF\r\n\x1a\n"
    covered = struct.pack("<Q", encoded.head.checksum) + checksums + tail
    assert footer == struct.pack("<Q", xxhash.xxh3_64_intdigest(covered)) + tail


def test_a_larger_alignment_moves_the_region() -> None:
    policy = Policy(alignment=Alignment(small=256, large=1 << 20, large_nbytes=1 << 20))
    encoded = encode_head(layout_of((1 << 18,), policy=policy), MPS)
    assert encoded.head.region_file_offset == 1 << 20
    assert decode_head(memoryview(whole(encoded))).region_file_offset == 1 << 20


@every_front
def test_a_head_with_bytes_missing_or_added_is_refused(front: Front) -> None:
    data = whole(encode_head(layout_of((3,)), front))
    for wrong in (data[:-1], data + b"\0", data[: 1 << 13]):
        with pytest.raises(FormatError, match="places the region"):
            decode_head(memoryview(wrong))


@every_front
def test_every_bit_of_the_head_is_covered(front: Front) -> None:
    data = whole(encode_head(layout_of((3,)), front))
    interesting = {*range(1200), *range(len(data) - 100, len(data)), *range(1200, len(data), 61)}
    for place in sorted(interesting):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        with pytest.raises((FormatError, ChecksumError)):
            decode_head(memoryview(changed))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import torch

    content = {"a": torch.arange(8.0), "bc": torch.zeros(2, 3, dtype=torch.int16), "e": torch.empty(0)}
    return pack_bytes(tmp_path_factory.mktemp("head") / "pack", content, metadata={"k": "v"})


def use(path: Path, data: bytes) -> bool:
    """Open and touch everything; whether it opened.  Nothing may come from outside the region."""
    path.write_bytes(data)
    opened = False
    with may_refuse(FormatError), stream_pack.open(path) as pack:
        opened = True
        at = places(data)
        for name, view in pack.items():
            assert len(view.raw()) == view.nbytes
            assert at.region <= view.file_offset <= view.file_offset + view.nbytes <= at.region_end
            assert view.name == name
            for typed in (view.numpy, view.torch):
                with suppress(TypeError):
                    assert typed().nbytes == view.nbytes
        assert isinstance(pack.metadata, dict)
        pack.verify(jobs=1)
    return opened


@some_or_all(5)
def test_a_forged_index_whose_checksums_agree_is_refused_or_stays_in_its_region(
    small: bytes, share: Share, tmp_path: Path
) -> None:
    # FB#5098, FB#9121, ET#19268: every byte of the index at several values
    at = places(small)
    opened = 0
    values = (
        (place, value)
        for place in range(at.index, at.index_end)
        for value in sorted({0, 1, 0x7F, 0x80, 0xFF, small[place] ^ 1} - {small[place]})
    )
    for place, value in share.of(values):
        changed = bytearray(small)
        changed[place] = value
        opened += use(tmp_path / "forged", reseal(changed))
    assert opened > 0  # some bytes mean nothing, or something else that holds


@given(
    changes=st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_numbers_at_the_edges_in_a_forged_index_lead_nowhere(
    changes: list[tuple[float, int]], small: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = places(small)
    changed = bytearray(small)
    for where, value in changes:
        place = at.index + int(where * ((at.index_end - at.index) // 4 - 1)) * 4
        struct.pack_into("<Q", changed, place, value)
    use(tmp_path_factory.getbasetemp() / "forged", reseal(changed))


@pytest.mark.parametrize("region", [0, 71, 2**33 + 16384, 2**62])
def test_a_region_where_no_pack_has_one_is_refused_before_anything_is_read(region: int) -> None:
    with pytest.raises(FormatError, match="which is impossible in a pack"):
        check_region(Header(KINDS["mps"], region, 0, 24, None))
    check_region(Header(KINDS["mps"], 2**33, 0, 24, None))


def test_a_region_that_is_no_multiple_of_a_page_is_refused() -> None:
    encoded = encode_head(layout_of((3,)), MPS)
    data = bytearray(whole(encoded))
    struct.pack_into("<Q", data, 16, 16384 + 256)
    struct.pack_into("<Q", data, len(data) - 32, encoded.head.pack_nbytes + 256)
    checksum = xxhash.xxh3_64_intdigest(bytes(data[:-24]) + bytes(data[-16:]))
    struct.pack_into("<Q", data, len(data) - 24, checksum)
    with pytest.raises(FormatError, match="expected multiples of 16384 and 16384"):
        decode_head(memoryview(bytes(data)))


@every_front
def test_the_weights_bytes_are_not_in_the_flatbuffers_however_many_they_are(front: Front) -> None:
    # FB#7391: 40 GiB in 12 tensors.
    shape = (40 << 30) // 12 // 4 // 1024, 1024
    encoded = encode_head(layout_of(*[shape] * 12), front)
    assert encoded.head.region_nbytes > 12 * shape[0] * shape[1] * 4 > 39 << 30
    assert len(encoded.front) < 10_000
    small = encode_head(layout_of(*[(1, 1024)] * 12), front)
    assert len(small.front) == len(encoded.front)


@pytest.mark.parametrize(("at", "value"), [(10, 64), (14, 2**32 - 1)])
def test_a_graph_where_the_header_of_a_pack_may_not_place_one_is_refused(at: int, value: int) -> None:
    data = bytearray(whole(encode_head(layout_of((3,)), XNNPACK)))
    struct.pack_into("<I", data, at, value)
    checksum = xxhash.xxh3_64_intdigest(bytes(data[:-24]) + bytes(data[-16:]))
    struct.pack_into("<Q", data, len(data) - 24, checksum)
    with pytest.raises(FormatError, match="places the graph at byte"):
        decode_head(memoryview(bytes(data)))


def test_a_graph_that_reaches_2_gib_is_refused() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 2**31

    with pytest.raises(LimitError, match="below 2 GiB"):
        encode_head(layout_of((3,)), Front(KINDS["xnnpack"], lambda index: Long()))


def test_a_front_of_somebody_else_is_called_once_and_stands_where_the_header_says() -> None:
    asked = []

    def graph(index: object) -> bytes:
        asked.append(index)
        return b"\x08\0\0\0XN01" + bytes(range(1, 101))

    layout = layout_of((3,))
    encoded = encode_head(layout, Front(KINDS["xnnpack"], graph))
    assert asked == [layout.index]
    assert encoded.front[32:140] == b"\x08\0\0\0XN01" + bytes(range(1, 101))
    assert struct.unpack_from("<II", encoded.front, 10) == (32, 108)
    assert decode_head(memoryview(whole(encoded))).graph_end == 140
