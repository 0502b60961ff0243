"""What a streamed constant is: bytes on disk, described in memory.

A :class:`Holder` takes bytes once, in chunks, and returns a :class:`Held` for them.  Several can be composed to one
without being read.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias, TypeVar

import xxhash

from stream_pack.arguments.paths import require_path
from stream_pack.errors import StateError
from stream_pack.format.align import align_up
from stream_pack.format.checksum import BLOCK_NBYTES, BlockHasher, zeros
from stream_pack.pipeline.chunks import Zeros
from stream_pack.pipeline.spool import Spool, SpoolFile
from stream_pack.reader.locks import Locked
from stream_pack.text import human_nbytes

__all__ = ["CHUNK_NBYTES", "SMALL_NBYTES", "Extent", "Held", "Holder", "OnDisk"]

CHUNK_NBYTES = 1 << 20
SMALL_NBYTES = 4096
"""A page; what is smaller costs less as Python bytes than the calls that would avoid them."""

_T = TypeVar("_T")


class OnDisk:
    """Something immutable that has its bytes on disk: a copy is the same object, and it cannot be pickled."""

    __slots__ = ()

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, memo: object) -> _T:
        return self

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "bytes of a streamed export are in its temporary file and cannot be pickled: write the program with "
            "stream_pack.executorch.write_program(manager, path)"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Bytes ``[offset, offset + nbytes)`` of a holder's file."""

    file: SpoolFile
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


Fragment: TypeAlias = "bytes | Extent | Zeros"


@dataclass(frozen=True, slots=True, eq=False)
class Held(OnDisk):
    """``nbytes`` bytes, most of them on disk: ``fragments``, one after the other.

    ``digest`` (16 bytes, XXH3-128) identifies the content: that of the bytes, or for a composition that of its members'
    digests.  ``block_checksums`` are those of a pack's buffer with this content, in blocks of the default length; a
    composition has none.

    Lifetime: keeps the holder's file open, and so its bytes on disk.
    """

    nbytes: int
    digest: bytes
    fragments: tuple[Fragment, ...] = field(repr=False)
    block_checksums: tuple[int, ...] = field(default=(), repr=False)
    sha256: bytes | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.nbytes

    @classmethod
    def compose(cls, members: Sequence[Held | bytes | Zeros]) -> Held:
        """The members one after the other.  Copies: none."""
        fragments: list[Fragment] = []
        digest = xxhash.xxh3_128()
        for member in members:
            if isinstance(member, Held):
                fragments.extend(member.fragments)
                digest.update(b"H" + member.digest)
            else:
                fragments.append(member)
                digest.update(b"Z" if isinstance(member, Zeros) else b"B")
                digest.update(b"" if isinstance(member, Zeros) else xxhash.xxh3_128_digest(member))
            digest.update(len(member).to_bytes(8, "little"))
        return cls(sum(map(len, members)), digest.digest(), tuple(fragments))

    def chunks(self, *, chunk_nbytes: int = CHUNK_NBYTES) -> Iterator[memoryview]:
        """All bytes, in chunks of at most ``chunk_nbytes``.

        Copies: a chunk at a time, into memory of its own.
        Raises: TruncatedSourceError when the file on disk was cut; OSError.
        """
        return self._span(0, self.nbytes, chunk_nbytes)

    def read(self, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)``, in memory.  Raises: as :meth:`chunks`."""
        whole = io.BytesIO()
        for chunk in self._span(begin, end, CHUNK_NBYTES):
            whole.write(chunk)
        return whole.getvalue()  # its own bytes, not another copy

    def sha256_digest(self) -> bytes:
        """The SHA-256 of the bytes; they are read for it unless it was computed when they were held."""
        if self.sha256 is not None:
            return self.sha256
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.digest()

    def _span(self, begin: int, end: int, chunk_nbytes: int) -> Iterator[memoryview]:
        position = 0
        for fragment in self.fragments:
            first, last = max(begin - position, 0), min(end - position, len(fragment))
            if first < last:
                yield from _read(fragment, first, last, chunk_nbytes)
            position += len(fragment)
            if position >= end:
                return


def _read(fragment: Fragment, begin: int, end: int, chunk_nbytes: int) -> Iterator[memoryview]:
    if isinstance(fragment, Zeros):
        return iter(zeros(end - begin))
    if isinstance(fragment, Extent):
        at = fragment.offset
        return fragment.file.read(at + begin, at + end, chunk_nbytes=chunk_nbytes)
    return _chunks(memoryview(fragment)[begin:end], chunk_nbytes)


def _chunks(memory: memoryview, chunk_nbytes: int) -> Iterator[memoryview]:
    """``memory`` in chunks.  Copies: none."""
    for begin in range(0, len(memory), chunk_nbytes):
        yield memory[begin : begin + chunk_nbytes]


class Holder(Locked):
    """Takes bytes to disk.  ``folder`` exists and has room for all of them.

    One file without a name has them all; its disk space is free when this object and every :class:`Held` of it are
    gone, also when the process is killed.
    May be used by several threads.  A forked process writes to a file of its own.
    Raises: OptionError for something that is no path; OSError, which names ``folder``, when no file can be made there.
    """

    def __init__(self, folder: str | os.PathLike[str], *, chunk_nbytes: int) -> None:
        super().__init__()
        require_path("folder", folder, "folder")
        self.chunk_nbytes = chunk_nbytes
        self._given = os.fsdecode(folder)
        self._folder = os.path.abspath(folder)
        self._begin()

    def _begin(self) -> None:
        try:
            self._file = Spool(self._folder).open(why="streamed constants", nbytes=None)
        except OSError as error:  # whose file has a name that nobody has chosen
            raise OSError(error.errno, error.strerror, self._given) from None
        self._process = os.getpid()

    def hold(
        self, chunks: Iterable[memoryview | bytes], nbytes: int, *, label: str = "a constant", sha256: bool = False
    ) -> Held:
        """Write the ``nbytes`` bytes that ``chunks`` give; messages call them ``label``.

        ``sha256``: compute that digest too.
        Raises: StateError when ``chunks`` give more or fewer bytes; OSError (ENOSPC among others), which says what did
        not fit where.
        """
        hasher, digest = BlockHasher(BLOCK_NBYTES), xxhash.xxh3_128()
        sha = hashlib.sha256() if sha256 else None
        checksums: list[int] = []
        small: list[bytes] = []
        extent = self._reserve(nbytes) if nbytes >= SMALL_NBYTES else None
        position = 0
        for chunk in chunks:
            if position + len(chunk) > nbytes:
                raise StateError(f"a constant of {nbytes} bytes gave more than that")
            checksums += hasher.update(chunk)
            digest.update(chunk)
            if sha is not None:
                sha.update(chunk)
            if extent is None:
                small.append(bytes(chunk))
            else:
                try:
                    extent.file.write_at(extent.offset + position, chunk)
                except OSError as error:
                    raise self._not_written(error, label, extent) from None
            position += len(chunk)
        if position < nbytes:
            raise StateError(f"a constant of {nbytes} bytes gave only {position}")
        return Held(
            nbytes,
            digest.digest(),
            (b"".join(small) if extent is None else extent,),
            tuple(checksums + hasher.finish()),
            None if sha is None else sha.digest(),
        )

    def _not_written(self, error: OSError, label: str, extent: Extent) -> OSError:
        return OSError(
            error.errno,
            f"{error.strerror}: {label} of {human_nbytes(extent.nbytes)} could not be written to the folder of "
            f"streaming_constants, which holds {human_nbytes(extent.offset)} of the export already and needs room for "
            "all of its constants",
            self._given,
        )

    def hold_memory(self, memory: memoryview, *, label: str = "a constant", sha256: bool = False) -> Held:
        """Write all of ``memory``, as :meth:`hold` does."""
        return self.hold(_chunks(memory, self.chunk_nbytes), len(memory), label=label, sha256=sha256)

    def _reserve(self, nbytes: int) -> Extent:
        with self._lock:
            if self._process != os.getpid():
                # A fork shares the file, and each would write where the other does.
                self._begin()
            # Pages of their own, so that a file system that shares blocks can share them with the program.
            offset = self._file.reserve(align_up(nbytes, SMALL_NBYTES))
            return Extent(self._file, offset, nbytes)
