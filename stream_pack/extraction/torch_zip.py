"""A torch.save archive, planned: a pickled dict of names and tensors, and a record for each storage.

Tensors that share bytes share a storage.  ``torch.load`` reads it with ``weights_only=True``, and maps it with
``mmap=True``.

Source: torch/serialization.py, ``_save``; torch/_tensor.py, ``_reduce_ex_internal``, for how a tensor is pickled; the
order of the records, their alignment and the small ones are those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from stream_pack.extraction.file_plan import FilePlan, check_dtypes
from stream_pack.extraction.zip_archive import ZipPlan
from stream_pack.format.align import Alignment
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import DTYPES, Dtype
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.format.layout import Policy, plan
from stream_pack.pickles.globals import STORAGE_CLASSES
from stream_pack.pipeline.source import Requests

__all__ = ["plan_torch"]

PREFIX = "archive"
"""The folder in an archive that torch writes to a stream; one to a file has the file's name, which readers ignore."""

ALIGNMENT = 64
"""torch's own: what its kernels want of memory that is mapped."""

SHARING = Alignment(small=16, large=16)
"""A view shares its storage if it begins at a multiple of this in it: every dtype's elements then do, too."""

BATCH = 1000
"""Items that a pickle adds to a dict at once, as Python's own pickler does."""

_UNTYPED = "torch.storage UntypedStorage"


def plan_torch(catalog: Catalog, *, allow_blowup: bool) -> FilePlan:
    """An archive of all tensors, by name, in the order of ``catalog``.

    Raises: UnsupportedTensorError for a dtype that torch does not have; LimitError for a blow-up.
    """
    known = [dtype.torch is not None for dtype in DTYPES]
    check_dtypes(catalog, known, target="torch", advice="extract it --to raw")
    layout = plan(catalog, Policy(alignment=SHARING, allow_blowup=allow_blowup))
    index = layout.index
    storages = _storages_of(catalog, index)
    archive = ZipPlan(alignment=ALIGNMENT)
    archive.add(f"{PREFIX}/data.pkl", b"".join(_pickled(catalog, index, storages)))
    archive.add(f"{PREFIX}/.format_version", b"1")
    archive.add(f"{PREFIX}/.storage_alignment", str(ALIGNMENT).encode())
    archive.add(f"{PREFIX}/byteorder", b"little")
    sizes = index.buffer_nbytes.tolist()
    empty = int(np.count_nonzero(index.tensor_buffers == NO_BUFFER))
    for key, nbytes in enumerate(chain(sizes, [0] * empty)):
        archive.add(f"{PREFIX}/data/{key}", data_nbytes=nbytes)
    archive.add(f"{PREFIX}/version", b"3\n")
    requests = Requests(layout.buffer_storages, layout.buffer_starts, index.buffer_nbytes)
    buffers, firsts = np.unique(index.tensor_buffers, return_index=True)
    return archive.file_plan(requests, firsts[buffers != NO_BUFFER])


def _storages_of(catalog: Catalog, index: Index) -> list[int | None]:
    """The dtype of each buffer's storage, a number in ``DTYPES``; None for bytes, where several dtypes share it."""
    dtypes: list[int | None] = [-1] * len(index.buffer_nbytes)
    for buffer, dtype in zip(index.tensor_buffers.tolist(), catalog.dtypes.tolist()):
        if buffer != NO_BUFFER:
            dtypes[buffer] = dtype if dtypes[buffer] in (-1, dtype) else None
    return dtypes


def _pickled(catalog: Catalog, index: Index, storages: Sequence[int | None]) -> Iterator[bytes]:
    """The dict, as a pickle of protocol 2."""
    remembered = _Memo()
    yield b"\x80\x02}"
    empty_key = len(storages)
    buffers, starts = index.tensor_buffers.tolist(), index.tensor_starts.tolist()
    for row, name in enumerate(catalog.names):
        if row % BATCH == 0:
            yield b"u(" if row else b"("
        dtype = DTYPES[catalog.dtypes[row]]
        shape = list(catalog.shape(row))
        if dtype.torch_pairs:
            shape[-1] //= 2
        if buffers[row] == NO_BUFFER:
            key, nbytes, start, held = empty_key, 0, 0, catalog.dtypes[row]
            empty_key += 1
        else:
            key, nbytes, start = buffers[row], int(index.buffer_nbytes[buffers[row]]), starts[row]
            held = storages[key]
        yield _text(name)
        yield from _tensor(dtype, shape, key, nbytes, start, typed=held is not None, memo=remembered)
    yield b"u." if len(catalog) else b"."


def _tensor(
    dtype: Dtype, shape: Sequence[int], key: int, nbytes: int, start: int, *, typed: bool, memo: _Memo
) -> Iterator[bytes]:
    """A call of what makes a tensor: of a storage of its dtype, or of one of bytes."""
    itemsize = 1 if dtype.torch_pairs else dtype.bits // 8
    storage_class = STORAGE_CLASSES.get(dtype.name) if typed else None
    yield memo.global_("torch._utils _rebuild_tensor_v2" if storage_class else "torch._utils _rebuild_tensor_v3")
    yield b"(("
    yield memo.get("storage", _text)
    yield memo.global_(storage_class or _UNTYPED)
    yield _text(str(key))
    yield memo.get("cpu", _text)
    yield _integer(nbytes // itemsize if storage_class else nbytes)
    yield b"tQ"
    yield _integer(start // itemsize)
    yield _tuple(shape)
    yield _tuple(_row_major(shape))
    yield b"\x89"  # requires no gradient
    yield memo.global_("collections OrderedDict")  # no hooks
    yield b")R"
    if not storage_class:
        yield memo.global_(f"torch {dtype.torch}")
    yield b"tR"


class _Memo:
    """What a pickle says once and then refers to."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def get(self, what: str, encode: Callable[[str], bytes]) -> bytes:
        number = self._numbers.get(what)
        if number is not None:
            return b"h" + bytes([number])
        number = self._numbers[what] = len(self._numbers)
        return encode(what) + b"q" + bytes([number])  # far below 256: classes and two words

    def global_(self, name: str) -> bytes:
        """A class or function; ``name``: its module and its own, with a space between."""
        return self.get(name, lambda name: b"c" + name.replace(" ", "\n").encode() + b"\n")


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _integer(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes([number])
    if number < 1 << 31:
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)


def _tuple(numbers: Sequence[int]) -> bytes:
    items = b"".join(map(_integer, numbers))
    if len(numbers) <= 3:
        return items + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)]
    return b"(" + items + b"t"


def _row_major(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return strides[::-1]
