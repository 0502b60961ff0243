"""Checkpoints as ``torch.save`` has written them since torch 1.6, as a source.

A file and a pipe are read by the same code.  A tensor that is not contiguous is gathered from its storage: in
place where the source is a file, else from the spool, one storage at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

from stream_pack.catalog import Catalog, CatalogBuilder
from stream_pack.dtypes import DTYPES
from stream_pack.errors import TruncatedSourceError
from stream_pack.writer.bytestream import ByteStream
from stream_pack.writer.gather import strided_chunks
from stream_pack.writer.geometry import Recipe, recipe
from stream_pack.writer.overlap import overlap
from stream_pack.writer.scatter import Scatter, SingleBuffer
from stream_pack.writer.source import Piece, Requests, Source, StreamOptions
from stream_pack.writer.spool import SpoolFile
from stream_pack.writer.state_dict import Flatten, flat_state_dict
from stream_pack.writer.torch_archive import Data, End, TorchArchive
from stream_pack.writer.torch_globals import Storage

__all__ = ["TorchZipSource"]


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """What is derived from the storage may be made now; ``payload`` is where the storage begins in a file."""

    storage: Storage
    derived: list[int]
    payload: int


_Target = Scatter | SingleBuffer
_Step = tuple[Data | End | _Gather, _Target | None]
"""Something that was read, and who gets its bytes."""


class TorchZipSource(Source):
    """The tensors of one torch.save archive, from a file or a pipe.

    Takes over ``stream``, which stands at the archive's first byte, and closes it.  ``flatten`` finds the tensors in
    what the pickle describes.

    Raises: UnsupportedCheckpointError, UnsupportedTensorError, SourceError, TruncatedSourceError, LimitError; OSError.
    """

    def __init__(self, stream: ByteStream, *, flatten: Flatten = flat_state_dict) -> None:
        self._stream = stream
        self._archive = TorchArchive(stream, flatten=flatten)
        self._storages = list(self._archive.storages.values())
        self._recipes: dict[int, Recipe] = {}
        self._made_from: dict[int, Storage] = {}
        self._derived: dict[int, list[int]] = {}
        self._catalog = self._build_catalog()

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def kind(self) -> str:
        return "torch zip"

    @property
    def ignored(self) -> int:
        """How many values beside the tensors were left out, because they are none."""
        return self._archive.state_dict.ignored

    @property
    def unreferenced(self) -> int:
        """How many records of the archive no tensor names; complete after :meth:`stream`."""
        return self._archive.unreferenced

    @property
    def spool_nbytes(self) -> int:
        if self._stream.regular_file is not None:
            return 0
        return max((self._storages[number].nbytes for number in self._derived), default=0)

    @property
    def chooses_order(self) -> bool:
        return self._stream.regular_file is not None

    @property
    def verification(self) -> str:
        verified, unverified = self._archive.verified, self._archive.unverified
        if not unverified:
            return "CRC-32 of every record verified"
        if not verified:
            return "the source carries no checksums"
        return f"CRC-32 of {verified} records verified; {unverified} carry none"

    def close(self) -> None:
        self._stream.close()

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        scatter = Scatter(requests)
        in_order = options.in_order and self._stream.regular_file is not None
        if in_order:
            self._archive.locate()
            steps = self._buffer_by_buffer(requests, options.chunk_nbytes)
        else:
            steps = self._as_it_comes(scatter, options.chunk_nbytes)
        if options.jobs > 1:
            # The CRC-32 is the slowest step of reading: it runs here, while the next chunks are being read.
            steps = overlap(steps, weigh=_weight)
        spool: SpoolFile | None = None
        try:
            for event, target in self._verified(steps):
                if isinstance(event, Data) and event.storage is not None:
                    if target is not None:
                        yield from target.pieces(event.storage.number, event.chunk)
                    if self._is_spooled(event.storage, scatter):
                        spool = spool or options.spool.open(
                            why="a tensor that is not contiguous comes through a pipe",
                            nbytes=self.spool_nbytes,
                        )
                        spool.append(event.chunk)
                elif isinstance(event, _Gather) and target is not None:
                    memory = self._memory_of(event, spool)
                    yield from self._gather(event, memory, target, options)
                    if spool is not None:
                        spool.close()
                        spool = None
        finally:
            steps.close()
            if spool is not None:
                spool.close()
        if not in_order:
            scatter.finish()

    def _build_catalog(self) -> Catalog:
        """Check every tensor's geometry; views of a storage share it, everything else is derived."""
        storages_nbytes = sum(storage.nbytes for storage in self._storages)
        file_nbytes = self._stream.file_nbytes
        if file_nbytes is not None and storages_nbytes > file_nbytes:
            raise TruncatedSourceError(
                f"the checkpoint's storages have {storages_nbytes} bytes, the file only {file_nbytes}: "
                "it was cut short"
            )
        builder = CatalogBuilder()
        known: dict[tuple[int, Recipe], int] = {}
        for name, tensor in self._archive.state_dict.tensors.items():
            number, start = tensor.storage.number, 0
            if 0 not in tensor.shape:
                made = recipe(
                    name,
                    dtype=tensor.dtype,
                    offset=tensor.offset,
                    shape=tensor.shape,
                    strides=tensor.strides,
                    storage_nbytes=tensor.storage.nbytes,
                    big_endian=self._archive.big_endian,
                    conj=tensor.conj,
                    neg=tensor.neg,
                )
                if made.contiguous:
                    start = made.start
                else:
                    derived = known.setdefault((number, made), len(self._storages) + len(known))
                    if derived not in self._recipes:
                        self._recipes[derived] = made
                        self._made_from[derived] = tensor.storage
                        self._derived.setdefault(number, []).append(derived)
                        builder.derive(derived, of=number, begin=made.start, end=made.end)
                    number = derived
            shape = tensor.shape
            if DTYPES[tensor.dtype].torch_pairs and shape:
                shape = (*shape[:-1], 2 * shape[-1])
            builder.add(name, tensor.dtype, shape, storage=number, start=start)
        return builder.build(storages_nbytes=storages_nbytes)

    def _as_it_comes(self, scatter: Scatter, chunk_nbytes: int) -> Generator[_Step, None, None]:
        for event in self._archive.read(chunk_nbytes):
            yield event, scatter
            if isinstance(event, End) and event.storage is not None:
                wanted = self._wanted(event.storage, scatter)
                if wanted:
                    yield _Gather(event.storage, wanted, event.payload), scatter

    def _buffer_by_buffer(
        self, requests: Requests, chunk_nbytes: int
    ) -> Generator[_Step, None, None]:
        """From a file.  A storage is read whole, and checked, before or while its first buffer goes out."""
        payloads: dict[int, int] = {}
        columns = zip(
            requests.storages.tolist(), requests.starts.tolist(), requests.nbytes.tolist()
        )
        for buffer, (number, start, nbytes) in enumerate(columns):
            direct = number < len(self._storages)
            storage = self._storages[number] if direct else self._made_from[number]
            target = SingleBuffer(buffer, start, start + nbytes)
            if storage.number not in payloads:
                for event in self._archive.read_storage(storage, chunk_nbytes):
                    yield event, target if direct else None
                    if isinstance(event, End):
                        payloads[storage.number] = event.payload
            elif direct:
                target = SingleBuffer(buffer, 0, nbytes)
                for event in self._archive.read_range(storage, start, nbytes, chunk_nbytes):
                    yield event, target
            if not direct:
                yield _Gather(storage, [number], payloads[storage.number]), target
        for storage in self._storages:
            if storage.number not in payloads:
                for event in self._archive.read_storage(storage, chunk_nbytes):
                    yield event, None

    def _verified(self, steps: Iterable[_Step]) -> Iterator[_Step]:
        """Compare the CRC-32 of every record that passes with what the archive says."""
        crc = 0
        for step in steps:
            event = step[0]
            if isinstance(event, Data):
                if event.fresh:
                    crc = crc32(event.chunk, crc)
            elif isinstance(event, End):
                self._archive.verify(event.name, event.crc, crc)
                crc = 0
            yield step

    def _wanted(self, storage: Storage, scatter: Scatter) -> list[int]:
        return [d for d in self._derived.get(storage.number, ()) if scatter.wants(d)]

    def _is_spooled(self, storage: Storage, scatter: Scatter) -> bool:
        return self._stream.regular_file is None and bool(self._wanted(storage, scatter))

    def _memory_of(self, event: _Gather, spool: SpoolFile | None) -> memoryview:
        """The bytes of a storage that has passed, in place."""
        nbytes = event.storage.nbytes
        if spool is not None:
            return _mapped(spool.fileno(), 0, nbytes)
        assert self._stream.regular_file is not None  # else it was spooled
        fd, base = self._stream.regular_file
        return _mapped(fd, base + event.payload, nbytes)

    def _gather(
        self, event: _Gather, memory: memoryview, target: _Target, options: StreamOptions
    ) -> Iterator[Piece]:
        for derived in event.derived:
            made = self._recipes[derived]
            for window in strided_chunks(made.view(memory), chunk_nbytes=options.window_nbytes):
                data = made.resolve(window)
                for begin in range(0, len(data), options.chunk_nbytes):
                    chunk = data[begin : begin + options.chunk_nbytes]
                    yield from target.pieces(derived, chunk)


def _weight(step: _Step) -> int:
    return len(step[0].chunk) if isinstance(step[0], Data) else 0


def _mapped(fd: int, begin: int, nbytes: int) -> memoryview:
    """Bytes of a file in place.  The mapping lives as long as any view of it."""
    delta = begin % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, delta + nbytes, access=mmap.ACCESS_READ, offset=begin - delta)
    return memoryview(mapping)[delta:]
