"""Tensors as Metal binds them: a buffer, and an offset in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stream_pack.errors import MetalBufferError, UnsupportedDtype
from stream_pack.metal.device import Buffer
from stream_pack.metal.rules import MPS_DATA_TYPES
from stream_pack.text import quoted

__all__ = ["MetalView", "no_buffer"]


def no_buffer(name: str, shape: tuple[int, ...]) -> MetalBufferError:
    """The error for a tensor of 0 bytes."""
    return MetalBufferError(
        f"tensor {quoted(name)} of shape {list(shape)} has no bytes, so no MTLBuffer: do not bind it", nbytes=0
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MetalView:
    """A tensor of a pack, as Metal binds it: ``setBuffer(view.buffer.pointer, view.offset, index)``.

    Units: bytes; ``offset`` counts from the first byte of :attr:`buffer`, as Metal requires.
    Copies: none.
    Lifetime: the view holds the buffer, the buffer holds the memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    _buffer: Buffer | None
    _own_buffer: Callable[[str], Buffer]

    def __repr__(self) -> str:
        place = f"{self.nbytes} bytes at {self.offset} of {self._buffer}"
        return f"<MetalView {quoted(self.name)} {self.dtype} {list(self.shape)}, {place}>"

    @property
    def buffer(self) -> Buffer:
        """The MTLBuffer that contains the tensor, with others.

        Raises: MetalBufferError for a tensor of 0 bytes, for which Metal has no buffer.
        """
        if self._buffer is None:
            raise no_buffer(self.name, self.shape)
        return self._buffer

    def own_buffer(self) -> Buffer:
        """See :meth:`Weights.own_buffer`."""
        return self._own_buffer(self.name)

    @property
    def mps_dtype(self) -> int:
        """The MPSDataType (bfloat16 needs macOS 14).  Raises: UnsupportedDtype where MPS has none."""
        if self.dtype not in MPS_DATA_TYPES:
            raise UnsupportedDtype(
                f"tensor {quoted(self.name)} has the dtype {quoted(self.dtype)}, which MPS lacks; cast it with --dtype "
                "when it is packed, or let your own kernel read the bytes from the buffer",
                tensor=self.name,
                dtype=self.dtype,
            )
        return MPS_DATA_TYPES[self.dtype]
