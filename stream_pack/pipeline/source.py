"""The protocol that every source speaks: first what there is, then its bytes in one pass."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.catalog import Catalog
from stream_pack.pipeline.arrival import Arrival, one_after_another, one_pass
from stream_pack.pipeline.spool import Spool

__all__ = ["Chunk", "Piece", "Requests", "Source", "StreamOptions", "Zeros"]

_S = TypeVar("_S", bound="Source")


@dataclass(frozen=True, slots=True)
class Zeros:
    """A run of ``nbytes`` zero bytes that nobody had to allocate; a file sink leaves a hole for it."""

    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


Chunk: TypeAlias = "memoryview | bytes | Zeros"
"""Bytes moved in one step: a C-contiguous, byte-format memoryview (or bytes), or :class:`Zeros`.

Its memory is never written again by the source: whoever holds the chunk may keep it as long as
needed.
"""

Piece: TypeAlias = tuple[int, Chunk]
"""(buffer number, chunk): the next bytes of that buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What the layout wants of the source: buffer ``b`` is bytes ``[starts[b], starts[b] +
    nbytes[b])`` of storage ``storages[b]``, in the order in which the buffers stand in the pack.
    Every ``nbytes`` is above 0.
    """

    storages: NDArray[np.int64]
    starts: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.storages)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How the bytes shall come.

    ``chunk_nbytes``: no chunk is longer (``Zeros`` may be).  ``window_nbytes``: what may be gathered
    of a strided tensor in one step, before it is cut into chunks; the one before may still be held.
    ``jobs``: threads the source may use, at least 1.
    ``in_order``: the sink is a stream, so a source that can choose delivers buffer 0 whole, then 1,
    and so on; one that cannot (it is itself a pipe) delivers in the order of arrival, and the
    writer spools.
    ``spool``: temporary disk space, for what cannot be done in one pass.
    """

    chunk_nbytes: int
    jobs: int
    in_order: bool
    spool: Spool
    window_nbytes: int = 1 << 20


class Source(abc.ABC):
    """Tensors to be packed.

    Lifetime: a context manager; ``close`` gives back files and maps, never the caller's own file
    objects.
    """

    @property
    @abc.abstractmethod
    def catalog(self) -> Catalog:
        """What tensors there are.  No tensor data has been read when it is known."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """What the source is, for the report: ``"torch zip"``, ``"safetensors"``, ``"tensors in
        memory"`` ..."""

    @property
    def spool_nbytes(self) -> int:
        """Disk space that :meth:`stream` will need at its peak, known before the first byte."""
        return 0

    def spool_for(self, requests: Requests) -> int:
        """What of :attr:`spool_nbytes` is needed if only this is requested."""
        return self.spool_nbytes

    @property
    def chooses_order(self) -> bool:
        """Whether it can give the buffers in any order; a pipe cannot."""
        return True

    def arrival(self, requests: Requests, *, chunk_nbytes: int) -> Arrival:
        """When :meth:`stream` brings these buffers if the sink is a stream, in chunks of ``chunk_nbytes`` or a multiple
        of that.

        A source that cannot choose is taken to bring one storage after the other, each from its start in whole chunks.
        """
        if self.chooses_order:
            return one_after_another(len(requests))
        return one_pass(
            requests.storages,
            requests.starts,
            requests.nbytes,
            self.catalog.derived,
            chunk_nbytes=chunk_nbytes,
        )

    @property
    def held_nbytes(self) -> int:
        """Memory that :meth:`stream` takes beside its chunks, if that grows with the source."""
        return 0

    @property
    def sparse(self) -> bool:
        """Whether it yields :class:`Zeros`, so that a file may become longer than the disk has
        room."""
        return False

    @property
    def refusals(self) -> Mapping[int, str]:
        """Why tensors (by their rows in the catalog) cannot be packed, in words that follow their name: whoever wants
        one of them is refused."""
        return {}

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of how the source was read, a line each: what was left out, and
        why.  They become warnings of the report."""
        return ()

    @abc.abstractmethod
    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        """The bytes of every buffer, each from its first to its last, in as many chunks as it
        takes.

        Chunks of different buffers may alternate.  Called at most once.  When the iterator ends,
        everything was delivered, and whatever the source can check about itself (checksums, its
        end) has been checked.

        Raises: SourceError and its kinds; OSError.
        """

    @property
    @abc.abstractmethod
    def verification(self) -> str:
        """What of the source's own checksums was verified, as a phrase for the report; valid after
        :meth:`stream`."""

    def close(self) -> None:
        """Give back what the source holds.  May be called twice."""

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
