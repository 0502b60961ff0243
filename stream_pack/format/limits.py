"""The limits of the format, each with its reason."""

from __future__ import annotations

__all__ = [
    "MAX_BLOCK_NBYTES",
    "MAX_DTYPES",
    "MAX_FLATBUFFER_NBYTES",
    "MAX_HEAD_NBYTES",
    "MAX_NBYTES",
    "MAX_RANK",
    "MAX_RECORD_NBYTES",
    "MAX_TENSORS",
    "MAX_XNNPACK_REGION_FILE_OFFSET",
    "MIN_BLOCK_NBYTES",
    "VERIFIER_TABLES",
]

MAX_NBYTES = 2**62
"""Bytes, or elements, of a tensor, and bytes of a pack: any sum of two stays inside a signed 64-bit integer."""

MAX_RANK = 64
"""Dims of a tensor: NumPy's limit, and that of torch's own kernels."""

MAX_TENSORS = 2**31 - 1
"""Tensors of a pack: the graph numbers them with i32."""

MAX_DTYPES = 256
"""Dtypes of a pack: one byte numbers them."""

MAX_FLATBUFFER_NBYTES = 2**31 - 1
"""Bytes of a flatbuffer: offsets to vtables are signed 32-bit."""

MAX_HEAD_NBYTES = 8 << 30
"""Bytes before the region: two flatbuffers and one alignment of 1 GiB need 5 GiB at most.  A
larger head would only keep its reader busy hashing."""

MAX_XNNPACK_REGION_FILE_OFFSET = 2**32 - 1
"""The last file offset of a region in an XNNPACK payload, whose header has a u32 for it."""

VERIFIER_TABLES = 1_000_000
"""Tables above which C++ verifiers with default limits refuse a flatbuffer."""

MAX_RECORD_NBYTES = 4096
"""Bytes of a locator or footer: version 1 needs 48, and no later one will need more than a page."""

MIN_BLOCK_NBYTES = 4 << 10
"""Smaller blocks: checksums would take more than 0.2 % of the file."""

MAX_BLOCK_NBYTES = 1 << 30
"""Larger blocks: one core would verify for seconds what all could share."""
