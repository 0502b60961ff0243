"""Files as memory: a range of a file mapped read-only and shared, and private and copy-on-write, both on demand.

Arrays of a mapping keep it mapped.  Nothing is proved through one: see :mod:`stream_pack.reader.file_range`.
"""

from __future__ import annotations

import errno
import mmap
import platform
import sys

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import MappingInUse
from stream_pack.reader.file_range import FileRange
from stream_pack.reader.locks import Locked

__all__ = ["Mapping"]


class Mapping(Locked):
    """The first ``nbytes`` of a file range as memory.

    Two maps of the same pages, each made on first use (one takes a descriptor until Python 3.13): a shared, read-only
    one, and a private one, in which a page becomes a copy when it is written to; the file never changes.

    Units: bytes; file offsets count from the range's first byte.
    Copies: none.
    Lifetime: every array keeps its map open; :meth:`release` leaves arrays valid, :meth:`close` refuses while there
    are any.
    Raises: StateError once closed or released, also by another thread.
    """

    def __init__(self, file: FileRange, nbytes: int) -> None:
        super().__init__()
        self.file = file
        self.nbytes = nbytes
        self._shared: tuple[mmap.mmap, int] | None = None
        self._private: tuple[mmap.mmap, int] | None = None
        self._private_refused = False

    def array(self, file_offset: int, nbytes: int) -> NDArray[np.uint8]:
        """At least one byte at ``file_offset``, read-only."""
        shared = self._shared
        if shared is None:
            with self._lock:
                if self._shared is None:
                    self._shared = _map(self.file, 0, self.nbytes, private=False)
                shared = self._shared
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

    def check_length(self) -> None:
        """Prove that the file still has all that is mapped: touching a page past its end is a bus error.

        Raises: TruncatedError; StateError.
        """
        self.file.check_length(self.nbytes)

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
