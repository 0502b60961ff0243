"""Where a pack's bytes go: a new file that replaces its target when complete, or a byte stream.

A sink takes bytes by position.  What is not put is zero: a file has a hole there, a stream gets the zeros sent.
"""

from __future__ import annotations

import abc
import errno
import io
import os
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, runtime_checkable

from stream_pack.arguments.paths import require_path
from stream_pack.errors import OptionError, StateError
from stream_pack.format.checksum import zeros
from stream_pack.pipeline.bytestream import require_binary
from stream_pack.pipeline.chunks import Chunk, Zeros
from stream_pack.text import listed, quoted
from stream_pack.writer.attributes import take_over
from stream_pack.writer.temporary import Temporary
from stream_pack.writer.writeback import WritebackFile, rest_of, write_some

__all__ = ["BinaryWriter", "FileSink", "Sink", "StreamSink", "file_identity", "open_sink"]

BATCH_NBYTES = 1 << 20
BATCH_PARTS = 512
"""Parts of one gathering write, below the 1,024 of Linux's and macOS's IOV_MAX."""

_S = TypeVar("_S", bound="Sink")


@runtime_checkable
class BinaryWriter(Protocol):
    """A binary file object, open for writing."""

    def write(self, data: memoryview, /) -> int | None: ...


class Sink(abc.ABC):
    """Takes bytes by position and writes them in large steps.

    Call :meth:`begin` once, :meth:`put` with positions that do not overlap, then :meth:`commit`.
    As a context manager it aborts when left without a commit.
    """

    in_order: bool
    """Whether positions must ascend."""

    folder: str | None = None
    """Where temporary files belong: beside the target; None when the target is a stream."""

    identity: tuple[int, int] | None = None
    """Device and inode of a regular file that is written in place, None for every other target."""

    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """What the user should know about the target, complete after :meth:`begin`; as in a report."""

    def __init__(self) -> None:
        self._parts: list[memoryview] = []
        self._begin = 0
        self._end = 0
        self._nbytes = 0

    def begin(self, nbytes: int, *, reserve: bool) -> None:
        """Announce the length of the whole; ``reserve``: fail now rather than after hours if there is no room for it.

        Raises: OSError (ENOSPC) naming both numbers.
        """
        self._nbytes = nbytes

    def put(self, position: int, chunk: Chunk) -> None:
        """Write ``chunk`` at ``position``; it may be held until a few more have come.

        Raises: OSError; StateError when a stream is asked to go back.
        """
        if isinstance(chunk, Zeros) or len(chunk) == 0:
            return
        if position != self._end or self._end - self._begin >= BATCH_NBYTES or len(self._parts) >= BATCH_PARTS:
            self.flush()
        if not self._parts:
            self._begin = position
        self._parts.append(memoryview(chunk))
        self._end = position + len(chunk)

    def flush(self) -> None:
        """Write what is held: from here on no chunk that was put is needed any more."""
        parts, self._parts = self._parts, []
        if parts:
            self._write(self._begin, parts)

    @abc.abstractmethod
    def _write(self, position: int, parts: list[memoryview]) -> None:
        """Write all of ``parts`` at ``position``."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Everything was put: make it permanent."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Leave no trace, as far as that is possible.  May be called after anything."""

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


class FileSink(Sink):
    """A new file beside the target, which replaces it in :meth:`commit`; until then the target is unchanged.

    A symlink is followed.  An existing target's mode, ACL and ``user.*`` attributes (and owner, where permitted) are
    kept, or access is narrowed; a new file obeys the umask.
    Lifetime: the temporary file is removed by :meth:`abort`, with this object, or when the interpreter ends; only a
    killed process leaves one, named ``.stream_pack-*.tmp``, which a later one removes (:mod:`.temporary` says when).
    ``temporary`` is its path until then.
    Raises: OSError, also when the target is neither absent nor a regular file, or could not be replaced in the end;
    OptionError for what is not a path.
    """

    in_order = False
    folder: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        require_path("path", path, "target")
        self._path = os.fspath(path)
        self._target = os.path.realpath(self._path)
        self.folder = os.path.dirname(self._target)
        old = _stat(self._target)
        if self._path.endswith("/"):  # realpath drops it, and a file would appear where a folder was meant
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
        if old is not None and not stat.S_ISREG(old.st_mode):
            code = errno.EISDIR if stat.S_ISDIR(old.st_mode) else errno.EINVAL
            raise OSError(code, os.strerror(code), self._path)
        if old is not None:
            _check_sticky(self.folder, old, self._path)
        try:
            temporary = Temporary(self.folder, os.path.basename(self._target), private=old is not None)
        except OSError as error:
            # An error of the folder, under the name that the caller knows.
            named = self._path if os.path.isdir(self.folder) else _missing(self._path, self.folder)
            raise OSError(error.errno, error.strerror, named) from None
        self._temporary, self._file, self.temporary = temporary, temporary.file, temporary.path
        self._discard = weakref.finalize(self, temporary.discard)
        self._output = WritebackFile(self._file, name=self._path)
        try:
            if old is not None:
                self.warnings = take_over(self._file, self._target, old)
        except BaseException:
            self.abort()
            raise

    def begin(self, nbytes: int, *, reserve: bool) -> None:
        super().begin(nbytes, reserve=reserve)
        self._temporary.begin_lease()
        left = self._temporary.sweep()  # first: what a killed run has left may be what fills the disk
        if left:
            remark = f"{quoted(self.folder)} holds unfinished files whose writers seem to be gone: {listed(left)}"
            self.remarks = (f"{remark}; delete them if nobody writes there",)
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if reserve and nbytes > free:
            raise OSError(errno.ENOSPC, f"disk full: need {nbytes} bytes, have {free}", self.folder)
        os.ftruncate(self._file, nbytes)

    def _write(self, position: int, parts: list[memoryview]) -> None:
        self._output.write(position, parts)

    def sync(self) -> None:
        """Flush to the disk: from here on other machines can read what was put.  Raises: OSError."""
        self.flush()
        os.fsync(self._file)

    def commit(self) -> None:
        if not self._discard.alive:
            raise StateError("this sink was already committed or aborted")
        self.sync()
        try:
            os.replace(self.temporary, self._target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None
        # The temporary name no longer exists: what is left to discard is the descriptor.
        self._discard()
        _sync_folder(self.folder)

    def abort(self) -> None:
        self._parts = []
        self._discard()


class StreamSink(Sink):
    """A byte stream: a descriptor, or a binary file object.  What was sent stays sent.

    ``owned``: the stream is a descriptor, which :meth:`commit` and :meth:`abort` close; any other is never closed here.
    """

    in_order = True

    def __init__(self, stream: int | BinaryWriter, *, owned: bool = False) -> None:
        super().__init__()
        self._stream = stream
        self._owned = owned
        self._position = 0
        self.identity = file_identity(stream)

    def put(self, position: int, chunk: Chunk) -> None:
        if position < self._end:
            raise StateError(f"a stream cannot be written backwards: byte {position} after byte {self._end} was sent")
        super().put(position, chunk)

    def _write(self, position: int, parts: list[memoryview]) -> None:
        self._send_zeros(position - self._position)
        self._send(parts)
        self._position = position + sum(map(len, parts))

    def _send_zeros(self, nbytes: int) -> None:
        for part in zeros(nbytes):
            self._send([part])

    def _send(self, parts: Sequence[memoryview]) -> None:
        rest: Sequence[memoryview] = [part for part in parts if len(part)]
        while rest:
            if isinstance(self._stream, int):
                written: int | None = write_some(self._stream, rest)
            else:
                written = self._stream.write(rest[0])
            if not written:
                raise OSError(errno.EIO, "a write of several bytes to the stream wrote none")
            rest = rest_of(rest, written)

    def commit(self) -> None:
        self.flush()
        self._send_zeros(self._nbytes - self._position)
        self._position = self._nbytes
        if isinstance(self._stream, io.IOBase):
            self._stream.flush()
        self.abort()  # of an owned descriptor, only to close it

    def abort(self) -> None:
        self._parts = []
        if self._owned and isinstance(self._stream, int):
            self._owned = False
            os.close(self._stream)


def open_sink(target: str | os.PathLike[str] | int | BinaryWriter) -> Sink:
    """The sink for a path, a descriptor, or a binary file object.

    Raises: OSError; OptionError for anything else.
    """
    if isinstance(target, (str, os.PathLike)):
        require_path("target", target, "target")
        old = _stat(os.path.realpath(os.fspath(target)))
        if old is not None and not stat.S_ISREG(old.st_mode) and not stat.S_ISDIR(old.st_mode):
            # A device, FIFO or socket is written to, never replaced.
            return StreamSink(os.open(target, os.O_WRONLY | os.O_CLOEXEC), owned=True)
        return FileSink(target)
    if isinstance(target, (int, BinaryWriter)):
        require_binary(target, what="target")
        return StreamSink(target)
    raise OptionError(
        f"a target of type {type(target).__name__}: expected a path, a descriptor or a binary file object"
    )


def file_identity(file: object) -> tuple[int, int] | None:
    """Device and inode of the regular file of a descriptor, a file object or a path; None if there is none."""
    try:
        if isinstance(file, (str, bytes, os.PathLike)):
            status = os.stat(file)
        elif isinstance(file, int):
            status = os.fstat(file)
        else:
            status = os.fstat(file.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both of the last two
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _missing(path: str, folder: str) -> str:
    """The folder of ``path``, which is none, as the caller wrote it; ``folder`` where a symbolic link leads there."""
    given = os.path.dirname(path)
    return folder if os.path.isdir(given or ".") else given


def _check_sticky(folder: str, old: os.stat_result, path: str) -> None:
    """In a sticky folder (/tmp) only its owner, or the file's, may replace a file: say so before all the work."""
    status, user = os.stat(folder), os.geteuid()
    if status.st_mode & stat.S_ISVTX and user not in (0, status.st_uid, old.st_uid):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)


def _sync_folder(folder: str) -> None:
    """Make the new name permanent, where that is possible: the target is replaced and its bytes are safe already.

    A folder that may not be read cannot be synced, and some file systems (SMB, some FUSE ones) sync none.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
