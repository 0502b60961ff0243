"""Views: tensors in a mapped file, and contiguous slices of them.

A :class:`View` is a description until one of its methods is called, which returns the bytes in place.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import OptionError
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.reader.lending import Lender
from stream_pack.reader.tensors import empty_tensor, tensor_of, torch_form
from stream_pack.text import counted, quoted

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TensorSlice", "View", "safetensors_name", "view_of"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class View:
    """A tensor of an open pack, or a contiguous slice of one.

    ``dtype`` is the pack's name for it, ``shape`` counts elements of that dtype.  ``dim_order`` lists the dims as they
    follow in memory, outermost first, for a tensor of a ``.ptd`` that is not row-major (channels last, say); None for
    all others.  Arrays and tensors of it have its shape, and the strides that go with the order.

    Units: bytes.  ``offset`` counts from the region's first byte, ``file_offset`` from the pack's (which is at
    ``Pack.offset`` of a file around it); for a tensor of 0 bytes both are those of an empty range.
    Copies: none, except for :meth:`materialize`.
    Lifetime: arrays, tensors and memoryviews keep the memory mapped, also after the pack's ``with`` block.
    Pickling keeps path and place, no bytes; unpickling (in a worker of a DataLoader, say) opens the same file again, or
    raises StateError if it was replaced.
    Raises (every method): StateError once the pack is closed; TruncatedError when the file has become shorter since it
    was opened; ChecksumError for damage and ReadError for a bad sector, when opened with ``verify="lazy"``; FormatError
    for a constant of a raw payload that contradicts itself.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    file_offset: int
    dim_order: tuple[int, ...] | None = None
    # The source of the bytes: the pack, the tensor's number, and the first byte in it.
    _lender: Lender = field(init=False)
    _tensor: int = field(init=False)
    _start: int = field(init=False)

    def __reduce__(self) -> tuple[object, ...]:
        # Path and place, no bytes: whoever unpickles opens the file again.
        values = (getattr(self, part.name) for part in fields(self) if part.init)
        return _restored, (self._lender, self._tensor, self._start, *values)

    def __repr__(self) -> str:
        nbytes = counted(self.nbytes, "byte")
        return f"<View {quoted(self.name)} {self.dtype} {list(self.shape)}, {nbytes} at {self.file_offset}>"

    def raw(self) -> memoryview:
        """The bytes, read-only: elements in row-major order, or as ``dim_order`` says; little-endian."""
        return memoryview(self._lender.array(self._tensor, self._start, self.nbytes, writable=False))

    def numpy(self, *, writable: bool = False) -> NDArray[Any]:
        """The array, read-only; with ``writable``, in copy-on-write memory: the file never changes.

        bfloat16 and float8 have the types of the package ml_dtypes.
        Raises: TypeError for a dtype that neither NumPy nor ml_dtypes has.
        """
        self._lender.fault(self._tensor, self.name)
        dtype = _numpy_dtype(self.dtype)
        array = self._lender.array(self._tensor, self._start, self.nbytes, writable=writable)
        array = array.view(dtype)
        if self.dim_order is None:
            return array.reshape(self.shape)
        return array.reshape([self.shape[dim] for dim in self.dim_order]).transpose(np.argsort(self.dim_order))

    def __array__(self, dtype: np.dtype[Any] | None = None, *, copy: bool | None = None) -> NDArray[Any]:
        """For ``np.asarray(view)``: :meth:`numpy`."""
        array = self.numpy()
        if copy is False and dtype not in (None, array.dtype):
            raise OptionError(f"tensor {quoted(self.name)} cannot become {dtype} without a copy")
        return np.array(array, dtype) if copy else array.astype(dtype or array.dtype, copy=False)

    def __getitem__(self, key: object) -> View:
        """A part of it: the same as ``pack.get_slice(name)[key]``."""
        return TensorSlice(self)[key]

    def torch(self) -> Tensor:
        """The tensor, on the CPU, in copy-on-write memory: the file never changes.

        Tensors that share bytes in the pack share a torch storage too.  torch needs elements at multiples of their
        size: others (a constant of a raw payload, a pack at an odd offset of another file) are copied.
        Raises: TypeError for a dtype that torch does not have; MissingPackageError without torch.
        """
        self._lender.fault(self._tensor, self.name)
        dtype, shape = torch_form(self.dtype, self.shape)
        if self.nbytes == 0:
            self._lender.contents  # noqa: B018 - raises when closed
            return empty_tensor(dtype, shape)
        storage, start = self._lender.storage(self._tensor, self._start, self.nbytes)
        if self.dim_order is None:
            return tensor_of(storage, start, self.nbytes, dtype, shape)
        stored = tuple(shape[dim] for dim in self.dim_order)
        return tensor_of(storage, start, self.nbytes, dtype, stored).permute(*np.argsort(self.dim_order).tolist())

    def materialize(self) -> Tensor:
        """A copy of the tensor, independent of the file."""
        return self.torch().clone()


def view_of(lender: Lender, tensor: int, name: str) -> View:
    """The view of a whole tensor.  Raises: StateError once the pack is closed."""
    contents = lender.contents
    index = contents.index
    offset = index.offset(tensor)
    view = View(
        name=name,
        dtype=index.dtype_name(tensor),
        shape=index.shape(tensor),
        nbytes=int(index.tensor_nbytes[tensor]),
        offset=offset,
        file_offset=contents.region_file_offset + offset,
        dim_order=contents.dim_orders.get(tensor),
    )
    return _lent(view, lender, tensor, 0)


def _lent(view: View, lender: Lender, tensor: int, start: int) -> View:
    """``view``, with the source of its bytes, which its signature does not show."""
    put = object.__setattr__  # the dataclass is frozen
    put(view, "_lender", lender)
    put(view, "_tensor", tensor)
    put(view, "_start", start)
    return view


def _restored(lender: Lender, tensor: int, start: int, *values: Any) -> View:
    return _lent(View(*values), lender, tensor, start)


class TensorSlice:
    """A tensor to be sliced: ``pack.get_slice("wq")[0:128]`` is a :class:`View` of the first 128 rows.

    Only contiguous parts can be sliced in place: indices first, then one range, then whole dims (of a tensor with a
    ``dim_order``: in that order).
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def __repr__(self) -> str:
        return f"<TensorSlice of {self._view!r}>"

    def get_shape(self) -> list[int]:
        """The tensor's dims, outermost first."""
        return list(self._view.shape)

    def get_dtype(self) -> str:
        """The dtype's name in safetensors (``"F32"``), or in the pack where safetensors has none."""
        return safetensors_name(self._view.dtype)

    def __getitem__(self, key: object) -> View:
        """The view of a part.

        ``key``: integers (also NumPy's), slices and an Ellipsis.
        Raises: IndexError for a part that is out of range or not contiguous, and for any other key; slice ``.numpy()``
        or ``.torch()`` instead.
        """
        view = self._view
        view._lender.fault(view._tensor, view.name)
        first, shape, order = _contiguous(view, key)
        index = view._lender.contents.index
        bits = int(index.dtype_bits[index.tensor_dtypes[view._tensor]])
        count = math.prod(shape)
        if first * bits % 8 or count * bits % 8:
            raise IndexError(
                f"tensor {quoted(view.name)}: elements {first} to {first + count} of {bits} bits are not whole bytes"
            )
        begin, nbytes = first * bits // 8, count * bits // 8
        part = replace(
            view,
            shape=shape,
            nbytes=nbytes,
            offset=view.offset + begin,
            file_offset=view.file_offset + begin,
            dim_order=order,
        )
        return _lent(part, view._lender, view._tensor, view._start + begin)


def safetensors_name(dtype: str) -> str:
    """The name in safetensors for a dtype of the index, or the index's own where safetensors has none."""
    known = DTYPES[BY_NAME[dtype]].safetensors if dtype in BY_NAME else None
    return known or dtype


def _contiguous(view: View, key: object) -> tuple[int, tuple[int, ...], tuple[int, ...] | None]:
    """The first element in memory, the shape and the dim order of ``view[key]``."""
    name, shape = view.name, view.shape
    keys = _keys(name, shape, key)
    first = 0
    length = 1
    dims: dict[int, int] = {}
    for axis in view.dim_order or range(len(shape)):
        dim, part = shape[axis], keys[axis]
        if isinstance(part, slice):
            begin, end, step = _range(name, part, dim)
            dims[axis] = max(0, end - begin)
            whole = step == 1 and dims[axis] == dim
        else:
            number = _number(name, part)
            if not -dim <= number < dim:
                raise IndexError(
                    f"tensor {quoted(name)}: index {number} is out of range for dim {axis}, which has {dim}"
                )
            begin, step, whole = number % dim, 1, dim == 1
        if step != 1 or (not whole and length != 1):
            raise IndexError(f"tensor {quoted(name)}: the part is not contiguous; slice .numpy() or .torch() instead")
        first = first * dim + begin
        length *= dims.get(axis, 1)
    kept = sorted(dims)
    order = tuple(map(kept.index, dims))
    return first, tuple(dims[axis] for axis in kept), None if list(order) == sorted(order) else order


def _keys(name: str, shape: tuple[int, ...], key: object) -> list[object]:
    """A key for each dim."""
    keys = list(key) if isinstance(key, tuple) else [key]
    # Not by ==: with an array the result is an array.
    ellipses = [at for at, part in enumerate(keys) if part is Ellipsis]
    if len(ellipses) == 1:
        (at,) = ellipses
        keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    if len(keys) > len(shape):
        raise IndexError(f"too many indices for tensor {quoted(name)}: {len(keys)} for {counted(len(shape), 'dim')}")
    return [*keys, *[slice(None)] * (len(shape) - len(keys))]


def _range(name: str, part: slice, dim: int) -> tuple[int, int, int]:
    try:
        return part.indices(dim)
    except (TypeError, ValueError) as error:  # not integers, or a step of 0
        raise IndexError(f"tensor {quoted(name)}: {quoted(part)}: {error}") from None


def _number(name: str, part: object) -> int:
    # An array of one element is an index too, but means a dim.
    # NumPy before 2.0 takes its own bools for numbers, with a warning.
    if not isinstance(part, bool | np.bool_) and not getattr(part, "ndim", 0):
        try:
            return operator.index(part)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise IndexError(f"tensor {quoted(name)}: expected integers and slices, got {quoted(part)}")


def _numpy_dtype(name: str) -> np.dtype[Any]:
    known = DTYPES[BY_NAME[name]] if name in BY_NAME else None
    if known is not None and known.numpy is not None:
        return np.dtype(known.numpy)
    if known is None or known.ml_dtypes is None:
        also = " or .torch()" if known is not None and known.torch is not None else ""
        raise TypeError(f"NumPy has no dtype {quoted(name)}: use .raw(){also}")
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, known.ml_dtypes))
    return dtype
