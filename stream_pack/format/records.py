"""Locator and footer: the two records that are read from their end.

The last 24 bytes of either never change: u64 checksum, u32 record nbytes, u32 version, 8-byte magic.  Before them are
u64 fields.  A later minor change adds fields at the front, so known fields keep their distance from the end; a
change of meaning raises the version, and a reader refuses one above its own.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, fields
from typing import ClassVar, TypeVar

from stream_pack.errors import FormatError, NewerVersionError
from stream_pack.format.limits import MAX_RECORD_NBYTES

__all__ = [
    "CHECKSUM_NBYTES", "FOOTER_NBYTES", "LOCATOR_NBYTES", "RECORD_TAIL_NBYTES", "VERSION", "Footer", "Locator",
    "uncover",
]  # fmt: skip

VERSION = 1

_TAIL = struct.Struct("<II8s")
CHECKSUM_NBYTES = 8
RECORD_TAIL_NBYTES = _TAIL.size

_R = TypeVar("_R", bound="_Record")


@dataclass(frozen=True, slots=True)
class _Record:
    """Every dataclass field is a u64, in file order; ``checksum`` is the last."""

    NAME: ClassVar[str]
    # Like PNG's: a byte above 127 shows a 7-bit channel, CR LF a text-mode one, 0x1a stops a terminal's `type`.
    MAGIC: ClassVar[bytes]

    @classmethod
    def nbytes(cls) -> int:
        return 8 * len(fields(cls)) + _TAIL.size

    def encode(self) -> bytes:
        """The record, as this version writes it."""
        values = struct.pack(f"<{len(fields(self))}Q", *astuple(self))
        return values + _TAIL.pack(self.nbytes(), VERSION, self.MAGIC)

    def covered(self) -> bytes:
        """The bytes of the record that its own checksum covers: all but the checksum field."""
        return uncover(self.encode())

    @classmethod
    def stands_before(cls, tail: bytes | memoryview) -> bool:
        """Whether ``tail`` ends with this record's magic."""
        return bytes(tail[-len(cls.MAGIC) :]) == cls.MAGIC

    @classmethod
    def stored_checksum(cls, tail: bytes | memoryview) -> int:
        """The checksum in the record that ends where ``tail`` ends, of whatever version."""
        end = len(tail) - _TAIL.size
        return int.from_bytes(tail[max(0, end - CHECKSUM_NBYTES) : end], "little")

    @classmethod
    def decode(cls: type[_R], tail: bytes | memoryview) -> tuple[_R, int]:
        """Read the record that ends where ``tail`` ends; returns it and its length in bytes.

        Raises: FormatError without the magic or with an impossible length, NewerVersionError.
        """
        if len(tail) < _TAIL.size or not cls.stands_before(tail):
            raise FormatError(
                f"no {cls.NAME} at the expected position: expected {cls.MAGIC.hex(' ')}, "
                f"found {bytes(tail[-8:]).hex(' ')}; the file is damaged"
            )
        nbytes, version, _ = _TAIL.unpack_from(tail, len(tail) - _TAIL.size)
        if version > VERSION:
            raise NewerVersionError(
                f"made by a newer stream_pack: {cls.NAME} version {version}, this one reads up to {VERSION}; "
                "update stream_pack",
                version=version,
                supported=VERSION,
            )
        most = min(len(tail), MAX_RECORD_NBYTES)
        if version < 1 or nbytes % 8 or not cls.nbytes() <= nbytes <= most:
            raise FormatError(
                f"the {cls.NAME} claims version {version} and {nbytes} bytes: expected at least version 1 and "
                f"{cls.nbytes()} bytes, {most} at most; the file is damaged"
            )
        # From the tail in place: it may be a whole head.
        known = struct.unpack_from(f"<{len(fields(cls))}Q", tail, len(tail) - cls.nbytes())
        return cls(*known), nbytes


@dataclass(frozen=True, slots=True)
class Locator(_Record):
    """Ends exactly at the region's first byte, and makes the head readable from the header alone.

    Units: bytes; ``index_file_offset`` counts from the pack's first byte.  ``pack_nbytes`` is the
    length of the whole pack.  ``checksum`` is the XXH3-64 of the head, these 8 bytes left out.
    """

    NAME: ClassVar[str] = "locator"
    MAGIC: ClassVar[bytes] = b"\x89SPL\r\n\x1a\n"

    index_file_offset: int
    index_nbytes: int
    pack_nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Footer(_Record):
    """Ends exactly at the pack's last byte.

    ``checksum`` is the root: the XXH3-64 of the locator's checksum (8 bytes), the block checksums,
    and the footer with these 8 bytes left out.
    """

    NAME: ClassVar[str] = "footer"
    MAGIC: ClassVar[bytes] = b"\x89SPF\r\n\x1a\n"

    checksum: int


def uncover(record: bytes | memoryview) -> bytes:
    """A record's bytes without its checksum field, which no checksum covers."""
    record = bytes(record)
    end = len(record) - _TAIL.size
    return record[: end - CHECKSUM_NBYTES] + record[end:]


LOCATOR_NBYTES = Locator.nbytes()
FOOTER_NBYTES = Footer.nbytes()
