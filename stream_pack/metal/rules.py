"""What Metal requires of memory, as arithmetic: windows, checks, and the names of dtypes.

Pure: nothing here uses a device, a file or the Objective-C runtime, so a plan for a Mac can be made and tested on any
machine.

Source: Apple's documentation of ``newBufferWithBytesNoCopy:length:options:deallocator:`` (pointer and length are
multiples of the page, one VM region, at most ``maxBufferLength``) and of ``MPSDataType``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import AlignmentError, LimitError, MetalBufferError, OptionError
from stream_pack.format.align import PAGE_NBYTES, align_up
from stream_pack.format.ragged import Ragged

__all__ = [
    "CONSTANT_ALIGNMENT",
    "IOS_HINT",
    "IOS_MAP_NBYTES",
    "MAX_DIM",
    "MPS_DATA_TYPES",
    "NDARRAY_NBYTES",
    "NO_WINDOW",
    "Windows",
    "check_limit",
    "check_range",
    "plan_windows",
]

NO_WINDOW = -1
"""The window of a tensor without one: it has no bytes, or more than a buffer may have."""

CONSTANT_ALIGNMENT = 256
"""Of an offset in ``setBuffer:offset:atIndex:``, constant space, on Macs without Apple silicon.  (Device space requires
the alignment of the element, at most 16, which every tensor of a pack has.)"""

NDARRAY_NBYTES = 1 << 32
"""From this length on MPS may abort ("total bytes of NDArray > 2**32"): always on macOS 13 (pytorch#124635), and by
operation later.

Source: reports of macOS 15.1 (pytorch#143477), 15.2 (pytorch#143859) and 15.3 (pytorch#149261); the list of operations,
pytorch#149325, is open.  On macOS 26 a fill of more was silently wrong (pytorch#161265)."""

MAX_DIM = (1 << 31) - 1
"""The largest dim of an MPSNDArray, which aborts above it ("NDArray dimension length > INT_MAX"), and of an MLX array.

Source: pytorch#158824, since which PyTorch raises an error; MLX, python/src/convert.cpp, check_shape_dim."""

IOS_MAP_NBYTES = 2 << 30
"""About how much an app may map on iOS without an entitlement."""

IOS_HINT = (
    "on iOS an app that maps more than about 2 GiB needs the entitlements "
    "com.apple.developer.kernel.extended-virtual-addressing and "
    "com.apple.developer.kernel.increased-memory-limit"
)

MPS_DATA_TYPES: dict[str, int] = {
    "bool": 0x8000_0008,
    "uint8": 0x8,
    "int8": 0x2000_0008,
    "uint16": 0x10,
    "int16": 0x2000_0010,
    "uint32": 0x20,
    "int32": 0x2000_0020,
    "uint64": 0x40,
    "int64": 0x2000_0040,
    "float16": 0x1000_0010,
    "bfloat16": 0x9000_0010,  # from macOS 14 on
    "float32": 0x1000_0020,
    "complex32": 0x1100_0020,
    "complex64": 0x1100_0040,
    "int4": 0x2000_0004,
    "uint4": 0x4,
}
"""MPSDataType of each dtype of MPS.  The low byte counts bits; signed 0x20000000, float 0x10000000, complex
0x01000000, another encoding of the same bits 0x80000000.  (ExecuTorch's enum of the same name has other numbers.)"""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The buffers that cover some tensors: window ``w`` is ``[begins[w], ends[w])``.

    ``of`` is the window of each tensor, :data:`NO_WINDOW` for one without bytes or too large for any.  ``members`` has
    the numbers of the others, a row for each window.

    Units: bytes, from the origin of the planned offsets; every begin and end is a multiple of the page.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    of: NDArray[np.int64]
    members: Ragged[np.int64]

    def __len__(self) -> int:
        return len(self.begins)

    def tensors(self, window: int) -> NDArray[np.int64]:
        """The numbers of the tensors in a window."""
        return self.members.row(window)


def check_limit(max_buffer_length: int) -> int:
    """The largest nbytes a window may have: whole pages.

    Raises: LimitError below one page; OptionError for anything but a whole number.
    """
    if not isinstance(max_buffer_length, int | np.integer):
        raise OptionError(f"max_buffer_length={max_buffer_length!r}: expected an int, a number of bytes")
    if max_buffer_length < PAGE_NBYTES:
        raise LimitError(
            f"buffers of at most {max_buffer_length} bytes: expected at least one page of {PAGE_NBYTES}",
            value=max_buffer_length,
            limit=PAGE_NBYTES,
        )
    return max_buffer_length & -PAGE_NBYTES


def plan_windows(offsets: NDArray[np.int64], nbytes: NDArray[np.int64], *, max_buffer_length: int) -> Windows:
    """As few windows as possible, each at most ``max_buffer_length`` long, so that each tensor is whole in one.

    Greedy, which is optimal among plans that keep the order: a window starts at the page of its first tensor and takes
    tensors while the page of their end fits.  Two neighbours may share one page, which is then in both.
    Tensors may be in any order and inside one another.

    Units: bytes; offsets from a point that is page-aligned in memory.
    Cost: one sort, and a binary search per window: a few milliseconds for 100,000 tensors.
    Raises: LimitError for a limit below one page.
    """
    limit = check_limit(max_buffer_length)
    pages = offsets & -PAGE_NBYTES
    of = np.full(len(offsets), NO_WINDOW, np.int64)
    # Limit and begin are whole pages, so the end need not be rounded up to one.
    fits = np.flatnonzero((nbytes > 0) & (offsets + nbytes - pages <= limit))
    order = fits[np.argsort(offsets[fits], kind="stable")]
    starts = pages[order].tolist()
    # A tensor that opens a window ends after all before it (if another reached as far, this one would have fitted
    # with it), so one running maximum serves all windows.
    reach = np.maximum.accumulate(align_up(offsets[order] + nbytes[order], PAGE_NBYTES)).tolist()
    begins: list[int] = []
    ends: list[int] = []
    order_ends: list[int] = []
    at = 0
    while at < len(starts):
        begin = starts[at]
        at = bisect_right(reach, begin + limit, lo=at)
        begins.append(begin)
        ends.append(reach[at - 1])
        order_ends.append(at)
    ends_of_windows = np.array(order_ends, np.int64)
    of[order] = np.searchsorted(ends_of_windows, np.arange(len(order)), side="right")
    return Windows(
        begins=np.array(begins, np.int64), ends=np.array(ends, np.int64), of=of, members=Ragged(order, ends_of_windows)
    )


def check_range(
    address: int, nbytes: int, *, memory: tuple[int, int], page_nbytes: int, max_buffer_length: int
) -> None:
    """Prove, before Metal is called, that a range of memory can be an MTLBuffer without a copy.

    Newer systems accept much that the documentation forbids, and fail later.  ``memory`` is the mapping that must
    contain the range: half-open, in addresses.

    Raises: MetalBufferError for an empty range, one outside ``memory``, or one longer than ``max_buffer_length``;
    AlignmentError.
    """
    if nbytes <= 0:
        raise MetalBufferError(
            f"an MTLBuffer of {nbytes} bytes: Metal has no empty buffers; a tensor without bytes needs none",
            address=address,
            nbytes=nbytes,
        )
    for what, value in (("address", address), ("length", nbytes)):
        if value % page_nbytes:
            raise AlignmentError(
                f"the {what} {value:#x} is not a multiple of the page ({page_nbytes} bytes), as an MTLBuffer requires; "
                "map the file from a page boundary, and round the length up to one",
                value=value,
                alignment=page_nbytes,
            )
    begin, end = memory
    if address < begin or address > end or nbytes > end - address:
        raise MetalBufferError(
            f"bytes {address:#x} to {address + nbytes:#x} are not inside the mapping ({begin:#x} to {end:#x})",
            address=address,
            nbytes=nbytes,
        )
    if nbytes > max_buffer_length:
        raise MetalBufferError(
            f"an MTLBuffer of {nbytes} bytes: the device allows {max_buffer_length}; take several windows",
            address=address,
            nbytes=nbytes,
        )
