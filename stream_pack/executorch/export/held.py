"""What a streamed constant is: bytes that lie on disk and are described in memory.

A :class:`Holder` takes bytes once, in chunks, and gives a :class:`Held` for them.  Held ones are put together to larger
ones without being read.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias, TypeVar

import numpy as np
import xxhash

from stream_pack.errors import StateError, TruncatedSourceError
from stream_pack.format.checksum import BLOCK_NBYTES, BlockHasher, zeros
from stream_pack.pipeline.source import Zeros

__all__ = ["Extent", "Held", "Holder"]

CHUNK_NBYTES = 1 << 20
SMALL_NBYTES = 4096
"""A page; what is smaller costs less as Python bytes than the calls that would spare them."""

_H = TypeVar("_H", bound="Held")


class _File:
    """A file without a name in a folder: it is gone with this object, or with the process, however that ends."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with tempfile.TemporaryFile(dir=folder, prefix=".stream_pack-held-") as file:
            # Python's own file object would warn of not having been closed.
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Bytes ``[offset, offset + nbytes)`` of a holder's file."""

    file: _File
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


Part: TypeAlias = "bytes | Extent | Zeros"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """``nbytes`` bytes, most of them on disk: ``parts``, one after the other.

    ``digest`` (16 bytes, XXH3-128) stands for the content: of bytes that were held in one go it is theirs, of a
    composition it is made of its members' digests.  ``block_checksums`` are those of a pack's buffer of this content,
    in blocks of the default length; a composition has none.

    Lifetime: keeps the holder's file open, and so its bytes on disk.  It is immutable: a copy is the same object.
    """

    nbytes: int
    digest: bytes
    parts: tuple[Part, ...] = field(repr=False)
    block_checksums: tuple[int, ...] = field(default=(), repr=False)
    sha256: bytes | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.nbytes

    @classmethod
    def compose(cls: type[_H], members: Sequence[Held | bytes | Zeros]) -> _H:
        """The members one after the other.  Copies: none."""
        parts: list[Part] = []
        digest = xxhash.xxh3_128()
        for member in members:
            if isinstance(member, Held):
                parts.extend(member.parts)
                digest.update(b"H" + member.digest)
            else:
                parts.append(member)
                digest.update(b"Z" if isinstance(member, Zeros) else b"B")
                digest.update(b"" if isinstance(member, Zeros) else xxhash.xxh3_128_digest(member))
            digest.update(len(member).to_bytes(8, "little"))
        return cls(sum(map(len, members)), digest.digest(), tuple(parts))

    def chunks(self, *, chunk_nbytes: int = CHUNK_NBYTES) -> Iterator[memoryview]:
        """All bytes, in chunks of at most ``chunk_nbytes``.

        Copies: a chunk at a time, into memory of its own.
        Raises: TruncatedSourceError when the file on disk was cut; OSError.
        """
        return self._span(0, self.nbytes, chunk_nbytes)

    def read(self, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)``.  Copies: these.  Raises: as :meth:`chunks`."""
        whole = io.BytesIO()
        for chunk in self._span(begin, end, CHUNK_NBYTES):
            whole.write(chunk)
        return whole.getvalue()  # its own bytes, not another copy

    def sha256_digest(self) -> bytes:
        """The SHA-256 of the bytes, which are read for it unless it was made when they came."""
        if self.sha256 is not None:
            return self.sha256
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.digest()

    def _span(self, begin: int, end: int, chunk_nbytes: int) -> Iterator[memoryview]:
        position = 0
        for part in self.parts:
            first, last = max(begin - position, 0), min(end - position, len(part))
            if first < last:
                yield from _read(part, first, last, chunk_nbytes)
            position += len(part)
            if position >= end:
                return

    def __copy__(self: _H) -> _H:
        return self

    def __deepcopy__(self: _H, memo: object) -> _H:
        return self

    def __reduce__(self) -> NoReturn:
        raise StateError(
            f"{self.nbytes} bytes of a streamed export lie in its folder and cannot be pickled: write the program "
            "with stream_pack.executorch.write_program(manager, path)"
        )


def _read(part: Part, begin: int, end: int, chunk_nbytes: int) -> Iterator[memoryview]:
    if isinstance(part, Zeros):
        yield from zeros(end - begin)
        return
    if not isinstance(part, Extent):
        yield from (
            memoryview(part)[at : min(at + chunk_nbytes, end)]
            for at in range(begin, end, chunk_nbytes)
        )
        return
    while begin < end:
        chunk = memoryview(np.empty(min(chunk_nbytes, end - begin), np.uint8))
        read = os.preadv(part.file.fileno(), [chunk], part.offset + begin)
        if read == 0:
            raise TruncatedSourceError(
                f"the file of the streamed export ended at byte {part.offset + begin}, before byte {part.offset + end}"
            )
        yield chunk[:read]
        begin += read


class Holder:
    """Takes bytes to disk.  ``folder`` exists and has room for all of them.

    One file without a name holds them all; its space is given back when this object and every :class:`Held` of it are
    gone, also when the process is killed.
    May be used by several threads.  A process that is forked off writes to a file of its own.
    Raises: OSError when no file can be made in ``folder``.
    """

    def __init__(self, folder: str | os.PathLike[str], *, chunk_nbytes: int) -> None:
        self.chunk_nbytes = chunk_nbytes
        self._folder = os.path.abspath(folder)
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._file = _File(self._folder)
        self._nbytes = 0
        self._process = os.getpid()

    def hold(
        self, chunks: Iterable[memoryview | bytes], nbytes: int, *, sha256: bool = False
    ) -> Held:
        """Write the ``nbytes`` bytes that ``chunks`` give.

        ``sha256``: make that digest too, on the way.
        Raises: StateError when ``chunks`` give more or fewer bytes; OSError (ENOSPC among others).
        """
        hasher, digest = BlockHasher(BLOCK_NBYTES), xxhash.xxh3_128()
        sha = hashlib.sha256() if sha256 else None
        checksums: list[int] = []
        small: list[bytes] = []
        extent = self._reserve(nbytes) if nbytes >= SMALL_NBYTES else None
        came = 0
        for chunk in chunks:
            if came + len(chunk) > nbytes:
                raise StateError(f"a constant of {nbytes} bytes gave more than that")
            checksums += hasher.update(chunk)
            digest.update(chunk)
            if sha is not None:
                sha.update(chunk)
            if extent is None:
                small.append(bytes(chunk))
            else:
                _write(extent, came, memoryview(chunk))
            came += len(chunk)
        if came < nbytes:
            raise StateError(f"a constant of {nbytes} bytes gave only {came}")
        return Held(
            nbytes,
            digest.digest(),
            (b"".join(small) if extent is None else extent,),
            tuple(checksums + hasher.finish()),
            None if sha is None else sha.digest(),
        )

    def _reserve(self, nbytes: int) -> Extent:
        with self._lock:
            if self._process != os.getpid():
                # A fork shares the file, and each would write where the other does.
                self._begin()
            extent = Extent(self._file, self._nbytes, nbytes)
            # Pages of their own, so that a file system that shares blocks can share them with the program.
            self._nbytes += -(-nbytes // SMALL_NBYTES) * SMALL_NBYTES
        return extent


def _write(extent: Extent, at: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(extent.file.fileno(), data, extent.offset + at)
        data = data[written:]
        at += written
