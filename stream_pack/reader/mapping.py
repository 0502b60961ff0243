"""Files as memory: a range of a file mapped read-only and shared, and on demand private and copy-on-write.

:class:`FileRange` is a range of an open file; :class:`Mapping` is its memory.  Arrays of a mapping keep it mapped.
"""

from __future__ import annotations

import errno
import mmap
import operator
import os
import platform
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from stream_pack.arguments.paths import require_path
from stream_pack.errors import MappingInUse, OptionError, StateError, TruncatedError

__all__ = ["FileRange", "Mapping", "map_shared"]


class FileRange:
    """The bytes of a regular file from ``offset`` on, open for reading.

    ``name`` is the path as given, ``path`` the absolute one.  ``available`` is how many bytes there were on opening: up
    to the file's end, at most ``nbytes``.  ``identity`` distinguishes states of a file.

    Units: bytes; ``offset`` counts from the file's first byte.
    Raises: OptionError for anything but numbers from 0 on; OSError, also for anything but a regular file, because only
    those can be mapped; every method, once closed, StateError, also when another thread closes it.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int, nbytes: int | None) -> None:
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
        # Reentrant, as all locks here: a finalizer that closes the pack may run wherever memory is allocated.
        self._lock = threading.RLock()
        status = os.fstat(self._fd)  # of what was opened: the path may be another file by now
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file: only regular files can be mapped", self.name)
        self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        room = max(0, status.st_size - offset)
        self.available = room if nbytes is None else min(nbytes, room)

    def read(self, file_offset: int, nbytes: int) -> bytes:
        """Bytes ``[file_offset, file_offset + nbytes)`` of the range, fewer where it ends; a copy."""
        parts = []
        nbytes = min(nbytes, self.available - file_offset)
        while nbytes > 0:
            with self.descriptor() as fd:
                part = os.pread(fd, nbytes, self.offset + file_offset)
            if not part:
                break
            parts.append(part)
            file_offset += len(part)
            nbytes -= len(part)
        return b"".join(parts)

    def check_available(self) -> None:
        """Prove that the file was not truncated: touching a mapped page past its end is a bus error.

        Raises: TruncatedError.
        """
        end = self.offset + self.available
        with self.descriptor() as fd:
            actual = os.fstat(fd).st_size
        if actual < end:
            raise TruncatedError(
                f"{self.path} was truncated while it was open: expected {end} bytes, found {actual}; replace a pack "
                "by renaming a new one over it, never in place",
                expected_nbytes=end,
                actual_nbytes=actual,
            )

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """The descriptor, kept open inside the ``with``: once closed, its number may be another file's."""
        with self._lock:
            if not self._close.alive:
                raise self.closed_error()
            yield self._fd

    def closed_error(self) -> StateError:
        """The error for use after closing."""
        return StateError(f"{self.path} is closed: open it again")

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        with self._lock:
            self._close()


def map_shared(file: FileRange, nbytes: int) -> NDArray[np.uint8]:
    """The first ``nbytes`` (at least one) of a file range, read-only and shared; the array keeps the mapping."""
    return _array(*_map(file, 0, nbytes, private=False), nbytes)


class Mapping:
    """The first ``nbytes`` of a file range as memory.

    Two maps of the same pages: a shared, read-only one, and, made on first use, a private one, in which a page becomes
    a copy when it is written to; the file never changes.

    Units: bytes; file offsets count from the range's first byte.
    Copies: none.
    Lifetime: every array keeps its map open; :meth:`release` leaves arrays valid, :meth:`close` refuses while there
    are any.
    Raises: StateError once closed or released, also by another thread.
    """

    def __init__(self, file: FileRange, nbytes: int) -> None:
        self.file = file
        self.nbytes = nbytes
        self._shared: tuple[mmap.mmap, int] | None = _map(file, 0, nbytes, private=False)
        self._private: tuple[mmap.mmap, int] | None = None
        self._private_refused = False
        self._lock = threading.RLock()

    def array(self, file_offset: int, nbytes: int) -> NDArray[np.uint8]:
        """At least one byte at ``file_offset``, read-only."""
        shared = self._shared
        if shared is None:
            raise self.file.closed_error()
        return self._array(shared, file_offset, nbytes)

    def writable_array(self, file_offset: int, nbytes: int) -> NDArray[np.uint8]:
        """At least one byte at ``file_offset``, copy-on-write."""
        with self._lock:
            if self._private is None and not self._private_refused:
                try:
                    self._private = _map(self.file, 0, self.nbytes, private=True)
                except OSError as error:
                    if error.errno != errno.ENOMEM:
                        raise
                    self._private_refused = True
            if self._private is not None:
                return self._array(self._private, file_offset, nbytes)
        # The system refuses a private map of all: map just what is needed.
        return _array(*_map(self.file, file_offset, nbytes, private=True), nbytes)

    def _array(self, map_: tuple[mmap.mmap, int], file_offset: int, nbytes: int) -> NDArray[np.uint8]:
        mapped, delta = map_
        try:
            return _array(mapped, delta + file_offset, nbytes)
        except ValueError:
            if mapped.closed:  # by another thread, since it was looked up
                raise self.file.closed_error() from None
            raise

    def release(self) -> None:
        """Release the maps: each is unmapped now, or when its last array is released."""
        with self._lock:
            self._shared = self._private = None
            self.file.close()

    def close(self) -> None:
        """Unmap now.

        Raises: MappingInUse while arrays are alive; the map in use stays open.
        """
        with self._lock:
            try:
                if self._private is not None:
                    self._private[0].close()
                    self._private = None
                if self._shared is not None:
                    self._shared[0].close()
            except BufferError:
                raise MappingInUse(
                    f"{self.file.path} is still in use: an array of its memory is alive", tensors=()
                ) from None
        self.release()


def _array(mapped: mmap.mmap, begin: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mapped, np.uint8, count=nbytes, offset=begin)


def _map(file: FileRange, file_offset: int, nbytes: int, *, private: bool) -> tuple[mmap.mmap, int]:
    """A map that contains ``[file_offset, file_offset + nbytes)`` of the range, and the offset of that in the map."""
    begin = file.offset + file_offset
    # A map begins at a page of this machine; a pack inside another file may not.
    delta = begin % mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_PRIVATE | _map_noreserve() if private else mmap.MAP_SHARED
    prot = mmap.PROT_READ | mmap.PROT_WRITE if private else mmap.PROT_READ
    with file.descriptor() as fd:
        # A map needs no descriptor of its own, and there may be a map for every buffer.
        untracked = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        mapped = mmap.mmap(fd, delta + nbytes, flags, prot, offset=begin - delta, **untracked)
    return mapped, delta


def _map_noreserve() -> int:
    """MAP_NORESERVE, which the mmap module has from Python 3.13 on.

    Without it Linux reserves memory or swap for every page that might be written to, and refuses a larger file.
    """
    known: int | None = getattr(mmap, "MAP_NORESERVE", None)
    if known is not None:
        return known
    if sys.platform != "linux":
        return 0x40 if sys.platform == "darwin" else 0
    # Source: Linux, arch/*/include/uapi/asm/mman.h; all but these have asm-generic's value.
    machine = platform.machine()
    special = {"mips": 0x400, "sparc": 0x40, "ppc": 0x40, "alpha": 0x10000}
    return next((special[name] for name in special if machine.startswith(name)), 0x4000)
