"""Packs for tests: small ones, and ones that are wrong in one place but carry the right checksums.

Positions and checksums are computed here from docs/FORMAT.md with struct and xxhash, not by the code under test.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

import stream_pack
from stream_pack.format.header import To

__all__ = ["BLOCK_NBYTES", "LOCATOR", "Places", "pack_bytes", "places", "reseal", "tensors"]

BLOCK_NBYTES = 4096
LOCATOR = struct.Struct("<QQQQII8s")  # index file offset, index nbytes, pack nbytes, checksum, nbytes, version, magic
FOOTER = struct.Struct("<QII8s")


def tensors() -> dict[str, torch.Tensor]:
    """Several dtypes and ranks, two tied, one inside another, one of no bytes, one of several blocks."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(96, 32, generator=generator)
    return {
        "embed": embed,
        "norm": torch.randn(7, generator=generator).to(torch.bfloat16),
        "head": embed,
        "rows": embed[32:64],
        "none": torch.empty(0, 4, dtype=torch.int64),
        "step": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
    }


def pack_bytes(
    path: Path,
    content: Mapping[str, torch.Tensor] | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    to: To = "mps",
) -> bytes:
    """Write a pack of ``content`` (None: :func:`tensors`) with blocks of 4096 bytes, and return its bytes."""
    stream_pack.save_file(
        tensors() if content is None else content, path, to=to, metadata=metadata, block_nbytes=BLOCK_NBYTES
    )
    return path.read_bytes()


@dataclass(frozen=True)
class Places:
    """Where the parts of a pack are, in bytes from its beginning."""

    region: int
    region_end: int
    index: int
    index_end: int
    locator: int
    footer: int
    nbytes: int


def places(data: bytes | bytearray) -> Places:
    """Read the header and the locator of a whole pack of version 1."""
    if data[4:8] == b"FT01":
        region, region_nbytes = struct.unpack_from("<QQ", data, 32)
    elif data[4:8] == b"XH00":
        region, region_nbytes = struct.unpack_from("<IQ", data, 18)
    else:
        region, region_nbytes = struct.unpack_from("<QQ", data, 8)
    index, index_nbytes, nbytes, *_ = LOCATOR.unpack_from(data, region - LOCATOR.size)
    return Places(
        region=region,
        region_end=region + region_nbytes,
        index=index,
        index_end=index + index_nbytes,
        locator=region - LOCATOR.size,
        footer=nbytes - FOOTER.size,
        nbytes=nbytes,
    )


def reseal(data: bytearray, at: Places | None = None) -> bytes:
    """Give a changed pack the head checksum and the root checksum that its bytes should have.

    ``at``: where its parts really are, when the change made it lie about that.
    """
    at = at or places(data)
    covered = bytes(data[: at.region - 24]) + bytes(data[at.region - 16 : at.region])
    struct.pack_into("<Q", data, at.region - 24, xxhash.xxh3_64_intdigest(covered))
    end = len(data)
    covered = (
        bytes(data[at.region - 24 : at.region - 16])
        + bytes(data[at.region_end : end - FOOTER.size])
        + bytes(data[end - 16 :])
    )
    struct.pack_into("<Q", data, end - FOOTER.size, xxhash.xxh3_64_intdigest(covered))
    return bytes(data)
