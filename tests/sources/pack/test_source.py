"""A pack as a source: its tensors come out as they went in, and damage does not pass."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    RawPayloadError,
    TrailingBytesError,
    TruncatedError,
    UnsupportedTensorError,
)
from stream_pack.format.align import Alignment
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import encode_footer, encode_head, root_checksum
from stream_pack.format.header_kinds import MPS
from stream_pack.format.layout import Layout, Policy, plan
from stream_pack.format.records import Footer, Locator
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.source import Source
from stream_pack.sources.pack.source import PackSource
from tests.sources.byte_sources import Dribble, file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, collect, options, ranges, requests_for
from tests.support.packs import reseal
from tests.support.taking import taken

POLICY = Policy(alignment=Alignment(small=256, large=4096, large_nbytes=8192), block_nbytes=4096)
METADATA = {"format": "pt", "é": "ü"}
NOTES = {"half": "of big", "é": "ü"}

BIG = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
PAIRS = bytes(range(8))
# name: dtype, shape, storage, first byte in it, bytes
TENSORS: dict[str, tuple[str, tuple[int, ...], int, int, bytes]] = {
    "big": ("uint8", (100, 100), 0, 0, BIG),
    "no elements": ("float32", (0, 3), 0, 0, b""),
    "tied": ("int16", (5000,), 0, 0, BIG),
    "inside big": ("float32", (10,), 0, 512, BIG[512:552]),
    "end of big": ("uint8", (16,), 0, 8192, BIG[8192:8208]),
    "scalar": ("float64", (), 1, 0, np.float64(2.5).tobytes()),
    "../ä\n": ("bfloat16", (3,), 2, 0, b"abcdef"),
    "pairs": ("float4_e2m1fn", (2, 8), 3, 0, PAIRS),
    "one byte": ("bool", (1,), 4, 0, b"\1"),
}
STORAGES = [BIG, np.float64(2.5).tobytes(), b"abcdef", PAIRS, b"\1"]


def layout() -> Layout:
    builder = CatalogBuilder()
    for name, (dtype, shape, storage, start, _) in TENSORS.items():
        builder.add(
            name, BY_NAME[dtype], shape, storage=storage, start=start, notes=NOTES if name == "inside big" else None
        )
    return plan(builder.build(storages_nbytes=0, metadata=METADATA), POLICY)


def assemble(the_layout: Layout, storages: list[bytes] = STORAGES) -> bytes:
    """A whole pack by hand: head, buffers with padding, XXH3-64 of each block, footer."""
    encoded = encode_head(the_layout, MPS)
    region = bytearray(the_layout.region_nbytes)
    checksums = b""
    index = the_layout.index
    for buffer, (offset, nbytes) in enumerate(
        zip(index.buffer_offsets.tolist(), index.buffer_nbytes.tolist(), strict=True)
    ):
        start = int(the_layout.buffer_starts[buffer])
        data = storages[int(the_layout.buffer_storages[buffer])][start : start + nbytes]
        region[offset : offset + nbytes] = data
        for begin in range(0, nbytes, 4096):
            digest = xxhash.xxh3_64_intdigest(data[begin : begin + 4096])
            checksums += digest.to_bytes(8, "little")
    return b"".join(
        (
            encoded.front,
            bytes(encoded.padding_nbytes),
            encoded.locator,
            region,
            checksums,
            encode_footer(encoded.head, checksums),
        )
    )


PACK = assemble(layout())
HEAD = encode_head(layout(), MPS).head
REGION = HEAD.region_file_offset


class TestAFile(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        return lambda: PackSource(file_stream(PACK, tmp_path))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return {name: Expected(d, shape, data) for name, (d, shape, _, _, data) in TENSORS.items()}

    def test_sharing_metadata_and_notes_come_along(self, make: MakeSource) -> None:
        catalog = make().catalog
        assert catalog.storages.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4]
        assert catalog.starts.tolist() == [0, 0, 0, 512, 8192, 0, 0, 0, 0]
        assert catalog.storages_nbytes == sum(map(len, STORAGES))
        assert catalog.metadata == METADATA
        assert [*catalog.notes] == [(3, "half", "of big"), (3, "é", "ü")]

    def test_packing_a_pack_again_gives_the_same_bytes(self, make: MakeSource) -> None:
        with make() as source:
            again = plan(source.catalog, POLICY)
            wanted = zip(
                again.buffer_storages.tolist(),
                again.buffer_starts.tolist(),
                again.index.buffer_nbytes.tolist(),
                strict=True,
            )
            buffers = collect(source, ranges(wanted), options())
        assert assemble(again, buffers) == PACK


class TestAPipe(TestAFile):
    chooses_order = False

    @pytest.fixture
    def make(self) -> MakeSource:
        return lambda: PackSource(pipe_stream(PACK, step=1000))

    def test_the_catalog_needs_only_the_head(self) -> None:
        pipe = Dribble(PACK, step=1)
        assert len(PackSource(ByteStream(pipe)).catalog) == len(TENSORS)
        assert pipe.taken == REGION


def open_both(data: bytes, folder: Path) -> Iterator[Callable[[], Source]]:
    yield lambda: PackSource(file_stream(data, folder))
    yield lambda: PackSource(pipe_stream(data, step=1 << 20))


def read(make: Callable[[], Source]) -> list[bytes]:
    with make() as source:
        return collect(source, requests_for(source.catalog)[1], options())


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("buffer", "at", "block", "tensors"),
    [
        (0, 0, 0, ("big", "tied", "inside big")),
        (0, 5000, 1, ("big", "tied")),
        (0, 9000, 2, ("big", "tied", "end of big")),
        (1, 7, 0, ("scalar",)),
        (4, 0, 0, ("one byte",)),
    ],
)
def test_a_damaged_block_is_named_with_its_tensors_and_bytes(
    buffer: int, at: int, block: int, tensors: tuple[str, ...], tmp_path: Path
) -> None:
    data = STORAGES[buffer]
    begin = REGION + int(HEAD.index.buffer_offsets[buffer])
    first, last = 4096 * block, min(4096 * block + 4096, len(data))
    for make in open_both(flipped(PACK, begin + at), tmp_path):
        with pytest.raises(ChecksumError, match=f"tensor '{tensors[0]}'.*block {block} of") as caught:
            read(make)
        error = caught.value
        assert error.part == "block"
        assert (error.buffer, error.block, error.tensors) == (buffer, block, tensors)
        assert (error.file_begin, error.file_end) == (begin + first, begin + last)
        assert error.expected == xxhash.xxh3_64_intdigest(data[first:last])
        assert error.actual == xxhash.xxh3_64_intdigest(flipped(data, at)[first:last])


def test_a_file_is_judged_by_the_blocks_that_are_taken(tmp_path: Path) -> None:
    damaged = flipped(PACK, REGION + 9000)
    with PackSource(file_stream(damaged, tmp_path)) as source:
        first_two_blocks = ranges([(0, 0, 8192), (1, 0, 8)])
        assert collect(source, first_two_blocks, options()) == [BIG[:8192], STORAGES[1]]
    with PackSource(file_stream(flipped(PACK, REGION), tmp_path)) as source:
        assert collect(source, ranges([(0, 9000, 8)]), options()) == [BIG[9000:9008]]
    with PackSource(file_stream(damaged, tmp_path)) as source, pytest.raises(ChecksumError):
        # The damaged byte is not wanted, but the block of the wanted one has it.
        collect(source, ranges([(0, 8192, 1)]), options())


@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 9_999), st.integers(1, 10_000)).map(
            lambda pair: (0, pair[0], min(pair[1], 10_000 - pair[0]))
        ),
        max_size=8,
    ),
    in_order=st.booleans(),
    chunk_nbytes=st.sampled_from([100, 4096, 5000, 1 << 20]),
    damaged_at=st.none() | st.integers(0, 9_999),
)
def test_whatever_is_wanted_of_a_file_comes_unless_a_block_of_it_is_damaged(
    wanted: list[tuple[int, int, int]], in_order: bool, chunk_nbytes: int, damaged_at: int | None
) -> None:
    data = PACK if damaged_at is None else flipped(PACK, REGION + damaged_at)
    touched = {block for _, begin, n in wanted for block in range(begin // 4096, (begin + n - 1) // 4096 + 1)}
    with ExitStack() as stack:
        file = stack.enter_context(TemporaryFile())
        file.write(data)
        file.seek(0)
        source = stack.enter_context(PackSource(ByteStream(file)))
        if damaged_at is not None and damaged_at // 4096 in touched:
            stack.enter_context(pytest.raises(ChecksumError))
        how = options(chunk_nbytes=chunk_nbytes, in_order=in_order)
        scalar = (1, 0, 8)
        expected = [*(BIG[begin : begin + n] for _, begin, n in wanted), STORAGES[1]]
        assert collect(source, ranges([*wanted, scalar]), how) == expected


def test_a_pipe_is_judged_by_all_its_blocks() -> None:
    damaged = pipe_stream(flipped(PACK, REGION + 9000))
    with PackSource(damaged) as source, pytest.raises(ChecksumError, match="'big'"):
        collect(source, ranges([(1, 0, 8)]), options())


def test_no_flipped_bit_of_a_piped_pack_passes() -> None:
    positions = {*range(3000), *range(0, len(PACK), 41), *range(len(PACK) - 300, len(PACK))}
    for at in sorted(positions):
        with pytest.raises((FormatError, ChecksumError)):
            read(lambda at=at: PackSource(pipe_stream(flipped(PACK, at), step=1 << 20)))  # type: ignore[misc]


def test_no_piece_of_a_pack_passes_for_a_whole_one(tmp_path: Path) -> None:
    for nbytes in (*range(0, len(PACK), 531), *range(len(PACK) - 70, len(PACK))):
        for make in open_both(PACK[:nbytes], tmp_path):
            with pytest.raises(NotAPackError if nbytes < 8 else TruncatedError) as caught:
                read(make)
            if nbytes >= REGION:
                assert isinstance(caught.value, TruncatedError)
                assert caught.value.actual_nbytes == nbytes
                assert caught.value.expected_nbytes == len(PACK)


def test_a_truncated_file_is_told_before_any_data_is_read(tmp_path: Path) -> None:
    with pytest.raises(TruncatedError, match="100 bytes are missing"):
        taken(PackSource(file_stream(PACK[:-100], tmp_path)))


@pytest.mark.parametrize("trailing", [b"\0", PACK])
def test_bytes_after_the_footer_are_refused(trailing: bytes, tmp_path: Path) -> None:
    for make in open_both(PACK + trailing, tmp_path):
        with pytest.raises(TrailingBytesError):
            read(make)


def test_the_head_of_one_pack_and_the_tail_of_another_are_told_apart(tmp_path: Path) -> None:
    index = layout().index
    other_names = np.bitwise_xor(index.names, 1, dtype=np.uint8)
    other = assemble(replace(layout(), index=replace(index, names=other_names)))
    assert len(other) == len(PACK)
    assert other[REGION:-40] == PACK[REGION:-40]
    for make in open_both(PACK[:REGION] + other[REGION:], tmp_path):
        with pytest.raises(ChecksumError, match="another pack's head") as caught:
            read(make)
        assert caught.value.part == "checksums"


def test_a_payload_without_names_is_refused_as_what_it_is(tmp_path: Path) -> None:
    # Header and constants as the delegate wants them, and neither locator nor footer.
    raw = PACK[:24] + bytes(REGION - 24) + PACK[REGION : REGION + HEAD.region_nbytes]
    for stream in (file_stream(raw, tmp_path), pipe_stream(raw)):
        with pytest.raises(RawPayloadError):
            taken(PackSource(stream))
        assert stream.position == 0
        assert stream.peek(24) == raw[:24]


def test_a_lost_locator_is_damage_where_a_footer_stands(tmp_path: Path) -> None:
    # Of a pipe, only what reads raw payloads sees the footer: tests/sources/executorch.
    data = PACK[: REGION - 8] + bytes(8) + PACK[REGION:]
    with pytest.raises(FormatError, match="damaged") as caught:
        taken(PackSource(file_stream(data, tmp_path)))
    assert not isinstance(caught.value, RawPayloadError)


def test_a_newer_version_is_refused_as_such(tmp_path: Path) -> None:
    at = REGION - 12  # the locator's version
    data = bytearray(PACK)
    data[at] = 2
    for make in open_both(reseal(data), tmp_path):
        with pytest.raises(NewerVersionError) as caught:
            read(make)
        assert (caught.value.version, caught.value.supported) == (2, 1)


def test_a_version_that_the_checksum_of_the_head_does_not_cover_is_damage(tmp_path: Path) -> None:
    at = REGION - 12
    for make in open_both(PACK[:at] + b"\2" + PACK[at + 1 :], tmp_path):
        with pytest.raises(ChecksumError, match="the head .* is damaged"):
            read(make)


def test_a_dtype_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    index = layout().index
    names = tuple("float8_next" if name == "bool" else name for name in index.dtype_names)
    newer = assemble(replace(layout(), index=replace(index, dtype_names=names)))
    for make in open_both(newer, tmp_path):
        with pytest.raises(UnsupportedTensorError, match="'float8_next' of 8 bits") as caught:
            taken(make())
        assert caught.value.tensor == "one byte"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    # "scalar" and "../ä\n" have six bytes each.
    index = layout().index
    names = np.full_like(index.names, ord("x"))
    for make in open_both(assemble(replace(layout(), index=replace(index, names=names))), tmp_path):
        with pytest.raises(FormatError, match="same name"):
            make()


def test_bytes_between_checksums_and_footer_are_refused(tmp_path: Path) -> None:
    locator, nbytes = Locator.decode(PACK[:REGION])
    longer = replace(locator, pack_nbytes=locator.pack_nbytes + 8)
    front = PACK[: REGION - nbytes]
    checksum = xxhash.xxh3_64_intdigest(front + longer.covered())
    checksums = PACK[HEAD.checksums_file_offset : HEAD.footer_file_offset]
    footer = PACK[HEAD.footer_file_offset :]
    tail = bytes(8) + footer
    root = root_checksum(checksum, (checksums,), tail)
    pack = b"".join(
        (
            front,
            replace(longer, checksum=checksum).encode(),
            PACK[REGION : HEAD.footer_file_offset],
            bytes(8),
            Footer(checksum=root).encode(),
        )
    )
    for make in open_both(pack, tmp_path):
        with pytest.raises(FormatError, match="the footer claims 24 bytes, expected 32"):
            read(make)


@pytest.mark.parametrize("nbytes", [1 << 30, 1 << 33])
def test_a_length_is_not_believed_before_its_bytes_have_come(nbytes: int, tmp_path: Path) -> None:
    claimed = PACK[:8] + nbytes.to_bytes(8, "little") + PACK[16:]
    for make in open_both(claimed, tmp_path):
        tracemalloc.start()
        try:
            with pytest.raises(TruncatedError):
                make()
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_reading_does_not_bring_torch_in(tmp_path: Path) -> None:
    program = """
import sys
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.pack.source import PackSource
assert len(PackSource(ByteStream.open_path(sys.argv[1])).catalog) == 9
assert "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith("stream_pack.reader")]
"""
    path = tmp_path / "pack"
    path.write_bytes(PACK)
    subprocess.run([sys.executable, "-c", program, path], check=True)
