"""Checkpoints of ``torch.save`` as a source, whichever of its two formats they have.

A file and a pipe are read by the same code.  A tensor that is not contiguous is gathered from its storage: in
place where the source is a file, else from the spool, one storage at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from stream_pack.pickles.globals import Storage
from stream_pack.pipeline.arrival import in_any_order
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.gather import strided_chunks
from stream_pack.pipeline.overlap import overlap
from stream_pack.pipeline.places import NOWHERE, Places
from stream_pack.pipeline.scatter import Scatter, SingleBuffer
from stream_pack.pipeline.source import Demand, Requests, Source, StreamOptions, Traits
from stream_pack.pipeline.spool import SpoolFile
from stream_pack.sources.torch_save.container import Container, Data, End, Event
from stream_pack.sources.torch_save.tensors import catalog_tensors

__all__ = ["Step", "TorchSource"]


TENSOR_NBYTES = 400
"""What streaming holds for each tensor, records met and places by storage: measured with 100,000 tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """What is derived from the storage may be made now; ``payload`` is where the storage begins in a file."""

    storage: Storage
    derived: list[int]
    payload: int


_Target: TypeAlias = "Scatter | SingleBuffer"
Step: TypeAlias = "tuple[Data | End | _Gather, _Target | None]"
"""Something that was read, and who gets its bytes."""


class TorchSource(Source):
    """The tensors of one checkpoint, read from ``stream`` by way of ``container``.

    Lifetime: takes over ``stream``, and closes it.
    Raises: UnsupportedTensorError, SourceError, TruncatedSourceError, LimitError.
    """

    def __init__(self, stream: ByteStream, container: Container, *, kind: str, remarks: tuple[str, ...] = ()) -> None:
        self._stream = stream
        self._container = container
        self._tensors = catalog_tensors(
            container.state_dict,
            container.storages,
            big_endian=container.big_endian,
            file_nbytes=stream.file_nbytes if container.seekable else None,
        )
        self._numbers = {storage: k for k, storage in enumerate(self._tensors.storages)}
        traits = Traits(
            kind,
            chooses_order=container.seekable,
            held_nbytes=TENSOR_NBYTES * len(self._tensors.catalog),
            warnings=container.state_dict.warnings,
            remarks=container.state_dict.remarks + remarks,
        )
        super().__init__(self._tensors.catalog, traits)

    @property
    def ignored(self) -> int:
        """How many values beside the tensors were left out, because they are not tensors."""
        return self._container.state_dict.ignored

    def demand(self, requests: Requests, *, in_order: bool, chunk_nbytes: int) -> Demand:
        if self._container.seekable:
            return Demand()
        demand = Demand(arrival=in_any_order(len(requests)))
        if self._container.order_known or not in_order:
            demand = super().demand(requests, in_order=in_order, chunk_nbytes=chunk_nbytes)
        return replace(demand, spool_nbytes=self._spool_nbytes(requests))

    def _spool_nbytes(self, requests: Requests) -> int:
        """The longest storage of a pipe that has to wait whole for what is gathered from it."""
        made_from = self._tensors.made_from
        wanted = (made_from[s] for s in set(requests.storages.tolist()) if s in made_from)
        return max((storage.nbytes for storage in wanted if storage.data is None), default=0)

    @property
    def checksums(self) -> str:
        return self._container.checksums

    def places(self, requests: Requests) -> Places:
        storages = dict(enumerate(self._tensors.storages))
        wanted = [storages.get(number) for number in requests.storages.tolist()]  # None: derived
        payloads = self._container.payloads({storage: None for storage in wanted if storage is not None})
        begins = np.array([payloads.get(storage, NOWHERE) if storage else NOWHERE for storage in wanted], np.int64)
        offsets = np.where(begins == NOWHERE, NOWHERE, self._stream.file_offset(0) + begins + requests.starts)
        return Places.within(self._stream.source_file, offsets)

    def check_unchanged(self) -> None:
        self._stream.check_unchanged()

    def close(self) -> None:
        self._stream.close()

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        scatter = Scatter(requests)
        in_order = options.in_order and self._container.seekable
        if in_order:
            self._container.locate()
            steps = self._buffer_by_buffer(requests, options.chunk_nbytes)
        else:
            steps = self._as_it_comes(scatter, options.chunk_nbytes)
        if options.jobs > 1:
            # The check below is the slowest step of reading: it runs here, while the next chunks are being read.
            steps = overlap(steps, weigh=_weight)
        spool: SpoolFile | None = None
        try:
            for event, target in self._checked(steps):
                if isinstance(event, Data) and event.storage is not None:
                    if target is not None:
                        yield from target.pieces(self._numbers[event.storage], event.chunk)
                    if self._is_spooled(event.storage, scatter):
                        spool = spool or options.spool.open(
                            why="a tensor that is not contiguous comes through a pipe",
                            nbytes=self._spool_nbytes(requests),
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

    def _checked(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Check the steps as they are streamed, with whatever the format has to check them against."""
        return iter(steps)

    def _as_it_comes(self, scatter: Scatter, chunk_nbytes: int) -> Generator[Step, None, None]:
        for event in self._container.read(chunk_nbytes):
            yield event, scatter
            if isinstance(event, End) and event.storage is not None:
                wanted = self._wanted(event.storage, scatter)
                if wanted:
                    yield _Gather(event.storage, wanted, event.payload), scatter
        for storage in self._tensors.storages:
            if storage.data is not None:
                for data in self._read_again(storage, 0, storage.nbytes, chunk_nbytes):
                    yield data, scatter
                wanted = self._wanted(storage, scatter)
                if wanted:
                    yield _Gather(storage, wanted, 0), scatter

    def _buffer_by_buffer(self, requests: Requests, chunk_nbytes: int) -> Generator[Step, None, None]:
        """From a file.  A storage is read whole, and checked, before or while its first buffer goes out."""
        storages = self._tensors.storages
        payloads = {storage: 0 for storage in storages if storage.data is not None}  # have passed with the pickle
        for buffer, (number, start, nbytes) in enumerate(requests.rows()):
            direct = number < len(storages)
            storage = storages[number] if direct else self._tensors.made_from[number]
            target = SingleBuffer(buffer, start, start + nbytes)
            if storage not in payloads:
                for event in self._container.read_storage(storage, chunk_nbytes):
                    yield event, target if direct else None
                    if isinstance(event, End):
                        payloads[storage] = event.payload
            elif direct:
                target = SingleBuffer(buffer, 0, nbytes)
                for event in self._read_again(storage, start, nbytes, chunk_nbytes):
                    yield event, target
            if not direct:
                yield _Gather(storage, [number], payloads[storage]), target
        for storage in storages:
            if storage not in payloads:
                for event in self._container.read_storage(storage, chunk_nbytes):
                    yield event, None

    def _read_again(self, storage: Storage, begin: int, nbytes: int, chunk_nbytes: int) -> Iterator[Event]:
        """A part of a storage that has passed."""
        if storage.data is None:
            yield from self._container.read_range(storage, begin, nbytes, chunk_nbytes)
            return
        data = memoryview(storage.data)[begin : begin + nbytes]
        for at in range(0, nbytes, chunk_nbytes):
            yield Data(data[at : at + chunk_nbytes], storage, fresh=False)

    def _wanted(self, storage: Storage, scatter: Scatter) -> list[int]:
        return [d for d in self._tensors.derived.get(storage, ()) if scatter.wants(d)]

    def _is_spooled(self, storage: Storage, scatter: Scatter) -> bool:
        return storage.data is None and not self._container.seekable and bool(self._wanted(storage, scatter))

    def _memory_of(self, event: _Gather, spool: SpoolFile | None) -> memoryview:
        """The bytes of a storage that has passed, in place."""
        nbytes = event.storage.nbytes
        if event.storage.data is not None:
            return memoryview(event.storage.data)
        if spool is not None:
            return _mapped(spool.fileno(), 0, nbytes)
        assert self._stream.regular_file is not None  # else it was spooled
        fd, base = self._stream.regular_file
        return _mapped(fd, base + event.payload, nbytes)

    def _gather(self, event: _Gather, memory: memoryview, target: _Target, options: StreamOptions) -> Iterator[Piece]:
        for derived in event.derived:
            made = self._tensors.recipes[derived]
            for window in strided_chunks(made.view(memory), chunk_nbytes=options.window_nbytes):
                data = made.resolve(window)
                for begin in range(0, len(data), options.chunk_nbytes):
                    chunk = data[begin : begin + options.chunk_nbytes]
                    yield from target.pieces(derived, chunk)


def _weight(step: Step) -> int:
    return len(step[0].chunk) if isinstance(step[0], Data) else 0


def _mapped(fd: int, begin: int, nbytes: int) -> memoryview:
    """Bytes of a file in place.  The mapping lives as long as any view of it."""
    delta = begin % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, delta + nbytes, access=mmap.ACCESS_READ, offset=begin - delta)
    return memoryview(mapping)[delta:]
