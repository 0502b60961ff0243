"""Zip records in a stream: against archives made by hand and by the interpreter's zipfile."""

from __future__ import annotations

import io
import zipfile
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import SourceError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.torch_save.zip_records import read_descriptor, read_directory, read_local_header, scan_payload
from tests.sources.byte_sources import pipe_stream
from tests.support.zips import Member, archive


def read_all(stream: ByteStream) -> dict[str, bytes]:
    """Every record, found by scanning alone, and the directory compared by hand."""
    found: dict[str, bytes] = {}
    positions = []
    while (header := read_local_header(stream)) is not None:
        if header.streamed:
            data = b"".join(scan_payload(stream, header))
        else:
            data = bytes(stream.read_exactly(header.nbytes, what="it"))
        assert read_descriptor(stream, header, len(data), len(data)) in (0, crc32(data))
        found[header.name] = data
        positions.append(header.position)
    entries = list(read_directory(stream))
    assert [entry.name for entry in entries] == list(found)
    assert [entry.position for entry in entries] == positions
    assert [entry.nbytes for entry in entries] == [len(data) for data in found.values()]
    return found


DECOYS = st.lists(
    st.binary(max_size=20)
    | st.sampled_from([b"PK\7\10", b"PK\3\4", b"PK\1\2", b"PK\7", b"PK\7\10" + b"\1" * 12, b"P"]),
    max_size=12,
).map(b"".join)


@given(
    st.lists(st.tuples(DECOYS, st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([1, 3, 65536]),
    st.booleans(),
)
def test_records_of_unknown_length_end_where_length_and_crc_agree(
    payloads: list[tuple[bytes, bool, bool]], step: int, zip64_end: bool
) -> None:
    """PT#40852: 16 and 24 bytes of descriptor, empty records, payloads that hold signatures."""
    members = [
        Member(f"r{k}", data, streamed=streamed, wide=streamed and wide)
        for k, (data, streamed, wide) in enumerate(payloads)
    ]
    data = archive(members, zip64_end=zip64_end)
    expected = {f"r{k}": payload for k, (payload, _, _) in enumerate(payloads)}
    assert read_all(pipe_stream(data, step=step)) == expected


@pytest.mark.parametrize("wide", [False, True])
def test_a_payload_that_is_an_archive_itself_does_not_end_at_the_inner_descriptor(wide: bool) -> None:
    inner = archive([Member("x", b"inner", wide=wide), Member("y", b"more", wide=wide)])
    data = archive([Member("outer", inner, wide=wide), Member("next", b"1")])
    assert read_all(pipe_stream(data, step=100)) == {"outer": inner, "next": b"1"}


def test_a_descriptor_with_the_wrong_crc_is_payload() -> None:
    fake = b"abc" + b"PK\7\10" + (1).to_bytes(4, "little") + (3).to_bytes(4, "little") * 2 + b"PK\3\4"
    assert read_all(pipe_stream(archive([Member("a", fake)]))) == {"a": fake}


def test_a_descriptor_without_a_crc_ends_a_record_only_before_another_header() -> None:
    fake = b"abc" + b"PK\7\10" + bytes(4) + (3).to_bytes(4, "little") * 2
    members = [Member("a", fake + b"more", crc=0), Member("b", b"x", crc=0)]
    assert read_all(pipe_stream(archive(members))) == {"a": fake + b"more", "b": b"x"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stated_length_other_than_the_one_that_was_read_is_refused(streamed: bool) -> None:
    data = archive([Member("a", b"PK\7\10" + bytes(2) + b"hello", streamed=streamed)])
    stream = pipe_stream(data.replace((11).to_bytes(4, "little") * 2, (12).to_bytes(4, "little") * 2))
    header = read_local_header(stream)
    assert header is not None
    stream.skip(11, what="it")
    with pytest.raises(SourceError, match="has 11 bytes, but the archive states 12"):
        read_descriptor(stream, header, 11, 11)


@pytest.mark.parametrize("pad", [0, 1, 3, 60, 65531])
def test_alignment_padding_of_any_length_is_passed_over(pad: int) -> None:
    members = [Member("a", b"1234", pad=pad), Member("b", b"56", pad=pad, wide=pad < 65000)]
    assert read_all(pipe_stream(archive(members), step=5000)) == {"a": b"1234", "b": b"56"}


def test_what_the_interpreters_zipfile_writes_into_a_pipe_is_read() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise io.UnsupportedOperation

        def tell(self) -> int:
            raise io.UnsupportedOperation

    target = Pipe()
    with zipfile.ZipFile(target, "w") as made:
        made.writestr("a", b"hello")
        with made.open("b", "w", force_zip64=True) as record:
            record.write(b"PK\7\10 and more")
    expected = {"a": b"hello", "b": b"PK\7\10 and more"}
    assert read_all(pipe_stream(target.getvalue())) == expected


def test_more_than_65535_records_are_counted_by_the_zip64_record() -> None:
    data = archive(Member(f"{k}", b"x") for k in range(65_540))
    assert len(read_all(pipe_stream(data, step=65536))) == 65_540


def test_a_record_compressed_by_another_method_than_deflate_is_refused_with_advice() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_BZIP2) as made:
        made.writestr("a", bytes(1000))
    with pytest.raises(UnsupportedCheckpointError, match=r"compressed by method 12.*zip -0"):
        read_local_header(pipe_stream(target.getvalue()))


def test_an_encrypted_record_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="encrypted"):
        read_local_header(pipe_stream(archive([Member("a", b"x", flags=1)])))


def test_a_record_that_lost_bytes_on_the_way_is_refused_as_a_short_write() -> None:
    data = archive([Member("a", bytes(1000), drop=500), Member("b", bytes(1000))])
    stream = pipe_stream(data)
    header = read_local_header(stream)
    assert header is not None
    stream.skip(1000, what="it")
    with pytest.raises(SourceError, match="no data descriptor.*short write upstream"):
        read_descriptor(stream, header, 1000, 1000)


def test_an_archive_cut_anywhere_is_refused() -> None:
    data = archive([Member("a", b"hello", wide=True), Member("b", b"", streamed=False)])
    for end in range(1, len(data)):
        with pytest.raises(SourceError):
            read_all(pipe_stream(data[:end]))


def test_a_flipped_bit_in_the_records_at_the_end_is_noticed() -> None:
    data = archive([Member("a", b"hello"), Member("b", b"x")])
    end = data.index(b"PK\6\6")
    unused = {*range(end + 12, end + 16), *range(len(data) - 22 + 4, len(data) - 22 + 8)}
    for at in range(end, len(data)):
        if at not in unused:  # versions, and disks of which 0 and 0xffff are the same
            broken = bytearray(data)
            broken[at] ^= 1
            with pytest.raises(SourceError):
                read_all(pipe_stream(bytes(broken)))


def test_bytes_behind_the_archive_are_refused() -> None:
    data = archive([Member("a", b"hello")])
    for trailing in (b"\0", data):
        with pytest.raises(SourceError, match="bytes follow the end"):
            read_all(pipe_stream(data + trailing))


def test_a_scan_that_never_finds_its_descriptor_is_truncated() -> None:
    data = archive([Member("a", b"x" * 100_000)])[:90_000]
    stream = pipe_stream(data, step=4096)
    header = read_local_header(stream)
    assert header is not None
    with pytest.raises(TruncatedSourceError, match="no data descriptor ends it"):
        for _ in scan_payload(stream, header):
            pass


def test_a_payload_full_of_decoys_is_scanned_in_time_that_grows_with_its_length() -> None:
    # Every decoy states the right length, so that only the CRC tells: 4 MiB with a CRC over everything for
    # each would be 300 GB of CRC.
    decoys = bytearray()
    while len(decoys) < 1 << 22:
        decoys += b"PK\7\10" + b"\1\0\0\0" + len(decoys).to_bytes(4, "little") * 2 + b"PK\3\4"
    data = archive([Member("a", bytes(decoys))])
    assert read_all(pipe_stream(data, step=65536)) == {"a": bytes(decoys)}
