"""Writing a pack from chunks, for tensors that are never whole in memory."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from stream_pack.errors import OptionError, SourceError, StateError, UnknownTensorError, UnsupportedTensorError
from stream_pack.format import dtypes
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.head import encode_head
from stream_pack.format.header import To
from stream_pack.format.index import NO_BUFFER
from stream_pack.format.layout import plan
from stream_pack.text import listed, quoted, shown
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.pack import PackWriter
from stream_pack.writer.sink import BinaryWriter, Sink, open_sink

__all__ = ["BytesLike", "Spec", "Specs", "UnfinishedPack", "Writer", "chunks_of", "require_name", "specified"]

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


class UnfinishedPack:
    """A pack whose head is written to ``sink``: what every writer of specified tensors completes or abandons.

    Leaving the ``with`` abandons it, which changes nothing once it is complete.
    Raises: LimitError; OSError.
    """

    def __init__(self, sink: Sink, catalog: Catalog, options: ConvertOptions) -> None:
        self._sink = sink
        self._closed = False
        try:
            layout = plan(catalog, options.policy)
            self._pack = PackWriter(layout, encode_head(layout, options.front), sink)
            self._pack.start(reserve=True)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up: a target path is left unchanged."""
        self._closed = True
        self._sink.abort()

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"this {type(self).__name__} is closed")

    def __enter__(self: _U) -> _U:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abandon()


_U = TypeVar("_U", bound=UnfinishedPack)


class Writer(UnfinishedPack):
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
        options = ConvertOptions(to=to, metadata=metadata, alignment=alignment, block_nbytes=block_nbytes)
        catalog = specified(specs, metadata)
        super().__init__(open_sink(target), catalog, options)
        buffers = self._pack.head.index.tensor_buffers.tolist()
        self._buffers: dict[str, int] = dict(zip(catalog.names, buffers))
        # In the order of specs, which is that of the buffers.
        self._left = {name: None for name, buffer in self._buffers.items() if buffer != NO_BUFFER}
        self._usable = True

    def write(self, name: str, chunks: BytesLike | Iterable[BytesLike]) -> None:
        """Write all bytes of one tensor, little-endian and row-major: one bytes-like object or an iterable of them.

        A chunk's memory may be reused as soon as the next chunk is requested, or this returns.
        Raises: UnknownTensorError; StateError for a tensor that was already written, or is out of order in a stream;
        SourceError for too few or too many bytes; any error of ``chunks``.  After an error the pack can only be
        abandoned.
        """
        self._require_open()
        self._require_usable()
        buffer = self._take(name)
        self._usable = False
        self._write(name, buffer, chunks)
        self._usable = True

    def _require_usable(self) -> None:
        if not self._usable:
            raise StateError("an earlier write failed: this pack can only be abandoned")

    def _take(self, name: str) -> int:
        """The buffer of the tensor, if it may be written now."""
        require_name(name)
        if name not in self._buffers:
            raise UnknownTensorError(f"no tensor {quoted(name)} in the specs of this Writer", tensor=name)
        buffer = self._buffers[name]
        if buffer == NO_BUFFER:
            return buffer
        if name not in self._left:
            raise StateError(f"tensor {quoted(name)} was already written")
        turn = next(iter(self._left))
        if self._sink.in_order and name != turn:
            raise StateError(f"tensor {quoted(name)} is out of order: a stream target expects {quoted(turn)} next")
        del self._left[name]
        return buffer

    def _write(self, name: str, buffer: int, chunks: BytesLike | Iterable[BytesLike]) -> None:
        buffer_nbytes = self._pack.head.index.buffer_nbytes
        expected = 0 if buffer == NO_BUFFER else int(buffer_nbytes[buffer])
        given = 0
        for view in chunks_of(chunks):
            given += len(view)
            if given > expected:
                break
            if len(view):
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
        with self._sink:
            self._require_usable()
            if self._left:
                raise StateError(f"tensors not written: {listed(self._left)}")
            self._pack.finish()

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
        else:
            self.abandon()


def specified(specs: Specs, metadata: Mapping[str, str] | None) -> Catalog:
    """The catalog of specified tensors, each with a storage of its own, its number in ``specs``.

    Raises: OptionError; UnsupportedTensorError, SourceError, LimitError.
    """
    if not isinstance(specs, Mapping):
        raise OptionError(f"specs={shown(specs)}: expected a mapping of names to specs")
    builder = CatalogBuilder()
    for number, (name, given) in enumerate(specs.items()):
        require_name(name)
        try:
            spec = given if isinstance(given, Spec) else Spec(*given)
        except TypeError:
            raise OptionError(f"specs[{name!r:.200}]: expected a Spec, or a pair of dtype and shape") from None
        dtype, shape = _resolve(name, spec)
        builder.add(name, dtype, shape, storage=number, start=0)
    return builder.build(storages_nbytes=0, metadata=metadata)


def require_name(name: object) -> None:
    """Raises: OptionError for a tensor name that is no text."""
    if not isinstance(name, str):
        raise OptionError(f"name={shown(name)}: expected the name of a tensor, as text")


def chunks_of(given: BytesLike | Iterable[BytesLike]) -> Iterator[memoryview]:
    """One bytes-like object, or an iterable of them, as views of bytes.

    Copies: none.  Raises: OptionError for anything else; any error of the iterable.
    """
    given = [given] if isinstance(given, (bytes, bytearray, memoryview)) else given
    if not isinstance(given, Iterable):
        raise OptionError(f"chunks={shown(given)}: expected a bytes-like object, or an iterable of them")
    for chunk in given:
        try:
            view = memoryview(chunk).cast("B")
        except TypeError as error:
            raise OptionError(f"a chunk is {shown(chunk)}: expected contiguous bytes ({error})") from None
        yield view


def _resolve(name: str, spec: Spec) -> tuple[int, list[int]]:
    """The number of the dtype, and the shape in its elements."""
    try:
        shape = [operator.index(dim) for dim in spec.shape]
    except TypeError:
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} has shape {quoted(spec.shape)}: expected a sequence of whole numbers", tensor=name
        ) from None
    text = str(spec.dtype).removeprefix("torch.")
    if isinstance(spec.dtype, type):  # np.float32, ml_dtypes.bfloat16
        text = spec.dtype.__name__
    if text in dtypes.BY_NAME:
        return dtypes.BY_NAME[text], shape
    if text in dtypes.BY_TORCH:  # float4_e2m1fn_x2: torch counts pairs
        if not shape:
            raise UnsupportedTensorError(f"tensor {quoted(name)}: {text} needs at least one dim", tensor=name)
        return dtypes.BY_TORCH[text], [*shape[:-1], 2 * shape[-1]]
    raise UnsupportedTensorError(
        f"tensor {quoted(name)} has dtype {quoted(spec.dtype)}: expected one of {', '.join(dtypes.BY_NAME)}",
        tensor=name,
    )
