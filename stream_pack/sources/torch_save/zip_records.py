"""The records of a zip archive as they are streamed: header, payload, descriptor, and the directory at the end.

Records are stored, as ``torch.save`` writes them, or deflated, as a program that has packed them again may leave them.
A signature proves nothing: payloads may hold any of them, so a record's end is where its length says, where its
deflated bytes end, or where a descriptor agrees with both the length and the CRC-32 of all bytes before it.

Source: APPNOTE.TXT 6.3.10, sections 4.3 to 4.5; torch's own writer (caffe2/serialize, miniz).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

from stream_pack.errors import SourceError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.text import quoted

__all__ = [
    "DEFLATED", "DESCRIPTOR", "DESCRIPTOR_NARROW", "DESCRIPTOR_WIDE", "END", "END_FIELDS", "ENTRY", "ENTRY_FIELDS",
    "FLAG_STREAMED", "FLAG_UTF8", "LOCAL", "LOCAL_FIELDS", "STORED", "U16_MAX", "U32_MAX", "ZIP64_END",
    "ZIP64_END_FIELDS", "ZIP64_EXTRA", "ZIP64_LOCATOR", "ZIP64_LOCATOR_FIELDS", "DirectoryEntry", "LocalHeader",
    "find_directory", "peek_name", "read_descriptor", "read_directory", "read_local_header", "scan_payload",
]  # fmt: skip

LOCAL = b"PK\3\4"
DESCRIPTOR = b"PK\7\10"
ENTRY = b"PK\1\2"
ZIP64_END = b"PK\6\6"
ZIP64_LOCATOR = b"PK\6\7"
END = b"PK\5\6"

STORED, DEFLATED = 0, 8
FLAG_ENCRYPTED = 1 << 0
FLAG_STREAMED = 1 << 3
FLAG_UTF8 = 1 << 11
ZIP64_EXTRA = 0x0001
U16_MAX, U32_MAX = 0xFFFF, 0xFFFFFFFF

# Fields after the four bytes of the signature.
# Version, flags, method, time, date; crc, compressed and plain length; lengths of name and extra field.
LOCAL_FIELDS = Struct("<5H3I2H")
# The same after the version of the writer, then the lengths of the comment, disk and attributes; attributes, offset.
ENTRY_FIELDS = Struct("<6H3I5H2I")
# Length of the rest; versions; disks; entries here and in all; length and offset of the directory.
ZIP64_END_FIELDS = Struct("<Q2H2I4Q")
ZIP64_LOCATOR_FIELDS = Struct("<IQI")
# Disks; entries here and in all; length and offset of the directory; length of the comment.
END_FIELDS = Struct("<4H2IH")
# A descriptor: crc, compressed and plain length.
DESCRIPTOR_NARROW, DESCRIPTOR_WIDE = Struct("<3I"), Struct("<I2Q")

_DIRECTORY_END = "the end of the archive's directory"


@dataclass(frozen=True, slots=True)
class LocalHeader:
    """What precedes a record's payload.

    Units: ``position`` counts bytes from the archive's start to the header.  ``streamed`` (flag bit 3): length and
    CRC come in a descriptor after the payload, ``wide`` with 8-byte lengths; else ``nbytes``, ``packed_nbytes`` (as
    stored in the archive) and ``crc`` hold them.  ``deflated``: the payload is compressed.
    """

    position: int
    name: str
    streamed: bool
    wide: bool
    deflated: bool
    nbytes: int
    packed_nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """What the directory at the archive's end says of a record.  ``method``: None if it is encrypted."""

    position: int
    name: str
    nbytes: int
    packed_nbytes: int
    crc: int
    method: int | None


def peek_name(stream: ByteStream) -> str | None:
    """The name of the record whose header comes next, and stays unread; None where no header begins."""
    fixed = stream.peek(4 + LOCAL_FIELDS.size)
    if fixed[:4] != LOCAL or len(fixed) < 4 + LOCAL_FIELDS.size:
        return None
    name_nbytes = LOCAL_FIELDS.unpack(fixed[4:])[-2]
    return _name(memoryview(stream.peek(len(fixed) + name_nbytes))[len(fixed) :])


def read_local_header(stream: ByteStream) -> LocalHeader | None:
    """The header of the next record, or None where the directory begins.

    Raises: UnsupportedCheckpointError for encrypted records, or such as are compressed by another method than deflate;
    TruncatedSourceError; SourceError when something else is here.
    """
    position = stream.position
    signature = stream.peek(4)
    if signature in (ENTRY, ZIP64_END, END):
        return None
    if len(signature) < 4:
        raise TruncatedSourceError(
            f"the archive ends at byte {position + len(signature)}, before its directory: it was cut short"
        )
    if signature != LOCAL:
        raise SourceError(
            f"byte {position} of the archive: expected the header of a record, found {signature.hex(' ')}"
        )
    what = "the header of a record"
    fixed = stream.read_exactly(4 + LOCAL_FIELDS.size, what=what)
    _, flags, method, _, _, crc, packed, nbytes, name_nbytes, extra_nbytes = LOCAL_FIELDS.unpack(fixed[4:])
    rest = stream.read_exactly(name_nbytes + extra_nbytes, what=what)
    name = _name(rest[:name_nbytes])
    extra = _zip64_extra(rest[name_nbytes:])
    if flags & FLAG_ENCRYPTED:
        raise UnsupportedCheckpointError(f"record {quoted(name)} is encrypted: decrypt the archive first")
    if method not in (STORED, DEFLATED):
        raise UnsupportedCheckpointError(
            f"record {quoted(name)} is compressed by method {method}; torch.save stores its records as they are: "
            "save the checkpoint again, or zip it without compression (zip -0)"
        )
    streamed = bool(flags & FLAG_STREAMED)
    if not streamed and extra is not None:
        sizes = iter(_u64s(extra))
        nbytes = next(sizes, nbytes) if nbytes == U32_MAX else nbytes
        packed = next(sizes, packed) if packed == U32_MAX else packed
    if not streamed and method == STORED and packed != nbytes:
        raise SourceError(f"record {quoted(name)} is stored, with the lengths {packed} and {nbytes}")
    deflated = method == DEFLATED
    return LocalHeader(position, name, streamed, extra is not None, deflated, nbytes, packed, crc)


def read_descriptor(stream: ByteStream, header: LocalHeader, nbytes: int, packed_nbytes: int) -> int:
    """The CRC-32 of the payload of ``nbytes`` bytes, from ``packed_nbytes`` bytes of the archive, that has just been
    read, as the archive states it.

    Raises: SourceError when the archive does not say here that the payload has these lengths.
    """
    if not header.streamed:
        crc, packed, stated = header.crc, header.packed_nbytes, header.nbytes
    else:
        layout = DESCRIPTOR_WIDE if header.wide else DESCRIPTOR_NARROW
        data = stream.peek(4 + layout.size)
        if data[:4] != DESCRIPTOR[: len(data)]:
            raise SourceError(
                f"record {quoted(header.name)} does not end after {nbytes} bytes: no data descriptor at byte "
                f"{stream.position} of the archive; bytes were lost (a short write upstream?) or the length is wrong"
            )
        fields = stream.read_exactly(4 + layout.size, what=f"the descriptor of {quoted(header.name)}")
        crc, packed, stated = layout.unpack(fields[4:])
        if packed != stated and not header.deflated:
            raise SourceError(f"record {quoted(header.name)} is stored, with the lengths {packed} and {stated}")
    if stated != nbytes:
        raise SourceError(f"record {quoted(header.name)} has {nbytes} bytes, but the archive states {stated}")
    if packed != packed_nbytes:
        raise SourceError(
            f"record {quoted(header.name)} has {packed_nbytes} compressed bytes, but the archive states {packed}"
        )
    return int(crc)


def scan_payload(stream: ByteStream, header: LocalHeader) -> Iterator[bytes]:
    """The payload of a streamed record of unknown length, in pieces; then the stream is at its descriptor.

    A payload that begins like the descriptor of an empty record is taken for one: what follows will not add up.

    Raises: TruncatedSourceError when no descriptor ends it.
    """
    layout = DESCRIPTOR_WIDE if header.wide else DESCRIPTOR_NARROW
    needed = 4 + layout.size + 4  # a descriptor, and the signature of what follows it
    data, begin = b"", 0
    passed = crc = 0  # of the payload before data[begin]
    while True:
        at = data.find(DESCRIPTOR, begin)
        end = at if at >= 0 else max(begin, len(data) - 3)
        if at == begin and at + needed <= len(data):
            stated, _, nbytes = layout.unpack_from(data, at + 4)
            follows = data[at + needed - 4 : at + needed]
            if nbytes == passed and stated in (0, crc) and follows in (LOCAL, ENTRY):
                stream.unread(data[at:])
                return
            end = at + 1
        if end > begin:
            piece = data[begin:end]
            crc = crc32(piece, crc)
            passed += len(piece)
            begin = end
            yield piece
        if at < 0 or at + needed > len(data):
            more = stream.read_some()
            if not more:
                raise TruncatedSourceError(
                    f"record {quoted(header.name)} begins at byte {header.position} of the archive, and no data "
                    "descriptor ends it: the archive was cut short or damaged"
                )
            data, begin = data[begin:] + more, 0


def find_directory(stream: ByteStream) -> int:
    """Where the directory of an archive in a regular file begins.

    Raises: SourceError when there is none.
    """
    nbytes = stream.file_nbytes or 0
    # The end record closes the file, but for a comment of at most 65,535 bytes, which torch does not write.
    for comment_nbytes in (0, U16_MAX):
        tail_begin = max(0, nbytes - 4 - END_FIELDS.size - 4 - ZIP64_LOCATOR_FIELDS.size - comment_nbytes)
        stream.seek(tail_begin)
        tail = stream.peek(nbytes - tail_begin)
        at = tail.rfind(END)
        if at >= 0 and at + 4 + END_FIELDS.size <= len(tail):
            break
    if at < 0 or at + 4 + END_FIELDS.size > len(tail):
        raise TruncatedSourceError("the archive has no directory at its end: it was cut short, or bytes follow it")
    offset = int(END_FIELDS.unpack_from(tail, at + 4)[5])
    locator = at - 4 - ZIP64_LOCATOR_FIELDS.size
    if locator >= 0 and tail[locator : locator + 4] == ZIP64_LOCATOR:
        end64 = int(ZIP64_LOCATOR_FIELDS.unpack_from(tail, locator + 4)[1])
        if end64 < nbytes:
            stream.seek(end64)
            record = stream.peek(4 + ZIP64_END_FIELDS.size)
            if record[:4] == ZIP64_END and len(record) == 4 + ZIP64_END_FIELDS.size:
                offset = int(ZIP64_END_FIELDS.unpack_from(record, 4)[8])
    if offset >= nbytes:
        raise SourceError(f"the archive's directory claims to begin at byte {offset}, in a file of {nbytes} bytes")
    return offset


def read_directory(stream: ByteStream) -> Iterator[DirectoryEntry]:
    """The directory that begins here, up to the end of the archive and of the stream, which are checked when the
    iterator ends.

    Raises: SourceError when it contradicts itself, or bytes follow; TruncatedSourceError.
    """
    begin = stream.position
    count = 0
    while stream.peek(4) == ENTRY:
        yield _read_entry(stream)
        count += 1
    found = (count, stream.position - begin, begin)
    wide = _read_zip64_end(stream)
    stated, comment_nbytes = _read_end(stream)
    resolved: tuple[int, ...] = stated
    if wide is not None:  # a field at its limit means that the zip64 record holds the number
        limits = (U16_MAX, U32_MAX, U32_MAX)
        resolved = tuple(w if s == limit else s for s, w, limit in zip(stated, wide, limits))
    if resolved != found or wide not in (None, found):
        raise SourceError(
            f"the archive's directory has {found[0]} entries in {found[1]} bytes from byte {found[2]} on; "
            f"its end record says {wide or stated}"
        )
    stream.skip(comment_nbytes, what="the archive's comment")
    if not stream.at_end():
        raise SourceError(
            f"bytes follow the end of the archive at byte {stream.position}: trailing data, or a second archive"
        )


def _read_zip64_end(stream: ByteStream) -> tuple[int, int, int] | None:
    """The directory's entries, bytes and position as the zip64 end record states them; None if there is no record."""
    position = stream.position
    if stream.peek(4) != ZIP64_END:
        return None
    fields = ZIP64_END_FIELDS.unpack(stream.read_exactly(4 + ZIP64_END_FIELDS.size, what=_DIRECTORY_END)[4:])
    rest_nbytes, _, _, disk, directory_disk, here, entries, nbytes, begin = fields
    if rest_nbytes != ZIP64_END_FIELDS.size - 8 or disk or directory_disk or here != entries:
        raise SourceError("the archive's zip64 end record is damaged")
    locator = stream.read_exactly(4 + ZIP64_LOCATOR_FIELDS.size, what=_DIRECTORY_END)
    if bytes(locator[:4]) != ZIP64_LOCATOR or ZIP64_LOCATOR_FIELDS.unpack(locator[4:]) != (0, position, 1):
        raise SourceError("the archive's zip64 locator is damaged")
    return entries, nbytes, begin


def _read_end(stream: ByteStream) -> tuple[tuple[int, int, int], int]:
    """The same three numbers as the end record states them, and the length of the archive's comment."""
    position = stream.position
    record = stream.read_exactly(4 + END_FIELDS.size, what=_DIRECTORY_END)
    disk, directory_disk, here, entries, nbytes, begin, comment_nbytes = END_FIELDS.unpack(record[4:])
    one_file = disk in (0, U16_MAX) and directory_disk in (0, U16_MAX)
    if bytes(record[:4]) != END or not one_file or here != entries:
        raise SourceError(f"the archive's end record, at byte {position}, is damaged")
    return (entries, nbytes, begin), comment_nbytes


def _read_entry(stream: ByteStream) -> DirectoryEntry:
    what = "the archive's directory"
    fixed = ENTRY_FIELDS.unpack(stream.read_exactly(4 + ENTRY_FIELDS.size, what=what)[4:])
    _, _, flags, method, _, _, crc, packed, nbytes, name_nbytes, extra_nbytes = fixed[:11]
    comment_nbytes, disk, position = fixed[11], fixed[12], fixed[15]
    rest = stream.read_exactly(name_nbytes + extra_nbytes, what=what)
    name = _name(rest[:name_nbytes])
    extra = _zip64_extra(rest[name_nbytes:])
    stream.skip(comment_nbytes, what=what)
    if extra is not None:
        wide = iter(_u64s(extra))
        nbytes = next(wide, nbytes) if nbytes == U32_MAX else nbytes
        packed = next(wide, packed) if packed == U32_MAX else packed
        position = next(wide, position) if position == U32_MAX else position
    if disk not in (0, U16_MAX):
        raise SourceError("the archive is one part of several: join them first")
    return DirectoryEntry(position, name, nbytes, packed, crc, None if flags & FLAG_ENCRYPTED else method)


def _name(data: memoryview) -> str:
    # Reversible for any bytes, so that two different names stay different.
    return bytes(data).decode("utf-8", "surrogateescape")


def _zip64_extra(extra: memoryview) -> bytes | None:
    """The content of extra field 0x0001, or None.  Alignment padding need not be a well-formed field."""
    at = 0
    while at + 4 <= len(extra):
        kind = int.from_bytes(extra[at : at + 2], "little")
        nbytes = int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == ZIP64_EXTRA:
            return bytes(extra[at + 4 : at + 4 + nbytes])
        at += 4 + nbytes
    return None


def _u64s(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]
