"""NumPy arrays as live tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import UnsupportedTensorError
from stream_pack.format.dtypes import DTYPES
from stream_pack.pipeline.gather import strided_chunks
from stream_pack.pipeline.geometry import Recipe, merged
from stream_pack.sources.memory.tensor import HOST, LiveTensor, byte_span, cut
from stream_pack.text import quoted

__all__ = ["describe_array"]

# By kind and length, so that neither byte order nor C's many names for one integer matter.
_BY_KIND = {
    (np.dtype(dtype.numpy).kind, dtype.bits // 8): number
    for number, dtype in enumerate(DTYPES)
    if dtype.numpy is not None
}
_BY_ML_DTYPES = {d.ml_dtypes: number for number, d in enumerate(DTYPES) if d.ml_dtypes is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Array(LiveTensor):
    array: NDArray[np.generic]
    swapped: bool

    def read(self, begin: int, end: int, *, chunk_nbytes: int) -> Iterator[memoryview]:
        if self.derivation is None:
            memory = memoryview(self.array.reshape(-1).view(np.uint8))
            return cut([memory], begin, end, chunk_nbytes=chunk_nbytes)
        pieces = strided_chunks(self.array, chunk_nbytes=chunk_nbytes)
        if self.swapped:
            unit = np.dtype(f"u{DTYPES[self.dtype].swap_nbytes}")
            pieces = (_byteswapped(piece, unit) for piece in pieces)
        return cut(pieces, begin, end, chunk_nbytes=chunk_nbytes)


def describe_array(name: str, array: NDArray[np.generic]) -> LiveTensor:
    """What is to be known of ``array``, the tensor called ``name``.

    Raises: UnsupportedTensorError for dtypes that a pack has no name for, and for subclasses of ndarray: what
    they mean (a mask, a unit) is not in their bytes.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} is a {type(array).__module__}.{type(array).__qualname__}, which its bytes alone "
            "do not represent: pass numpy.asarray(x) to store only the bytes",
            tensor=name,
        )
    dtype = _dtype_number(name, array.dtype)
    address: int = array.__array_interface__["data"][0]
    swapped = array.dtype.byteorder == (">" if sys.byteorder == "little" else "=")
    dims, strides = merged(array.shape, array.strides, array.itemsize)
    made = Recipe(
        start=address,
        shape=dims,
        strides=strides,
        itemsize=array.itemsize,
        swap_nbytes=DTYPES[dtype].swap_nbytes if swapped else 1,
        unit_nbytes=1,
        signs=b"",
    )
    return _Array(
        dtype=dtype,
        shape=array.shape,
        space=HOST,
        storage=_allocation(array),
        span=byte_span(address, array.shape, array.strides, array.itemsize),
        derivation=None if made.contiguous else made,
        array=array,
        swapped=swapped,
    )


def _dtype_number(name: str, dtype: np.dtype[np.generic]) -> int:
    number = _BY_KIND.get((dtype.kind, dtype.itemsize))
    if number is None and dtype.names is None:
        # Types of ml_dtypes are known by name: neither they nor their package need to be imported.
        number = _BY_ML_DTYPES.get(dtype.name)
    if number is None:
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} has the NumPy dtype {quoted(str(dtype))}, which a pack cannot hold: convert it "
            "first",
            tensor=name,
        )
    return number


def _allocation(array: NDArray[np.generic]) -> tuple[int, int]:
    """The half-open address range of the array that ``array`` is, in the end, a view of."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    address: int = root.__array_interface__["data"][0]
    return byte_span(address, root.shape, root.strides, root.itemsize)


def _byteswapped(piece: memoryview, unit: np.dtype[np.unsignedinteger]) -> memoryview:
    swapped: NDArray[np.generic] = np.frombuffer(piece, unit).byteswap()
    return memoryview(swapped.view(np.uint8))
