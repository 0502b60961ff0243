"""Zip archives made byte by byte, by the rules of APPNOTE.TXT, so that each of them can be broken."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import numpy as np

__all__ = ["Member", "archive"]


@dataclass(frozen=True, slots=True)
class Member:
    """A record.  ``streamed``: length and CRC in a descriptor (bit 3); ``wide``: zip64 extra field and 24 bytes of it.

    ``crc`` None: the right one.  ``pad``: bytes of an alignment extra field "FB".  ``drop``: bytes of the payload that
    are lost at its end while the lengths stay.  ``method``: what the headers say.
    """

    name: str
    data: bytes
    streamed: bool = True
    wide: bool = False
    crc: int | None = None
    pad: int | None = None
    drop: int = 0
    method: int = 0
    flags: int = 0

    @property
    def stated_crc(self) -> int:
        return crc32(self.data) if self.crc is None else self.crc


def _empty_records(count: int, position: int) -> tuple[bytes, bytes]:
    """The headers of ``count`` records without bytes, which begin at ``position``, and their entries."""
    names = np.char.add(b"archive/x/", np.char.zfill(np.arange(count).astype("S7"), 7))
    header = np.zeros(count, [("magic", "S4"), ("more", "V22"), ("nbytes", "<u4"), ("name", "S17")])
    header["magic"], header["nbytes"], header["name"] = b"PK\3\4", 17, names
    entry = np.zeros(
        count,
        [
            *(("magic", "S4"), ("more", "V24"), ("nbytes", "<u4"), ("attributes", "V10")),
            *(("position", "<u4"), ("name", "S17")),
        ],
    )
    entry["magic"], entry["nbytes"], entry["name"] = b"PK\1\2", 17, names
    entry["position"] = position + header.itemsize * np.arange(count)
    return header.tobytes(), entry.tobytes()


def archive(members: Iterable[Member], *, zip64_end: bool = True, empty: int = 0) -> bytes:
    """The archive of ``members``, and as many ``empty`` records after them, with its directory."""
    out = bytearray()
    entries = bytearray()
    count = 0
    for member in members:
        count += 1
        position = len(out)
        name = member.name.encode()
        extra = b""
        if member.wide:
            extra += struct.pack("<HHQQ", 1, 16, 0, 0)
        if member.pad is not None:
            extra += b"FB" + struct.pack("<H", member.pad) + b"Z" * member.pad
        flags = member.flags | 0x0800 | (0x0008 if member.streamed else 0)
        nbytes = len(member.data)
        sizes = (0, 0, 0) if member.streamed else (member.stated_crc, nbytes, nbytes)
        out += b"PK\3\4" + struct.pack("<5H3I2H", 20, flags, member.method, 0, 0, *sizes, len(name), len(extra))
        out += name + extra + member.data[: nbytes - member.drop]
        if member.streamed:
            layout = "<IQQ" if member.wide else "<III"
            out += b"PK\7\10" + struct.pack(layout, member.stated_crc, nbytes, nbytes)
        entries += b"PK\1\2" + struct.pack(
            "<6H3I5H2I", 20, 20, flags, member.method, 0, 0, member.stated_crc, nbytes, nbytes,
            len(name), 0, 0, 0, 0, 0, position,
        )  # fmt: skip
        entries += name
    if empty:
        headers, more = _empty_records(empty, len(out))
        out += headers
        entries += more
        count += empty
    begin = len(out)
    out += entries
    if zip64_end:
        end = len(out)
        out += b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(entries), begin)
        out += b"PK\6\7" + struct.pack("<IQI", 0, end, 1)
    out += b"PK\5\6" + struct.pack("<4H2IH", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), len(entries), begin, 0)
    return bytes(out)
