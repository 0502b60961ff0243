"""One stream of bytes, whether it comes from a file, a pipe, a socket or an object with ``read``.

Whatever the source does (short reads of one byte, signals, a descriptor in non-blocking mode), a reader of
:class:`ByteStream` gets exactly the bytes it asked for or a :class:`TruncatedSourceError`.
"""

from __future__ import annotations

import codecs
import io
import operator
import os
import select
import stat
from collections.abc import Callable, Iterator
from typing import Protocol, SupportsIndex, TypeVar, runtime_checkable

import numpy as np

from stream_pack.errors import OptionError, SourceError, TruncatedSourceError
from stream_pack.pipeline.file_state import FileState, check_unchanged
from stream_pack.pipeline.places import SourceFile
from stream_pack.text import shown

__all__ = ["READ_AHEAD_NBYTES", "BinaryReader", "ByteStream", "require_binary"]

READ_AHEAD_NBYTES = 65536
"""What a small read fetches at once: so many bytes cost about as much to copy as a system call does."""

_S = TypeVar("_S", bound="ByteStream")


@runtime_checkable
class BinaryReader(Protocol):
    """All that is needed of a caller's object; ``readinto`` is used where there is one."""

    def read(self, nbytes: int, /) -> bytes | None:
        """At most ``nbytes`` bytes; empty at the end."""


class ByteStream:
    """The bytes of a descriptor or binary file object, from its current position on.

    A regular file is read by position, so the caller's own file offset does not move, and
    :meth:`seek` works.  Everything else is read forward only.  Small reads share a read-ahead of 64 KiB.

    ``on_read``, unless None, is called with the number of bytes whenever some have come from the source.
    ``read_ahead_nbytes``: less than 64 KiB, for what reads a little here and there.

    Lifetime: ``close`` closes what :meth:`open_path` opened and never what a caller handed over.
    Raises: OptionError for a file object in text mode.
    """

    def __init__(self, source: int | BinaryReader) -> None:
        require_binary(source, what="source")
        self._owned: int | None = None
        self._name: str | None = None
        self._limit: int | None = None  # the stream's length, where it ends before its file does
        self._ahead = b""
        self._ahead_at = 0
        self._fetched = 0  # bytes taken from the source, read ahead included
        self.read_ahead_nbytes = READ_AHEAD_NBYTES
        self.on_read: Callable[[int], None] | None = None
        self._readinto: Callable[[memoryview], int]
        self._file: tuple[int, int] | None = None
        self._opened: FileState | None = None
        regular = _regular_file(source)
        if regular is not None:
            self._file, self._opened = regular
            self._fd, self._base = self._file
            self._readinto = self._readinto_file
        elif isinstance(source, int):
            self._fd = source
            self._readinto = self._readinto_descriptor
        elif hasattr(source, "readinto"):
            self._readinto = _reader_of_readinto(source.readinto)
        else:
            self._readinto = _reader_of_read(source)

    @classmethod
    def open_path(cls: type[_S], path: str | os.PathLike[str]) -> _S:
        """The file (or FIFO, or device) at ``path``.  Raises: OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stream = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        stream._owned = fd
        stream._name = os.fsdecode(path)
        return stream

    @classmethod
    def open_range(cls: type[_S], path: str | os.PathLike[str], begin: int, nbytes: int) -> _S:
        """Bytes ``[begin, begin + nbytes)`` of the regular file at ``path``, as a stream of their own.

        Raises: OSError.
        """
        stream = cls.open_path(path)
        if stream._file is None:
            stream.close()
            raise io.UnsupportedOperation(f"{shown(os.fspath(path))} is not a regular file")
        stream._base = begin
        stream._file = stream._fd, begin
        stream._limit = nbytes
        return stream

    def part(self, begin: int, nbytes: int) -> ByteStream:
        """Bytes ``[begin, begin + nbytes)`` of a stream that is a regular file, as a stream of their own.

        Lifetime: as long as this stream; closing the part closes nothing.
        """
        assert self._file is not None
        part = type(self)(self._fd)
        part._base = self._base + begin
        part._file = self._fd, part._base
        part._limit = nbytes
        part._name, part._opened = self._name, self._opened
        return part

    @property
    def position(self) -> int:
        """Bytes from the stream's start to the next one to be read."""
        return self._fetched - (len(self._ahead) - self._ahead_at)

    @property
    def regular_file(self) -> tuple[int, int] | None:
        """(descriptor, file offset of the stream's first byte), or None where bytes come only once, in order."""
        return self._file

    @property
    def source_file(self) -> SourceFile | None:
        """The regular file that the stream is in, or None."""
        return None if self._file is None else SourceFile(self._name, self._fd)

    def file_offset(self, position: int) -> int:
        """Where in its file the stream's byte ``position`` is; of anything but a regular file, ``position``."""
        return position if self._file is None else self._base + position

    @property
    def file_nbytes(self) -> int | None:
        """The stream's whole length, known for a regular file only."""
        if self._file is None:
            return None
        nbytes = max(0, os.fstat(self._fd).st_size - self._base)
        return nbytes if self._limit is None else min(nbytes, self._limit)

    @property
    def opened_state(self) -> FileState | None:
        """The state of the regular file when the stream was made; None of anything else."""
        return self._opened

    def check_unchanged(self) -> None:
        """Compare a regular file, which is still open, with what it was when the stream was made.

        What comes only once, in order, has no earlier state.  Raises: SourceChangedError.
        """
        if self._opened is not None:
            check_unchanged(self._name, self._opened, FileState.of(os.fstat(self._fd)))

    def peek(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes, which stay unread; fewer only at the end of the stream."""
        self._fill(nbytes)
        return self._ahead[self._ahead_at : self._ahead_at + nbytes]

    def read_some(self, most: int = READ_AHEAD_NBYTES) -> bytes:
        """What the next read gives, all that was read ahead first, but not above ``most`` bytes; empty only at the end
        of the stream.

        For a parser that finds the end of its input itself; :meth:`unread` takes back what was too much.
        """
        self._fill(1)
        some = self._ahead[self._ahead_at : self._ahead_at + most]
        self._ahead_at += len(some)
        return some

    def unread(self, data: bytes) -> None:
        """Put bytes back that were read just now."""
        self._ahead, self._ahead_at = data + self._ahead[self._ahead_at :], 0

    def read_exactly(self, nbytes: int, *, what: str) -> memoryview:
        """The next ``nbytes`` bytes, in memory that is never written again.

        Copies: none beyond the read itself.  All of ``nbytes`` is allocated, so a length that comes from the
        source is bounded first, or read in :meth:`chunks`.  ``what`` names the bytes in the error.

        Raises: TruncatedSourceError when the stream ends before.
        """
        if nbytes <= READ_AHEAD_NBYTES:
            if self._fill(nbytes) < nbytes:
                raise self._truncated(nbytes, what)
            begin = self._ahead_at
            self._ahead_at = begin + nbytes
            return memoryview(self._ahead)[begin : self._ahead_at]
        data = np.empty(nbytes, np.uint8).data
        rest = self._ahead[self._ahead_at :]
        begin = min(len(rest), nbytes)
        data[:begin] = rest[:begin]
        # Let go now: what is read past it below would leave it in the wrong place for seek().
        self._ahead, self._ahead_at = rest[begin:], 0
        while begin < nbytes:
            read = self._fetch(data[begin:])
            if read == 0:
                self.unread(bytes(data[:begin]))
                raise self._truncated(nbytes, what)
            begin += read
        return data

    def chunks(self, nbytes: int, *, chunk_nbytes: int, what: str) -> Iterator[memoryview]:
        """The next ``nbytes`` bytes in pieces of ``chunk_nbytes``, the last one short, each in memory of its own.

        Raises: TruncatedSourceError when the stream ends before.
        """
        while nbytes > 0:
            chunk = self.read_exactly(min(nbytes, chunk_nbytes), what=what)
            nbytes -= len(chunk)
            yield chunk

    def skip(self, nbytes: int, *, what: str) -> None:
        """Pass over bytes, without reading them where the source can seek.

        Raises: TruncatedSourceError when the stream ends before.
        """
        if nbytes == 0:
            return
        length = self.file_nbytes
        if length is None:
            for _ in self.chunks(nbytes, chunk_nbytes=READ_AHEAD_NBYTES, what=what):
                pass
            return
        if self.position + nbytes > length:
            raise self._truncated(nbytes, what, ends_at=length)
        self.seek(self.position + nbytes)

    def seek(self, position: int) -> None:
        """Go on at ``position``, counted from the stream's start; for regular files only."""
        if self._file is None:
            raise io.UnsupportedOperation("this source gives its bytes only once, in order")
        begin = self._fetched - len(self._ahead)
        if begin <= position <= self._fetched:
            self._ahead_at = position - begin
        else:
            self._ahead, self._ahead_at = b"", 0
            self._fetched = position

    def at_end(self) -> bool:
        """Whether no byte is left.  Waits for one if the source has neither sent one nor ended."""
        return self._fill(1) == 0

    def close(self) -> None:
        """Close what :meth:`open_path` opened.  May be called twice."""
        if self._owned is not None:
            fd, self._owned = self._owned, None
            os.close(fd)

    def _fill(self, nbytes: int) -> int:
        """Read ahead until ``nbytes`` bytes are there or the stream ends; return how many there are."""
        have = len(self._ahead) - self._ahead_at
        if have >= nbytes:
            return have
        pieces = [self._ahead[self._ahead_at :]]
        while have < nbytes:
            piece = bytearray(max(self.read_ahead_nbytes, nbytes - have))
            read = self._fetch(memoryview(piece))
            if read == 0:
                break
            pieces.append(bytes(memoryview(piece)[:read]))
            have += read
        self._ahead, self._ahead_at = b"".join(pieces), 0
        return have

    def _fetch(self, memory: memoryview) -> int:
        read = self._readinto(memory)
        self._fetched += read
        if self.on_read is not None:
            self.on_read(read)
        return read

    def _truncated(self, nbytes: int, what: str, *, ends_at: int | None = None) -> TruncatedSourceError:
        end = self._fetched if ends_at is None else ends_at
        missing = self.position + nbytes - end
        return TruncatedSourceError(
            f"the source ends at byte {end}, inside {what}: {missing} bytes more were expected there",
            position=end,
            missing_nbytes=missing,
        )

    def _readinto_file(self, memory: memoryview) -> int:
        if self._limit is not None:
            memory = memory[: max(0, self._limit - self._fetched)]
        return os.preadv(self._fd, [memory], self._base + self._fetched)

    def _readinto_descriptor(self, memory: memoryview) -> int:
        while True:
            try:
                return os.readv(self._fd, [memory])
            except BlockingIOError:
                # A descriptor shared with a program that wants it non-blocking (ssh does): wait ourselves.
                waiting = select.poll()
                waiting.register(self._fd, select.POLLIN)
                waiting.poll()


def require_binary(file: object, *, what: str) -> None:
    """Raises: OptionError for a file object of text, or a bool instead of a descriptor, as the argument ``what``."""
    if isinstance(file, bool):
        raise OptionError(f"{what}={shown(file)}: expected a path, a descriptor or a binary file object")
    text = isinstance(file, io.TextIOBase | codecs.StreamReader | codecs.StreamWriter | codecs.StreamReaderWriter)
    # What tempfile makes is no io object itself; its attributes are those of the file within.
    opened = getattr(file, "mode", None)
    if text or (isinstance(opened, str) and "b" not in opened and hasattr(file, "encoding")):
        raise OptionError(f"the {what} is a file object in text mode: open it in binary mode")


def _regular_file(source: int | BinaryReader) -> tuple[tuple[int, int], FileState] | None:
    """(descriptor, current offset) and state, if reading by position gives the very bytes that ``source`` would.

    Only for the interpreter's own file objects: ``gzip.open()`` has a ``fileno`` too, of a file with other bytes.
    """
    if isinstance(source, int):
        fd = source
    elif isinstance(source, io.FileIO) or (
        isinstance(source, io.BufferedReader | io.BufferedRandom) and isinstance(source.raw, io.FileIO)
    ):
        fd = source.fileno()
    else:
        return None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return None
    position = os.lseek(fd, 0, os.SEEK_CUR) if isinstance(source, int) else source.tell()
    return (fd, position), FileState.of(status)


def _reader_of_readinto(readinto: Callable[[memoryview], object]) -> Callable[[memoryview], int]:
    def read(memory: memoryview) -> int:
        nbytes = readinto(memory)
        if nbytes is None:
            raise BlockingIOError("the source is a file object in non-blocking mode")
        filled = operator.index(nbytes) if isinstance(nbytes, SupportsIndex) else -1
        if not 0 <= filled <= len(memory):
            raise SourceError(
                f"readinto() of the source returned {nbytes!r} for {len(memory)} bytes of memory: expected how many of "
                "them it filled; it is not a binary file object"
            )
        return filled

    return read


def _reader_of_read(source: BinaryReader) -> Callable[[memoryview], int]:
    def read(memory: memoryview) -> int:
        wanted = min(len(memory), 1 << 20)
        data = source.read(wanted)
        if data is None:
            raise BlockingIOError("the source is a file object in non-blocking mode")
        if isinstance(data, str):
            raise OptionError("the source gives text: open it in binary mode")
        try:
            given = memoryview(data).cast("B")
        except TypeError:
            raise SourceError(
                f"read({wanted}) of the source gave a {type(data).__qualname__}: expected bytes; it is not a binary "
                "file object"
            ) from None
        if len(given) > wanted:
            raise SourceError(f"read({wanted}) of the source gave {len(given)} bytes: it is not a binary file object")
        memory[: len(given)] = given
        return len(given)

    return read
