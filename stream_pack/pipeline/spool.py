"""Temporary disk space beside the target, for what one pass cannot do in constant memory.

A spool file has no name (it is unlinked as soon as it is open), so none is ever left over.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from stream_pack.errors import LimitError, TruncatedSourceError
from stream_pack.text import human_nbytes

__all__ = ["Spool", "SpoolFile"]


class Spool:
    """Where spool files may be made, and how much space they took.

    ``folder`` None: nowhere; the first request for a file is refused.  ``announce`` is called once, with a line for the
    user, as soon as it is certain that space will be taken.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, announce: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._announce = announce
        self._nbytes = 0
        self.peak_nbytes = 0

    def require(self, *, why: str, nbytes: int | None) -> str | os.PathLike[str]:
        """The folder; ``why`` and ``nbytes``, the most that may be needed if that is known, go into the refusal.

        Raises: LimitError when there is none.
        """
        if self._folder is None:
            much = "disk space for all of it" if nbytes is None else f"up to {nbytes} bytes of disk space"
            raise LimitError(
                f"{why}: this needs {much} temporarily, but the target is a stream: "
                "choose a folder with --spool-dir (spool_dir=)",
                value=nbytes,
            )
        announce, self._announce = self._announce, None
        if announce is not None:
            much = "disk space" if nbytes is None else f"up to {human_nbytes(nbytes)} of disk space"
            announce(f"{why}: using {much} temporarily in {os.fspath(self._folder) or '.'}")
        return self._folder

    def open(self, *, why: str, nbytes: int | None) -> SpoolFile:
        """A new, empty spool file.  Raises: as :meth:`require`."""
        return SpoolFile(self, self.require(why=why, nbytes=nbytes))

    def _took(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._nbytes)


class SpoolFile:
    """A file without a name: bytes written once, and read back anywhere.

    Its disk space is free when it is closed, or nothing refers to it any more, or the process ends, however that does.
    Threads may write to places of their own, and read.
    """

    def __init__(self, spool: Spool, folder: str | os.PathLike[str]) -> None:
        self._spool = spool
        self.nbytes = 0
        with tempfile.TemporaryFile(dir=folder, prefix=".stream_pack-spool-") as file:
            # Python's own file object would warn of not having been closed.
            self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        """The descriptor, for reading by position."""
        return self._descriptor

    def append(self, data: memoryview | bytes) -> None:
        """Write all of ``data`` at the end."""
        self.write_at(self.reserve(len(data)), data)

    def append_zeros(self, nbytes: int) -> None:
        """Append a hole."""
        self.reserve(nbytes)
        os.ftruncate(self._descriptor, self.nbytes)

    def reserve(self, nbytes: int) -> int:
        """Make the file ``nbytes`` longer; returns where these begin, for :meth:`write_at`."""
        begin = self.nbytes
        self.nbytes += nbytes
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
        """Free the disk space.  May be called twice."""
        if self._close.alive:
            self._close()
            self._spool._took(-self.nbytes)

    def __enter__(self) -> SpoolFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
