"""Which MTLBuffer each tensor of a pack is in: decided once, for :func:`stream_pack.metal.open` and for its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import AlignmentError, TensorTooLarge
from stream_pack.format.align import PAGE_NBYTES
from stream_pack.format.index import Index
from stream_pack.metal.rules import NO_WINDOW, Windows, check_limit, plan_windows
from stream_pack.reader.pack import Pack
from stream_pack.text import quoted

__all__ = ["Placement", "place", "too_large"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The windows of a pack for buffers of at most ``limit`` bytes; their offsets count from the region's first byte.

    ``too_large``: the tensors that no buffer can hold, by number, the largest first.  ``own``: whether a tensor can
    have a buffer that begins with it.
    """

    windows: Windows
    limit: int
    too_large: NDArray[np.int64]
    own: NDArray[np.bool_]


def place(pack: Pack, *, max_buffer_length: int) -> Placement:
    """Where the tensors are.  No byte of the region is read.

    Raises: OptionError, LimitError for the limit; RawPayloadError; AlignmentError for a pack that does not begin at a
    page of its file.
    """
    limit = check_limit(max_buffer_length)
    index = pack._head.index
    if pack.offset % PAGE_NBYTES:
        raise AlignmentError(
            f"{pack.path}: the pack begins at byte {pack.offset}, not at a multiple of {PAGE_NBYTES}, and cannot be "
            "used in place; align the segment that holds it, or copy the pack into its own file",
            value=pack.offset,
            alignment=PAGE_NBYTES,
        )
    nbytes, offsets = index.tensor_nbytes, index.offsets
    windows = plan_windows(offsets, nbytes, max_buffer_length=limit)
    fits = windows.of != NO_WINDOW
    large = np.flatnonzero(~fits & (nbytes > 0))
    return Placement(
        windows=windows,
        limit=limit,
        too_large=large[np.argsort(-nbytes[large], kind="stable")],
        own=fits & (offsets % PAGE_NBYTES == 0),
    )


def too_large(index: Index, tensor: int, limit: int) -> TensorTooLarge:
    """The error for a tensor that no buffer can hold."""
    name, nbytes = index.name(tensor), int(index.tensor_nbytes[tensor])
    return TensorTooLarge(
        f"tensor {quoted(name)}: its {nbytes} bytes, with the whole pages where it begins and ends, exceed the {limit} "
        "bytes that one MTLBuffer may have here; read it from weights.pack, store it in parts (rows of an embedding, "
        "one matrix of a fused projection), or use a machine with more memory, which has a higher limit",
        tensors=(name,),
        nbytes=nbytes,
        limit=limit,
    )
