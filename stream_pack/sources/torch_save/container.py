"""What the two formats of ``torch.save`` offer to the reader of their storages."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stream_pack.pickles.globals import Storage
from stream_pack.pickles.state_dict import StateDict

__all__ = ["Container", "Data", "End", "Event"]


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """The next bytes of a record; ``storage`` is None if it holds none.

    ``fresh``: they count for the record's CRC-32.  Not so where a part of a storage is read once more.
    """

    chunk: memoryview | bytes
    storage: Storage | None = None
    fresh: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """A record is complete.  ``crc`` is what the file says its CRC-32 is; ``payload`` is where it began."""

    name: str
    crc: int
    payload: int
    storage: Storage | None = None


Event: TypeAlias = "Data | End"


class Container(Protocol):
    """A checkpoint whose pickle has been read, and whose storages have not."""

    @property
    def state_dict(self) -> StateDict:
        """The tensors that the pickle describes."""

    @property
    def storages(self) -> Mapping[str, Storage]:
        """All storages by key, in the order in which they are expected to come."""

    @property
    def order_known(self) -> bool:
        """Whether that is their order; else they may come in any."""

    @property
    def big_endian(self) -> bool:
        """Whether multi-byte elements have their most significant byte first."""

    @property
    def seekable(self) -> bool:
        """Whether every storage is uncompressed in a regular file, so that it can be read twice and in any order."""

    @property
    def checksums(self) -> str:
        """Which checksums it carries."""

    def payloads(self, storages: Iterable[Storage]) -> Mapping[Storage, int]:
        """Where storages begin that are in a file as they are, in bytes from the stream's first; no storage is read,
        and reading goes on where it was."""

    def read(self, chunk_nbytes: int) -> Generator[Event, None, None]:
        """Everything from here to the end, in the order of the source; the end is checked."""

    def locate(self) -> None:
        """The same without reading storages, if ``seekable``; then :meth:`read_storage` and :meth:`read_range` work."""

    def read_storage(self, storage: Storage, chunk_nbytes: int) -> Iterator[Event]:
        """One storage from its first byte to its end."""

    def read_range(self, storage: Storage, begin: int, nbytes: int, chunk_nbytes: int) -> Iterator[Event]:
        """A part of a storage that has been read before."""
