"""A range of an open file, read by position.

What is proved is read here, with ``pread``, and never through a mapping: a sector that cannot be read, or a file that
was cut, is then an error that names the bytes, and not the end of the process.
"""

from __future__ import annotations

import errno
import operator
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from stream_pack.arguments.paths import require_path
from stream_pack.errors import OptionError, ReadError, StateError, TruncatedError
from stream_pack.reader.locks import Locked

__all__ = ["FileRange", "Window"]

WINDOW_NBYTES = 1 << 20
"""What is read in one step: long compared with a system call, and it stays in a core's cache until it is hashed."""


class FileRange(Locked):
    """The bytes of a regular file from ``offset`` on, open for reading.

    ``name`` is the path as given, ``path`` the absolute one.  ``available`` is how many bytes there were on opening: up
    to the file's end, at most ``nbytes``.  ``identity`` distinguishes states of a file.

    Units: bytes; ``offset`` counts from the file's first byte, every ``file_offset`` from the range's.
    Raises: OptionError for anything but numbers from 0 on; OSError, also for anything but a regular file, because
    only those can be mapped; every method, once closed, StateError, also when another thread closes it.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int, nbytes: int | None) -> None:
        super().__init__()
        try:
            offset, nbytes = operator.index(offset), None if nbytes is None else operator.index(nbytes)
        except TypeError:
            raise OptionError("offset and nbytes: expected whole numbers") from None
        if offset < 0 or (nbytes is not None and nbytes < 0):
            raise OptionError(f"offset={offset}, nbytes={nbytes}: expected non-negative integers")
        require_path("path", path, "file")
        self.name = os.fsdecode(path)
        self.path = os.path.abspath(self.name)
        self.offset = offset
        # Not blocking: opening a FIFO would wait for its writer.
        self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._closed = False
        self._readers = 0
        status = os.fstat(self._fd)  # of what was opened: the path may be another file by now
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file: only regular files can be mapped", self.name)
        self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        room = max(0, status.st_size - offset)
        self.available = room if nbytes is None else min(nbytes, room)

    def read(self, file_offset: int, nbytes: int) -> bytes:
        """Bytes ``[file_offset, file_offset + nbytes)``, fewer where there were fewer on opening; a copy.

        Raises: ReadError; TruncatedError when the file has become shorter.
        """
        file_offset = max(0, file_offset)
        return self.array(file_offset, max(0, min(nbytes, self.available - file_offset))).tobytes()

    def array(self, file_offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes ``[file_offset, file_offset + nbytes)``; a copy.

        Raises: ReadError; TruncatedError when the file ends before.
        """
        data = np.empty(nbytes, np.uint8)
        self.fill(file_offset, data.data)
        return data

    def fill(self, file_offset: int, memory: memoryview, *, least: int | None = None) -> int:
        """Read into ``memory``, at least its first ``least`` bytes (None: all); returns how many were read.

        Raises: ReadError; TruncatedError when the file ends before.
        """
        least = len(memory) if least is None else least
        done = 0
        while done < least:
            with self.descriptor() as fd:
                try:
                    got = os.preadv(fd, [memory[done:]], self.offset + file_offset + done)
                except OSError as error:
                    raise self._unreadable(error, file_offset + done, file_offset + least) from None
                # Also when the file ends long before: what is found is all that it has.
                actual = file_offset + done if got else max(0, os.fstat(fd).st_size - self.offset)
            if not got:
                raise self._cut(file_offset + least, actual)
            done += got
        return done

    def check_length(self, nbytes: int) -> None:
        """Prove that the file still has the first ``nbytes`` bytes: touching a mapped page past its end is a bus error.

        Raises: TruncatedError.
        """
        with self._lock:
            if self._closed:
                raise self.closed_error()
            # A third of what fstat takes, for each tensor; nobody reads from the position of the descriptor.
            actual = os.lseek(self._fd, 0, os.SEEK_END) - self.offset
        if actual < nbytes:
            error = self._cut(nbytes, max(0, actual))
            error.args = (f"{self.name}: {error}",)
            raise error

    def _cut(self, expected: int, actual: int) -> TruncatedError:
        return TruncatedError(
            f"the file was truncated while it was open: expected at least {expected} bytes, found {actual}; replace a "
            "pack by renaming a new one over it, never in place",
            expected_nbytes=expected,
            actual_nbytes=actual,
        )

    def _unreadable(self, error: OSError, begin: int, end: int) -> ReadError:
        return ReadError(
            f"bytes {begin} to {end} cannot be read: {error.strerror}",
            errno=error.errno,
            strerror=error.strerror,
            filename=self.name,
            file_begin=begin,
            file_end=end,
        )

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """The descriptor, kept open inside the ``with``: once closed, its number may be another file's."""
        with self._lock:
            if self._closed:
                raise self.closed_error()
            self._readers += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._readers -= 1
                self._close_unused()

    def closed_error(self) -> StateError:
        """The error for use after closing."""
        return StateError(f"{self.path} is closed: open it again")

    def close(self) -> None:
        """Close the descriptor, as soon as nobody reads from it; mappings stay."""
        with self._lock:
            self._closed = True
            self._close_unused()

    def _forked(self) -> None:
        super()._forked()
        self._readers = 0

    def _close_unused(self) -> None:
        if self._closed and not self._readers:
            self._close()


class Window:
    """A file range, read forward in steps into memory that is used again.  For one thread at a time."""

    def __init__(self, file: FileRange, nbytes: int = WINDOW_NBYTES) -> None:
        self._file = file
        self._memory = memoryview(np.empty(nbytes, np.uint8).data)
        self._begin = self._end = 0

    def parts(self, begin: int, end: int, ahead: int = 0) -> Iterator[memoryview]:
        """Bytes ``[begin, end)`` in parts, each valid until the next is asked for.

        ``ahead``: where what may be asked for next ends, up to which a step may read on.

        Raises: ReadError, TruncatedError.
        """
        while begin < end:
            # A part is whole where it fits into the memory.
            if not self._begin <= begin < self._end or (end > self._end and end - begin <= len(self._memory)):
                self._read(begin, least=min(end - begin, len(self._memory)), most=max(ahead, end) - begin)
            stop = min(end, self._end)
            yield self._memory[begin - self._begin : stop - self._begin]
            begin = stop

    def _read(self, begin: int, *, least: int, most: int) -> None:
        self._begin = self._end = begin
        try:
            got = self._file.fill(begin, self._memory[:most], least=least)
        except OSError:  # perhaps of bytes that nobody has asked for yet
            got = self._file.fill(begin, self._memory[:least])
        self._end = begin + got
