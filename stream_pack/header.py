"""The header: the first 24 bytes of a pack, as ExecuTorch's MPS delegate reads them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from stream_pack.errors import NotAPackError

__all__ = ["HEADER_NBYTES", "Header"]

MAGIC = b"MP00"
# Source: ExecuTorch 1.4.1, backends/apple/mps/runtime/MPSDelegateHeader.cpp; little-endian, no padding.
#   0 4s zero   4 4s magic   8 u64 region file offset   16 u64 region nbytes
_STRUCT = struct.Struct("<4s4sQQ")
HEADER_NBYTES = _STRUCT.size


@dataclass(frozen=True, slots=True)
class Header:
    """Where the region is.  Units: bytes; ``region_file_offset`` counts from the pack's first byte."""

    region_file_offset: int
    region_nbytes: int

    def encode(self) -> bytes:
        """The 24 bytes."""
        return _STRUCT.pack(bytes(4), MAGIC, self.region_file_offset, self.region_nbytes)

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """Read the first 24 bytes of a pack or an MP00 payload.  No bound is checked here.

        Raises: NotAPackError when there are fewer, or they carry another magic.
        """
        if len(data) < HEADER_NBYTES:
            raise NotAPackError(
                f"{len(data)} bytes are too few for a pack, whose header alone has {HEADER_NBYTES}"
            )
        zero, magic, region_file_offset, region_nbytes = _STRUCT.unpack_from(data)
        if zero != bytes(4) or magic != MAGIC:
            raise NotAPackError(
                f"not a pack: the first 8 bytes are {data[:8].hex(' ')}, expected {bytes(4).hex(' ')} {MAGIC.hex(' ')}"
            )
        return cls(region_file_offset, region_nbytes)
