"""NumPy arrays in a pickle: a contiguous one of a plain dtype is its bytes, dtype and shape, so no code is needed.

Its bytes are in the pickle itself, and so within the limits of one.  Arrays of objects, text, dates and structures, and
subclasses, stay what they are to the pickle machine: objects that only code could rebuild.

Source: ``array_reduce`` and ``array_setstate`` in numpy/_core/src/multiarray/methods.c, ``_frombuffer`` in
numpy/_core/numeric.py (protocol 5), ``arraydescr_reduce`` in descriptor.c, of NumPy 1.x and 2.x.
"""

from __future__ import annotations

from math import prod
from typing import TypeGuard

import numpy as np

from stream_pack.format.dtypes import DTYPES
from stream_pack.format.limits import MAX_RANK
from stream_pack.pickles.globals import MAX_NUMBER, Storage, Tensor, Unpackable
from stream_pack.pickles.unpickler import Opaque

__all__ = ["ARRAYS", "MACHINERY", "array_of"]

_STATED = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
_BUFFERED = {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}

ARRAYS = _STATED | _BUFFERED
"""What makes an array."""

MACHINERY = ARRAYS | {"numpy.ndarray", "numpy.dtype"}
"""All that the pickle of an array names."""

_BY_CODE = {np.dtype(dtype.numpy).str[1:]: number for number, dtype in enumerate(DTYPES) if dtype.numpy is not None}
"""Numbers of dtypes by NumPy's code for kind and length: ``"f4"``."""


def array_of(item: Opaque) -> Tensor | Unpackable | None:
    """The array that ``item`` of one of :data:`ARRAYS` is; None if it needs code.  Made once, and kept in ``item``."""
    if len(item.parts) == 1 and isinstance(item.parts[0], Tensor | Unpackable):
        return item.parts[0]
    found = _stated(item.parts) if item.name in _STATED else _buffered(item.parts)
    if found is not None:
        item.parts = [found]
    return found


def _stated(parts: list[object]) -> Tensor | Unpackable | None:
    """An array of :func:`_reconstruct`: the arguments, and the state that is set on it."""
    if len(parts) != 2:
        return None
    arguments, state = parts
    if type(arguments) is not tuple or not arguments or not _is(arguments[0], "numpy.ndarray"):
        return None
    if type(state) is not tuple or len(state) != 5:
        return None
    _version, shape, dtype, fortran, data = state
    return _array(shape, dtype, data, fortran=bool(fortran) if type(fortran) in (bool, int) else None)


def _buffered(parts: list[object]) -> Tensor | Unpackable | None:
    """An array of :func:`_frombuffer`: buffer, dtype, shape and order."""
    if len(parts) != 1 or type(parts[0]) is not tuple or len(parts[0]) != 4:
        return None
    data, dtype, shape, order = parts[0]
    return _array(shape, dtype, data, fortran={"C": False, "F": True}.get(order) if type(order) is str else None)


def _array(shape: object, dtype: object, data: object, *, fortran: bool | None) -> Tensor | Unpackable | None:
    if fortran is None or type(shape) is not tuple or len(shape) > MAX_RANK:
        return None
    if not all(type(dim) is int and 0 <= dim <= MAX_NUMBER for dim in shape):
        return None
    code, order = _code(dtype)
    number = _BY_CODE.get(code)
    if number is None:
        return None
    if order == ">" and code[1:] != "1":
        return Unpackable("a NumPy array whose bytes are big-endian", "save it as x.astype(x.dtype.newbyteorder('<'))")
    stored = _bytes(data)
    if stored is None:
        return None
    nbytes = prod(shape) * np.dtype(code).itemsize
    if len(stored) != nbytes:
        return Unpackable(f"a NumPy array of {nbytes} bytes, of which {len(stored)} are there", "save it again")
    elements = len(stored) // np.dtype(code).itemsize
    strides = _strides(shape[::-1])[::-1] if fortran else _strides(shape)
    storage = Storage("", len(stored), elements, stored)
    return Tensor(storage, number, 0, shape, strides, conj=False, neg=False)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of elements in row-major order."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _code(dtype: object) -> tuple[str, str]:
    """NumPy's code for kind and length, and the byte order; two empty texts for a dtype that is not plain."""
    if _is(dtype, "numpy.dtype") and len(dtype.parts) == 2:
        arguments, state = dtype.parts
        if type(arguments) is tuple and arguments and type(state) is tuple and len(state) >= 5:
            code, order = arguments[0], state[1]
            # Subarrays, names and fields are those of structures.
            if type(code) is str and type(order) is str and state[2:5] == (None, None, None):
                return code, order
    return "", ""


def _bytes(data: object) -> bytes | None:
    """The bytes of an array, however a protocol writes bytes."""
    if type(data) is bytes:
        return data
    if type(data) is str:  # Python 2's, which were UTF-8 by chance
        return data.encode("utf-8", "surrogatepass")
    if _is(data, "builtins.bytes") and not data.parts:
        return b""
    if _is(data, "_codecs.encode") and len(data.parts) == 2:
        text, encoding = data.parts
        if type(text) is str and encoding == "latin1":
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                return None
    return None


def _is(value: object, name: str) -> TypeGuard[Opaque]:
    return type(value) is Opaque and value.name == name
