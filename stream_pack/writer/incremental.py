"""Writing a pack from chunks, for tensors that are never whole in memory."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stream_pack.errors import SourceError, StateError, UnknownTensorError, UnsupportedTensorError
from stream_pack.format import dtypes
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.head import encode_head
from stream_pack.format.header import To
from stream_pack.format.index import NO_BUFFER
from stream_pack.format.layout import plan
from stream_pack.text import listed, quoted
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.pack import PackWriter
from stream_pack.writer.sink import BinaryWriter, open_sink

__all__ = ["BytesLike", "Spec", "Specs", "Writer", "chunks_of", "specified"]

BytesLike: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class Spec:
    """The dtype and shape of a tensor whose bytes are written later.

    ``dtype`` is a name such as ``"bfloat16"`` or ``"int4"``, or a torch dtype or NumPy dtype.  ``shape`` counts
    elements; the last dim of a four-bit type is even, and the first element of each byte is in its low bits.
    """

    dtype: object
    shape: Sequence[int]


Specs: TypeAlias = "Mapping[str, Spec | tuple[object, Sequence[int]]]"
"""The spec of every tensor by name, in the order of the pack."""


class Writer:
    """Writes a pack tensor by tensor.

    ``specs`` names every tensor, in the order of the pack.  Call :meth:`write` once for each tensor that has bytes: in
    any order if the target is a path, in the order of ``specs`` if it is a stream.  Leaving the ``with`` block
    completes the pack, or abandons it if there is an exception; a file is replaced only when the pack is complete.  The
    options are those of :func:`stream_pack.convert`.

    Copies: none of the chunks given.
    Raises: OptionError; SourceError, LimitError for bad specs; OSError.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | int | BinaryWriter,
        specs: Specs,
        *,
        to: To = "mps",
        metadata: Mapping[str, str] | None = None,
        alignment: Alignment = DEFAULT_ALIGNMENT,
        block_nbytes: int = BLOCK_NBYTES,
    ) -> None:
        options = ConvertOptions(
            to=to, metadata=metadata, alignment=alignment, block_nbytes=block_nbytes
        )
        catalog = specified(specs, metadata)
        self._buffers = {
            name: number for number, name in enumerate(catalog.names) if catalog.nbytes[number]
        }
        self._empty = set(catalog.names) - set(self._buffers)
        self._sink = open_sink(target)
        try:
            layout = plan(catalog, options.policy)
            self._pack = PackWriter(layout, encode_head(layout, options.front), self._sink)
            self._pack.start(reserve=True)
        except BaseException:
            self._sink.abort()
            raise
        tensor_buffers = self._pack.layout.index.tensor_buffers
        for name, tensor in self._buffers.items():
            assert tensor_buffers[tensor] != NO_BUFFER
            self._buffers[name] = int(tensor_buffers[tensor])
        self._left = dict(self._buffers)  # in the order of specs and of the buffers
        self._closed = False
        self._usable = True

    def write(self, name: str, chunks: BytesLike | Iterable[BytesLike]) -> None:
        """Write all bytes of one tensor, little-endian and row-major: one bytes-like object or an iterable of them.

        A chunk's memory may be reused as soon as the next chunk is requested, or this returns.
        Raises: UnknownTensorError; StateError for a tensor that was written before, or is out of order in a stream;
        SourceError for too few or too many bytes; any error of ``chunks``.  After an error the pack can only be
        abandoned.
        """
        if self._closed:
            raise StateError("this Writer is closed")
        self._require_usable()
        buffer = self._take(name)
        self._usable = False
        self._write(name, buffer, chunks)
        self._usable = True

    def _require_usable(self) -> None:
        if not self._usable:
            raise StateError("an earlier write failed: this pack can only be abandoned")

    def _take(self, name: str) -> int | None:
        """The buffer of the tensor, if it may be written now; None if it has no bytes."""
        if name in self._empty:
            return None
        if name not in self._buffers:
            raise UnknownTensorError(
                f"no tensor {quoted(name)} in the specs of this Writer", tensor=name
            )
        if name not in self._left:
            raise StateError(f"tensor {quoted(name)} was written before")
        turn = next(iter(self._left))
        if self._sink.in_order and name != turn:
            raise StateError(
                f"tensor {quoted(name)} is out of order: a stream takes {quoted(turn)} next"
            )
        return self._left.pop(name)

    def _write(
        self, name: str, buffer: int | None, chunks: BytesLike | Iterable[BytesLike]
    ) -> None:
        index = self._pack.layout.index
        expected = 0 if buffer is None else int(index.buffer_nbytes[buffer])
        given = 0
        for view in chunks_of(chunks):
            given += len(view)
            if given > expected:
                break
            if buffer is not None and len(view):
                self._pack.add(buffer, view)
        if given != expected:
            more = "more than " if given > expected else ""
            raise SourceError(
                f"tensor {quoted(name)} has {expected} bytes, but the chunks have {more}{min(given, expected)}"
            )

    def close(self) -> None:
        """Complete the pack.

        Raises: StateError if tensors are missing, naming them, or if a write failed; the pack is then abandoned.
        OSError.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._require_usable()
            if self._left:
                raise StateError(f"not all tensors were written: {listed(self._left)} missing")
            self._pack.finish()
        finally:
            self._sink.abort()

    def abandon(self) -> None:
        """Give up: a target path is left unchanged."""
        self._closed = True
        self._sink.abort()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
        else:
            self.abandon()


def specified(specs: Specs, metadata: Mapping[str, str] | None) -> Catalog:
    """The catalog of specified tensors, each with a storage of its own, its number in ``specs``.

    Raises: UnsupportedTensorError, SourceError, LimitError.
    """
    builder = CatalogBuilder()
    for number, (name, given) in enumerate(specs.items()):
        spec = given if isinstance(given, Spec) else Spec(*given)
        dtype, shape = _resolve(name, spec)
        builder.add(name, dtype, shape, storage=number, start=0)
    return builder.build(storages_nbytes=0, metadata=metadata)


def chunks_of(given: BytesLike | Iterable[BytesLike]) -> Iterator[memoryview]:
    """One bytes-like object, or an iterable of them, as views of bytes.  Copies: none."""
    for chunk in [given] if isinstance(given, (bytes, bytearray, memoryview)) else given:
        yield memoryview(chunk).cast("B")


def _resolve(name: str, spec: Spec) -> tuple[int, list[int]]:
    """The number of the dtype, and the shape in its elements."""
    try:
        shape = [operator.index(dim) for dim in spec.shape]
    except TypeError:
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} has shape {spec.shape!r}: expected a sequence of whole numbers",
            tensor=name,
        ) from None
    text = str(spec.dtype).removeprefix("torch.")
    if isinstance(spec.dtype, type):  # np.float32, ml_dtypes.bfloat16
        text = spec.dtype.__name__
    if text in dtypes.BY_NAME:
        return dtypes.BY_NAME[text], shape
    if text in dtypes.BY_TORCH:  # float4_e2m1fn_x2: torch counts pairs
        if not shape:
            raise UnsupportedTensorError(
                f"tensor {quoted(name)}: {text} needs at least one dim", tensor=name
            )
        return dtypes.BY_TORCH[text], [*shape[:-1], 2 * shape[-1]]
    raise UnsupportedTensorError(
        f"tensor {quoted(name)} has dtype {spec.dtype!r}: expected one of {', '.join(dtypes.BY_NAME)}",
        tensor=name,
    )
