"""The protocol that every source speaks: first what there is, then its bytes in one pass."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.catalog import Catalog
from stream_pack.format.rows import rows
from stream_pack.pipeline.arrival import Arrival, one_after_another, one_pass
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.places import Places
from stream_pack.pipeline.spool import Spool
from stream_pack.text import listed

__all__ = ["Demand", "Requests", "Source", "StreamOptions", "Traits"]

_S = TypeVar("_S", bound="Source")


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What the layout wants of the source: buffer ``b`` is bytes ``[starts[b], starts[b] + nbytes[b])`` of storage
    ``storages[b]``, in the order of the buffers in the pack.  Every ``nbytes`` is above 0.
    """

    storages: NDArray[np.int64]
    starts: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.storages)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(storage, start, nbytes) of each buffer."""
        return rows(self.storages, self.starts, self.nbytes)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How the bytes are delivered.

    ``chunk_nbytes``: no chunk is longer (``Zeros`` may be).  ``window_nbytes``: what may be gathered of a strided
    tensor in one step, before it is cut into chunks; the one before may still be held.
    ``jobs``: threads the source may use, at least 1.
    ``in_order``: the sink is a stream, so a source that can choose delivers buffer 0 whole, then 1, and so on; one that
    cannot (it is itself a pipe) delivers in the order of arrival, and the writer spools.
    ``spool``: temporary space, for what cannot be done in one pass.
    """

    chunk_nbytes: int
    jobs: int
    in_order: bool
    spool: Spool
    window_nbytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Traits:
    """What is fixed about a source before any of its tensor data is read.

    ``kind``: what the source is, for the report: ``"torch zip"``, ``"safetensors"``, ``"tensors in memory"`` ...
    ``chooses_order``: it can deliver the buffers in any order; a pipe cannot.
    ``held_nbytes``: memory that streaming takes beside its chunks, if that grows with the source.
    ``sparse``: it yields :class:`Zeros`, so a file may become longer than the free space of its disk.
    ``warnings``: what the pack may lack, a line each: what was left out although nobody asked for it.
    ``remarks``: how the source was read, a line each, which is nothing to worry about.  Both go into the report.
    """

    kind: str
    chooses_order: bool = True
    held_nbytes: int = 0
    sparse: bool = False
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What streaming some requests takes, known before the first byte.

    ``spool_nbytes``: temporary space at its peak, beyond what opening the source has taken.
    ``arrival``: when the buffers come if the sink is a stream; None where they come in turn, so that none has to wait.
    """

    spool_nbytes: int = 0
    arrival: Arrival | None = None

    def arrival_of(self, buffers: int) -> Arrival:
        """:attr:`arrival`, spelt out for ``buffers`` that come in turn."""
        return one_after_another(buffers) if self.arrival is None else self.arrival


class Source(abc.ABC):
    """Tensors to be packed: ``catalog`` says which, and ``traits`` how they are read.

    Lifetime: a context manager; ``close`` releases files and maps, never the caller's own file objects.
    """

    def __init__(self, catalog: Catalog, traits: Traits) -> None:
        self.catalog = catalog
        self.traits = traits

    def demand(self, requests: Requests, *, in_order: bool, chunk_nbytes: int) -> Demand:
        """What :meth:`stream` takes for ``requests``, in chunks of ``chunk_nbytes`` or a multiple of that, where
        ``in_order`` is as in :class:`StreamOptions`.

        A source that cannot choose is taken to bring one storage after the other, each from its start in whole chunks.
        """
        if self.traits.chooses_order or not in_order:
            return Demand()
        return Demand(
            arrival=one_pass(
                requests.storages, requests.starts, requests.nbytes, self.catalog.derived, chunk_nbytes=chunk_nbytes
            )
        )

    def refuse(self, rows: Iterable[int]) -> None:
        """Raises: the error of the first of these rows of the catalog that cannot be packed, naming the others."""
        refused = self.catalog.refused
        found = [row for row in rows if row in refused] if refused else []
        if not found:
            return
        first = found[0]
        others = [row for row in found if refused[row] is not refused[first]]
        also = f"; {listed(self.catalog.names[row] for row in others)} cannot be packed either" if others else ""
        raise refused[first].extended(f", or leave it out with --exclude (exclude= of convert){also}")

    @abc.abstractmethod
    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        """The bytes of every buffer, each from its first to its last, in as many chunks as it takes.

        Chunks of different buffers may alternate.  Called at most once.  When the iterator ends, everything was
        delivered, and whatever the source can check about itself (checksums, its end) has been checked.

        Raises: SourceError and its kinds; OSError.
        """

    @property
    @abc.abstractmethod
    def verification(self) -> str:
        """Which of the source's own checksums were verified, as a phrase for the report; valid after :meth:`stream`."""

    @property
    def checksums(self) -> str:
        """Which checksums the source carries, as far as its head tells, before any of its tensor data is read."""
        return "none"

    def places(self, requests: Requests) -> Places:
        """Where the bytes of each request lie.  Reads no tensor data, at most the heads of records.

        May be called before :meth:`stream`, and changes nothing for it.  Raises: SourceError; OSError.
        """
        return Places.nowhere(len(requests))

    def check_unchanged(self) -> None:
        """Compare every regular file that the source reads with what it was when it was opened.

        Called once, when :meth:`stream` has ended, before the target is put in place.  Pipes, and tensors in memory,
        have nothing to be compared with.

        Raises: SourceChangedError; OSError.
        """

    def close(self) -> None:
        """Release what the source holds.  May be called twice."""

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
