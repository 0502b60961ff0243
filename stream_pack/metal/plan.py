"""How a Mac will use a pack, predicted on any machine: windows, tensors that cannot be used in place, warnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import AlignmentError
from stream_pack.format.index import Index
from stream_pack.metal.placement import place
from stream_pack.metal.rules import (
    CONSTANT_ALIGNMENT,
    IOS_HINT,
    IOS_MAP_NBYTES,
    MAX_DIM,
    MPS_DATA_TYPES,
    NDARRAY_NBYTES,
    plan_windows,
)
from stream_pack.reader.pack import Pack
from stream_pack.text import counted, human_nbytes, listed, printable, quoted

__all__ = ["MAX_BUFFER_LENGTH", "MetalPlan", "PlannedWindow", "Unbound", "plan_metal"]

MAX_BUFFER_LENGTH = 7 << 29
"""3.5 GiB: ``maxBufferLength`` of the smallest Macs with Apple silicon."""


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """One MTLBuffer, and the names of the first and last of its ``tensors``.

    Units: bytes; ``file_offset`` counts from the pack's first byte; both are multiples of the page.
    """

    file_offset: int
    nbytes: int
    tensors: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Unbound:
    """A tensor that cannot be used in place, and why."""

    name: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MetalPlan:
    """What :func:`stream_pack.metal.open` will do with a pack.

    ``mapped_nbytes``: of all windows together; ``unbound_nbytes``: of the ``unbound`` tensors.  Asking for one of these
    raises TensorTooLarge; the others can be used.  Where the pack is not at a page of its file, all are unbound, and
    opening raises AlignmentError.  ``own_buffers``: how many tensors can have an MTLBuffer that begins with them.
    """

    path: str
    max_buffer_length: int
    tensors: int
    windows: tuple[PlannedWindow, ...]
    mapped_nbytes: int
    unbound_nbytes: int
    own_buffers: int
    unbound: tuple[Unbound, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """All fields, as values that the json module takes."""
        return asdict(self)

    def summary(self) -> str:
        """One line of text."""
        text = (
            f"Metal: {counted(len(self.windows), 'window')} of at most {human_nbytes(self.max_buffer_length)}, "
            f"{human_nbytes(self.mapped_nbytes)} mapped, nothing copied"
        )
        if self.unbound:
            text += (
                f"; {len(self.unbound)} of {self.tensors} tensors ({human_nbytes(self.unbound_nbytes)}) cannot be used "
                "in place"
            )
        return text

    def to_text(self) -> str:
        """The windows, tensors that cannot be used in place, and warnings, as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for number, window in enumerate(self.windows):
            names = printable(window.first)
            if window.tensors > 1:
                names += f" to {printable(window.last)} ({counted(window.tensors, 'tensor')})"
            yield f"window {number}: {window.nbytes} bytes at {window.file_offset}: {names}"
        for tensor in self.unbound:
            yield f"not in place: {printable(tensor.name)}, {tensor.nbytes} bytes: {tensor.reason}"
        for warning in self.warnings:
            yield f"warning: {warning}"
        yield (
            f"{self.own_buffers} of {self.tensors} tensors can have a buffer of their own; working set: "
            f"{human_nbytes(self.mapped_nbytes)} (Macs recommend at most two thirds to three quarters of their memory)"
        )
        yield self.summary()


def plan_metal(pack: Pack, *, max_buffer_length: int = MAX_BUFFER_LENGTH) -> MetalPlan:
    """Plan for a device with this ``maxBufferLength`` (in bytes).  No byte of the region is read.

    Raises: LimitError for a limit below one page; RawPayloadError for a raw payload.
    """
    region_file_offset = pack._head.region_file_offset
    index = pack._contents.index
    nbytes = index.tensor_nbytes
    held = nbytes > 0
    try:
        placement = place(pack, max_buffer_length=max_buffer_length)
        plan, own = placement.windows, placement.own
        unbound = placement.too_large.tolist()
        reason = f"too large for a buffer of at most {max_buffer_length} bytes"
    except AlignmentError as error:
        plan, own = plan_windows(index.offsets[:0], nbytes[:0], max_buffer_length=max_buffer_length), held[:0]
        unbound = np.flatnonzero(held).tolist()
        reason = (
            f"alignment: the pack begins at byte {error.value} of its file, not at a multiple of {error.alignment}, "
            "and opening it is refused"
        )
    windows = []
    for window, (begin, end) in enumerate(zip(plan.begins.tolist(), plan.ends.tolist())):
        tensors = plan.tensors(window)
        first, last = index.name(int(tensors[0])), index.name(int(tensors[-1]))
        windows.append(PlannedWindow(region_file_offset + begin, end - begin, len(tensors), first, last))
    return MetalPlan(
        path=pack.path,
        max_buffer_length=max_buffer_length,
        tensors=len(index),
        windows=tuple(windows),
        mapped_nbytes=sum(window.nbytes for window in windows),
        unbound_nbytes=int(nbytes[unbound].sum()),
        own_buffers=int(own.sum()),
        unbound=tuple(Unbound(index.name(t), int(nbytes[t]), reason) for t in unbound),
        warnings=tuple(_warnings(index, held)),
    )


def _warnings(index: Index, held: NDArray[np.bool_]) -> Iterator[str]:
    def some(tensors: NDArray[np.bool_]) -> str:
        return listed([index.name(int(tensors.argmax()))], most=1, total=int(tensors.sum()))

    nbytes = index.tensor_nbytes
    long = nbytes >= NDARRAY_NBYTES
    if long.any():
        yield (
            f"4 GiB or more: MPS may abort, also on macOS 15, and be wrong without an error on macOS 26 ({some(long)})"
        )
    wide = np.zeros(len(index), np.bool_)
    wide[index.ragged_dims.rows[index.dims > MAX_DIM]] = True
    wide &= held
    if wide.any():
        yield f"a dim above {MAX_DIM}: MPS aborts, and MLX has no such shape ({some(wide)})"
    for number, dtype in enumerate(index.dtype_names):
        tensors = index.tensor_dtypes == number
        if not tensors.any():
            continue
        if dtype not in MPS_DATA_TYPES:
            yield f"MPS has no dtype {quoted(dtype)}: only your own kernels can use it ({some(tensors)})"
        elif dtype == "bfloat16":
            yield f"bfloat16 needs macOS 14 ({some(tensors)})"
    loose = held & (index.offsets % CONSTANT_ALIGNMENT != 0)
    if loose.any():
        yield (
            f"not at a multiple of {CONSTANT_ALIGNMENT}, which Macs without Apple silicon require in constant space "
            f"({some(loose)})"
        )
    if int(nbytes.sum()) > IOS_MAP_NBYTES:
        yield IOS_HINT
