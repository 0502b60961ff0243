"""Where the elements of a strided tensor are in its storage, and how they become row-major, little-endian bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import UnsupportedTensorError
from stream_pack.format.dtypes import DTYPES
from stream_pack.text import quoted

__all__ = ["MAX_RANK", "Recipe", "merged", "recipe", "sign_flips"]

MAX_RANK = 32
"""What every NumPy can view, after dims that need no stride of their own are merged."""

_UNITS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one tensor's bytes are made from its storage.  Equal recipes over one storage give equal bytes.

    Units: ``start`` and ``strides`` count bytes, ``shape`` counts elements of ``itemsize`` bytes.  Dims that
    follow each other in memory are :func:`merged`, so a contiguous tensor has one dim, and one way of laying out
    elements has one recipe, however the tensor's own dims cut it up.
    ``swap_nbytes`` is the unit whose bytes are reversed (1: none); ``signs`` has a byte for each unit of an element,
    nonzero where its sign bit is flipped (empty: nowhere).
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    swap_nbytes: int
    unit_nbytes: int
    signs: bytes

    @property
    def contiguous(self) -> bool:
        """Whether the bytes in the storage are the tensor's bytes already."""
        return (
            len(self.shape) <= 1 and self.strides in ((), (self.itemsize,)) and self.swap_nbytes == 1 and not self.signs
        )

    @property
    def end(self) -> int:
        """The first byte of the storage after the tensor."""
        return _end(self.start, self.shape, self.strides, self.itemsize)

    def view(self, memory: memoryview) -> NDArray[np.generic]:
        """The elements in ``memory``, which begins at the storage's first byte.  Copies: none."""
        dtype = _UNITS.get(self.itemsize, f"V{self.itemsize}")
        return np.ndarray(self.shape, dtype, memory, self.start, self.strides)

    def resolve(self, window: memoryview) -> memoryview:
        """A window of whole, gathered elements with bytes swapped and signs flipped.  Copies: if anything changes."""
        if self.swap_nbytes > 1:
            window = np.frombuffer(window, _UNITS[self.swap_nbytes]).byteswap().view(np.uint8).data
        if self.signs:
            unit = _UNITS[self.unit_nbytes]
            top = np.array(1 << (8 * self.unit_nbytes - 1), unit)
            mask = np.where(np.frombuffer(self.signs, np.uint8) > 0, top, np.zeros((), unit))
            units = np.frombuffer(window, unit).reshape(-1, len(mask))
            window = (units ^ mask).reshape(-1).view(np.uint8).data
        return window


def recipe(
    name: str,
    *,
    dtype: int,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    storage_nbytes: int,
    big_endian: bool,
    conj: bool,
    neg: bool,
) -> Recipe:
    """How the tensor ``name`` of at least one element is made from its storage of ``storage_nbytes`` bytes.

    Units: ``offset`` and ``strides`` count torch's elements, as does ``shape``.

    Raises: UnsupportedTensorError for negative numbers, elements outside the storage, a bit that means nothing
    for the dtype, more dims than NumPy can view.
    """
    kind = DTYPES[dtype]
    itemsize = max(1, kind.bits // 8)
    if offset < 0 or any(dim < 0 for dim in shape) or any(stride < 0 for stride in strides):
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} has a negative offset, dim or stride: offset {offset}, "
            f"shape {list(shape)}, strides {list(strides)}",
            tensor=name,
        )
    start = offset * itemsize
    dims, steps = merged(shape, [stride * itemsize for stride in strides], itemsize)
    end = _end(start, dims, steps, itemsize)
    if end > storage_nbytes:
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} reaches byte {end} of a storage of {storage_nbytes} bytes: offset {offset}, "
            f"shape {list(shape)}, strides {list(strides)} in elements of {itemsize} bytes",
            tensor=name,
        )
    if len(dims) > MAX_RANK:
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} has {len(dims)} dims that are not contiguous; the limit is {MAX_RANK}", tensor=name
        )
    unit_nbytes, signs = sign_flips(name, dtype, conj=conj, neg=neg)
    return Recipe(
        start=start,
        shape=dims,
        strides=steps,
        itemsize=itemsize,
        swap_nbytes=kind.swap_nbytes if big_endian else 1,
        unit_nbytes=unit_nbytes,
        signs=signs,
    )


def _end(start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    return start + sum((dim - 1) * stride for dim, stride in zip(shape, strides)) + itemsize


def merged(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The fewest dims, and their strides, that visit the same elements in the same order: what :class:`Recipe` wants.

    Units: ``strides``, which may be negative, and ``itemsize`` count bytes.
    """
    dims: list[int] = []
    steps: list[int] = []
    for dim, step in zip(shape, strides):
        if dim == 1:
            continue
        if dims and steps[-1] == dim * step:
            dims[-1] *= dim
            steps[-1] = step
        else:
            dims.append(dim)
            steps.append(step)
    if not dims:
        return (1,), (itemsize,)
    return tuple(dims), tuple(steps)


def sign_flips(name: str, dtype: int, *, conj: bool, neg: bool) -> tuple[int, bytes]:
    """The ``unit_nbytes`` and ``signs`` of a :class:`Recipe` that make conj() and neg views plain values.

    torch stores the bytes as they were before; negation flips the sign of every float, conjugation that of the
    imaginary halves.

    Raises: UnsupportedTensorError for a bit that means nothing for the dtype of the tensor ``name``.
    """
    kind = DTYPES[dtype]
    complex_ = kind.name.startswith("complex")
    if (conj and not complex_) or (neg and not complex_ and kind.name not in _SIGNED):
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} of dtype {kind.name} has its {'conj' if conj else 'neg'} bit set, "
            "which means nothing there: save x.resolve_conj().resolve_neg()",
            tensor=name,
        )
    if not conj and not neg:
        return 1, b""
    if complex_:
        return kind.bits // 16, bytes((neg, neg != conj))
    return kind.bits // 8, b"\1"


_SIGNED = {"float16", "bfloat16", "float32", "float64"}
