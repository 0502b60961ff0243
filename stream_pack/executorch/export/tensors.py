"""From a torch tensor to disk.  Imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from stream_pack.executorch.export.held import CHUNK_NBYTES, Held, Holder
from stream_pack.pipeline.gather import row_windows
from stream_pack.sources.memory.torch_tensors import address_of, describe_tensor
from stream_pack.text import quoted

__all__ = ["SERIAL_ELEMENTS", "digest_of", "hold_tensor", "readable", "readable_storage"]

SERIAL_ELEMENTS = 1 << 14
"""torch works on this many in the calling thread, and divides 32,768 or more among several: for a chunk, waiting for
these takes longer than the work (14 times on two busy cores)."""


def hold_tensor(
    holder: Holder, tensor: torch.Tensor, *, name: str, dtype: torch.dtype | None = None, sha256: bool = False
) -> Held:
    """Write the elements of ``tensor`` in row-major order, cast by torch to ``dtype`` if one is given.

    ``sha256``: as in :meth:`Holder.hold`.

    Copies: none of a contiguous tensor in host memory that is not cast; else a chunk at a time.
    Raises: UnsupportedTensorError for a tensor without plain bytes; OSError.
    """
    live = describe_tensor(name, tensor)
    dtype = tensor.dtype if dtype is None else dtype
    nbytes = tensor.numel() * dtype.itemsize
    if live.derivation is None and dtype == tensor.dtype:
        chunks = live.read(0, nbytes, chunk_nbytes=holder.chunk_nbytes)
    else:
        chunks = _copied(tensor.detach(), dtype, holder.chunk_nbytes)
    return holder.hold(chunks, nbytes, label=f"the constant {quoted(name)}", sha256=sha256)


def _copied(tensor: torch.Tensor, dtype: torch.dtype, chunk_nbytes: int) -> Iterator[memoryview]:
    """The elements in row-major order, cast to ``dtype``, in chunks of about ``chunk_nbytes``."""
    capacity = max(SERIAL_ELEMENTS, chunk_nbytes // dtype.itemsize)
    chunk, filled = torch.empty(capacity, dtype=dtype), 0
    for index in row_windows(tensor.shape, 1, SERIAL_ELEMENTS):
        window = tensor[index]
        if filled + window.numel() > capacity:
            yield _memory(chunk[:filled])
            filled = 0
        chunk[filled : filled + window.numel()].view(window.shape).copy_(window)
        filled += window.numel()
    yield _memory(chunk[:filled])


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same elements, for code that asks its storage for a pointer, and only reads there.

    Its storage is only the memory of a contiguous ``tensor``, and of a lazy clone that memory, too: another pointer
    would be that of a copy.  Copies: none.  Lifetime: keeps ``tensor``.
    """
    memory = torch.from_numpy(np.asarray(_Bytes(tensor)))
    return memory.view(tensor.dtype).reshape(tensor.shape)


def readable_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The storage of :func:`readable`, for all of ``storage``, which is in host memory and not empty."""
    return readable(torch.empty(0, dtype=torch.uint8).set_(storage)).untyped_storage()


class _Bytes:
    """The memory of a contiguous tensor, for NumPy; said to be writable, because torch warns of what is not."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        place = address_of(tensor), False
        self.__array_interface__ = {"version": 3, "shape": (tensor.nbytes,), "typestr": "|u1", "data": place}


def digest_of(tensor: torch.Tensor) -> bytes:
    """The XXH3-128 of the elements in row-major order.  Raises: as :func:`hold_tensor`."""
    digest = xxhash.xxh3_128()
    live = describe_tensor("a constant", tensor)
    for chunk in live.read(0, tensor.numel() * tensor.itemsize, chunk_nbytes=CHUNK_NBYTES):
        digest.update(chunk)
    return digest.digest()
