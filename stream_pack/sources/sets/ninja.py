"""Arrays kept by mmap-ninja: a folder is one NumPy array, or a ragged list of arrays.

A NumPy folder is one tensor, ``data``; sample ``k`` of a ragged folder is the tensor ``data.k`` (``data.0``,
``data.1``, ...).

The mmap_ninja package opens the folders, but it believes what they say (and would read on where other data begins), so
every length is proved here first.  Source: mmap_ninja 0.9, numpy.py and ragged.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import mmap_ninja
import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.format.catalog import tensor_nbytes
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.limits import MAX_NBYTES, MAX_RANK
from stream_pack.pipeline.file_state import FilesRead, FileState
from stream_pack.pipeline.places import NOWHERE, Places, SourceFile
from stream_pack.pipeline.source import Requests
from stream_pack.sources.memory.source import LiveSource
from stream_pack.sources.sets.composite import opened
from stream_pack.text import quoted

__all__ = ["TYPE_FILE", "NinjaSource"]

TYPE_FILE = "type.ninja"
NAME = "data"
_COLUMNS = ("starts", "ends", "flattened_shapes")
EMPTY_NBYTES = 1
"""What NumPy writes for a mapped array without elements: no file of no bytes can be mapped."""
_FLAT = b"\1\0\0\0"


class NinjaSource(LiveSource):
    """The array or the samples of an mmap-ninja folder, read where they are mapped.

    A sample that is a single number has the shape ``[]``.  An array in Fortran order is gathered, a window at a time.

    Lifetime: as long as the source or a chunk of it lives, the files must not become shorter.
    Raises: UnsupportedCheckpointError for a folder of strings, or one whose files contradict each other;
    TruncatedSourceError for a data file that is too short; OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._files = files = FilesRead()
        kind = _text(folder, files, TYPE_FILE)
        data = _array(folder, files) if kind in ("numpy", "ragged") else np.empty(0)
        self._data = SourceFile(str(folder / "data.ninja"), None)
        self._data_address: int = data.__array_interface__["data"][0]
        if kind == "numpy":
            arrays = {NAME: data}
        elif kind == "ragged":
            samples = _samples(folder, files, data)
            arrays = {f"{NAME}.{number}": sample for number, sample in enumerate(samples)}
        else:
            raise UnsupportedCheckpointError(
                f"{quoted(str(folder))} is an mmap-ninja folder of type {quoted(kind)}, which does not hold arrays: "
                "expected numpy or ragged"
            )
        super().__init__(arrays, kind=f"mmap-ninja {kind}")

    @property
    def verification(self) -> str:
        return "the source carries no checksum"

    def places(self, requests: Requests) -> Places:
        offsets = [
            NOWHERE if tensor.derivation is not None else tensor.span[0] - self._data_address + begin
            for tensor, begin in self._found(requests)
        ]
        return Places.within(self._data, np.array(offsets, np.int64))

    def check_unchanged(self) -> None:
        self._files.check_unchanged()


def _samples(folder: Path, files: FilesRead, data: NDArray[np.generic]) -> Iterator[NDArray[np.generic]]:
    """Every sample as a view of ``data``, the one array that holds them all."""
    starts, ends, numbers = (_numbers(folder / column, files) for column in _COLUMNS)
    if data.ndim != 1 or not len(starts) == len(ends) == len(numbers):
        raise _contradiction(folder, "its data is not one-dimensional, or its columns differ in length")
    if np.any((starts < 0) | (ends < starts) | (ends > len(data)) | (numbers != ends - starts)):
        raise _contradiction(folder, "a sample is outside its data, or has another length than stated")
    shapes = _shapes(folder, files, len(starts))
    for number, (start, end, shape) in enumerate(zip(starts.tolist(), ends.tolist(), shapes)):
        if shape == (0,) and end - start == 1:  # how mmap_ninja writes a single number
            shape = ()
        if prod(shape) != end - start or len(shape) > MAX_RANK or any(dim < 0 for dim in shape):
            raise _contradiction(
                folder, f"sample {number} of {end - start} elements has the shape {list(shape)[:MAX_RANK]}"
            )
        yield data[start:end].reshape(shape)


def _shapes(folder: Path, files: FilesRead, samples: int) -> Iterator[tuple[int, ...]]:
    """The shape of every sample: a column of lengths if all are one-dimensional, else a ragged folder itself."""
    shapes = folder / "shapes"
    if _bytes(folder, files, "shapes_are_flat.ninja", 4) == _FLAT:
        column = _array(shapes, files)
        if column.dtype != np.int64 or column.shape != (samples, 1):
            raise _contradiction(folder, "its shapes are not a column of lengths")
        return ((length,) for length in column[:, 0].tolist())
    if _bytes(shapes, files, "shapes_are_flat.ninja", 4) != _FLAT:
        raise _contradiction(folder, "its shapes are nested too deeply")
    dims = _numbers(shapes, files)
    starts, ends = _numbers(shapes / "starts", files), _numbers(shapes / "ends", files)
    if not len(starts) == len(ends) == samples:
        raise _contradiction(folder, f"it has shapes for {len(starts)} of {samples} samples")
    if np.any((starts < 0) | (ends < starts) | (ends > len(dims))):
        raise _contradiction(folder, "a shape is outside the list of dims")
    bounds = zip(starts.tolist(), ends.tolist())
    return (tuple(dims[start : min(end, start + MAX_RANK + 1)].tolist()) for start, end in bounds)


def _numbers(folder: Path, files: FilesRead) -> NDArray[np.int64]:
    array = _array(folder, files)
    if array.dtype != np.int64 or array.ndim != 1:
        raise _contradiction(folder, f"expected a list of int64, found {array.dtype} of rank {array.ndim}")
    return array.view(np.int64)


def _array(folder: Path, files: FilesRead) -> NDArray[np.generic]:
    """The array of ``folder``, mapped, after its data file was found to have just its length."""
    name, order = _text(folder, files, "dtype.ninja"), _text(folder, files, "order.ninja")
    number = BY_NAME.get(name)
    if number is None or DTYPES[number].numpy is None:
        raise _contradiction(folder, f"its dtype is {quoted(name)}, which NumPy and a pack do not both have")
    if order not in ("C", "F"):
        raise _contradiction(folder, f"its order is {quoted(order)}, expected C or F")
    packed = _bytes(folder, files, "shape.ninja", 8 * MAX_RANK)
    shape = tuple(int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8))
    if len(packed) % 8 or any(dim > MAX_NBYTES for dim in shape):
        raise _contradiction(folder, "its shape.ninja is not a list of lengths")
    expected = tensor_nbytes(NAME, number, shape)
    status = os.stat(folder / "data.ninja")
    files.see(folder / "data.ninja", FileState.of(status))
    nbytes = status.st_size
    if nbytes < expected:
        raise TruncatedSourceError(
            f"{quoted(str(folder / 'data.ninja'))} has {nbytes} bytes, its shape {list(shape)} of {name} takes "
            f"{expected}: it was cut short",
            position=nbytes,
            missing_nbytes=expected - nbytes,
        )
    if nbytes > max(expected, EMPTY_NBYTES):
        raise _contradiction(
            folder,
            f"data.ninja has {nbytes} bytes, its shape {list(shape)} of {name} takes {expected}: "
            "an extend was interrupted?",
        )
    if expected == 0:
        return np.empty(shape, name)
    array: NDArray[np.generic] = mmap_ninja.np_open_existing(folder, mode="r")
    return array


def _text(folder: Path, files: FilesRead, file: str) -> str:
    return _bytes(folder, files, file, 64).decode("ascii", "backslashreplace")


def _bytes(folder: Path, files: FilesRead, file: str, limit: int) -> bytes:
    """A small file; reading stops at ``limit`` bytes."""
    try:
        with opened(folder / file, files) as small:
            return small.read(limit)
    except FileNotFoundError:
        raise _contradiction(folder, f"it has no {file}") from None


def _contradiction(folder: Path, why: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(f"the mmap-ninja folder {quoted(str(folder))} is incomplete or damaged: {why}")
