"""Temporary space for what one pass cannot do in constant memory: memory for little, else a file on disk.

A spool file has no name (one on disk is unlinked as soon as it is open), so none is ever left over.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from stream_pack.errors import LimitError, TruncatedSourceError
from stream_pack.pipeline.chunks import Chunk, Zeros
from stream_pack.text import human_nbytes

__all__ = ["MEMORY_NBYTES", "Spool", "SpoolFile"]

MEMORY_NBYTES = 16 << 20 if hasattr(os, "memfd_create") else 0
"""What the spool files of a conversion may have of memory, all together: less than the interpreter and NumPy take.

Only Linux has files in memory that are read by position and mapped as others are.  Their pages are shared memory, which
a container counts as its own.
"""


class Spool:
    """Where spool files may be made, and how much space they took.

    ``folder``: for those on disk; None: the system's folder for temporary files.  ``memory_nbytes``: what may wait in
    memory instead, until :meth:`allot` says otherwise.  ``announce`` is called once, with a line for the user, as soon
    as it is certain that disk space will be taken.

    ``peak_nbytes`` is the most disk space that was taken at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        memory_nbytes: int = 0,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder
        self._announce = announce
        self._memory_nbytes = memory_nbytes
        self._nbytes = 0
        self.peak_nbytes = 0

    def allot(self, *, memory_nbytes: int, disk_nbytes: int, why: str) -> None:
        """What the plan of a conversion found: how much may wait in memory from now on, and how much goes to disk.

        ``why`` and ``disk_nbytes``, unless that is 0, are announced.
        Raises: LimitError when disk space is needed and there is no folder.
        """
        self._memory_nbytes = memory_nbytes
        if disk_nbytes:
            self._require_folder(why, disk_nbytes)

    def open(self, *, why: str, nbytes: int | None, of_nbytes: int | None = None) -> SpoolFile:
        """A new, empty spool file for at most ``nbytes``; None: nobody knows how many.

        ``why`` is announced if it is the first on disk, with ``of_nbytes`` (by default ``nbytes``), the most that all
        such files may need.
        Raises: LimitError when it has to be on disk and there is no folder; OSError.
        """
        if nbytes is not None and nbytes <= self._memory_nbytes:
            file = self._in_memory(nbytes)
            if file is not None:
                return file
        return self._on_disk(why, nbytes if of_nbytes is None else of_nbytes)

    def collect(self, chunks: Iterable[Chunk], *, why: str) -> SpoolFile:
        """All of ``chunks``, whose length nobody knows: in memory if they fit, else on disk.

        Its descriptor is at offset 0.  ``why`` and what it raises: as for :meth:`open`.
        """
        file = self._in_memory(self._memory_nbytes) or self._on_disk(why, None)
        try:
            for chunk in chunks:
                if not file.has_room(len(chunk)):
                    in_memory, file = file, self._on_disk(why, None)
                    with in_memory:
                        for part in in_memory.read(0, in_memory.nbytes, chunk_nbytes=1 << 20):
                            file.append(part)
                file.append(chunk)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
        except BaseException:
            file.close()
            raise
        return file

    def _in_memory(self, nbytes: int) -> SpoolFile | None:
        """A file for ``nbytes`` that are allotted; None where the system has none to give."""
        try:
            descriptor = os.memfd_create("stream_pack-spool") if nbytes else None
        except OSError:  # a sandbox may forbid it
            descriptor = None
        if descriptor is None:
            return None
        self._memory_nbytes -= nbytes
        return SpoolFile(self, descriptor, room_nbytes=nbytes)

    def _on_disk(self, why: str, nbytes: int | None) -> SpoolFile:
        with tempfile.TemporaryFile(dir=self._require_folder(why, nbytes), prefix=".stream_pack-spool-") as file:
            # Python's own file object would warn of not having been closed.
            return SpoolFile(self, os.dup(file.fileno()), room_nbytes=None)

    def _require_folder(self, why: str, nbytes: int | None) -> str | os.PathLike[str]:
        if self._folder is None:
            try:
                self._folder = tempfile.gettempdir()
            except FileNotFoundError:
                much = "disk space" if nbytes is None else f"up to {nbytes} bytes of disk space"
                raise LimitError(
                    f"{why}: this needs {much} temporarily, and the system has no folder for temporary files that can "
                    "be written to: choose a folder with --spool-dir (spool_dir=)",
                    value=nbytes,
                ) from None
        announce, self._announce = self._announce, None
        if announce is not None:
            much = "disk space" if nbytes is None else f"up to {human_nbytes(nbytes)} of disk space"
            announce(f"{why}: using {much} temporarily in {os.fspath(self._folder) or '.'}")
        return self._folder

    def _took(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._nbytes)

    def _gave_back(self, nbytes: int) -> None:
        self._memory_nbytes += nbytes


class SpoolFile:
    """A file without a name: bytes written once, and read back anywhere.

    Takes over ``descriptor``.  ``room_nbytes``: how long it may become in memory; None: it is on disk.
    Its space is free when it is closed, or nothing refers to it any more, or the process ends, however that does.
    Threads may write to places of their own, and read.
    """

    def __init__(self, spool: Spool, descriptor: int, *, room_nbytes: int | None) -> None:
        self._spool = spool
        self._room_nbytes = room_nbytes
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self.nbytes = 0

    @property
    def place(self) -> str:
        """Where the bytes are, in words."""
        return "on disk" if self._room_nbytes is None else "in memory"

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be written."""
        return self._room_nbytes is None or self.nbytes + nbytes <= self._room_nbytes

    def fileno(self) -> int:
        """The descriptor, for reading by position."""
        return self._descriptor

    def append(self, chunk: Chunk) -> None:
        """Write all of ``chunk`` at the end; of zeros, a hole."""
        begin = self.reserve(len(chunk))
        if isinstance(chunk, Zeros):
            os.ftruncate(self._descriptor, self.nbytes)
        else:
            self.write_at(begin, chunk)

    def reserve(self, nbytes: int) -> int:
        """Make the file ``nbytes`` longer; returns where these begin, for :meth:`write_at`."""
        assert self.has_room(nbytes)
        begin = self.nbytes
        self.nbytes += nbytes
        if self._room_nbytes is None:
            self._spool._took(nbytes)
        return begin

    def write_at(self, begin: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``begin``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, begin)
            view = view[written:]
            begin += written

    def read(self, begin: int, end: int, *, chunk_nbytes: int) -> Iterator[memoryview]:
        """Bytes ``[begin, end)``, in chunks of fresh memory."""
        while begin < end:
            chunk = memoryview(np.empty(min(chunk_nbytes, end - begin), np.uint8))
            read = os.preadv(self.fileno(), [chunk], begin)
            if read == 0:
                raise TruncatedSourceError(f"a spool file ended at byte {begin}, before byte {end}")
            yield chunk[:read]
            begin += read

    def close(self) -> None:
        """Free the space.  May be called twice."""
        if self._close.alive:
            self._close()
            if self._room_nbytes is None:
                self._spool._took(-self.nbytes)
            else:
                self._spool._gave_back(self._room_nbytes)

    def __enter__(self) -> SpoolFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
