"""What tells two states of a file apart, so that a file that is changed while it is read is not taken for one state."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stream_pack.errors import SourceChangedError
from stream_pack.text import quoted

__all__ = ["FileState", "FilesRead", "check_unchanged"]


@dataclass(frozen=True, slots=True)
class FileState:
    """Which file, and which state of it.

    Two states with other bytes are equal only if both were written within one tick of the file system's clock (4 ms and
    less on Linux), or if a program has set the time of the last change back.  The time of the last change of the inode
    (``ctime``) is not part of it: it also moves when a file is renamed, linked or given another mode.
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state that ``os.stat`` or ``os.fstat`` has told of."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def is_same_file(self, other: FileState) -> bool:
        """Whether both are states of one file, which may have had other names or been replaced under its name since."""
        return (self.device, self.inode) == (other.device, other.inode)


def check_unchanged(name: str | None, before: FileState, now: FileState) -> None:
    """``name``: the path as given, None where it is not known.

    Raises: SourceChangedError unless ``now`` is ``before``.
    """
    if now == before:
        return
    if not now.is_same_file(before):
        what = "another file has taken its place"
    elif now.nbytes != before.nbytes:
        what = f"it had {before.nbytes} bytes, and now has {now.nbytes}"
    else:
        what = "something has written to it"
    raise SourceChangedError(
        f"{'the source' if name is None else quoted(name)} was changed while it was read: {what}; "
        "convert it again when its writer has finished"
    )


class FilesRead:
    """Files of a source that are not kept open: each is in one state whenever it is opened, and to the end.

    A set may have thousands of files, more than a process may hold open.
    """

    def __init__(self) -> None:
        self._states: dict[str, FileState] = {}

    def see(self, path: str | os.PathLike[str], state: FileState) -> None:
        """The file at ``path`` was opened, and found in ``state``.

        Raises: SourceChangedError where it was opened before and is another file now, or in another state.
        """
        name = os.fspath(path)
        check_unchanged(name, self._states.setdefault(name, state), state)

    def check_unchanged(self) -> None:
        """Compare every file with what it was.

        A file that was removed, or replaced under its name, after the last time that it was opened passes: what was
        read is still one state of the old one.
        Raises: SourceChangedError; OSError.
        """
        for name, before in self._states.items():
            try:
                now = FileState.of(os.stat(name))
            except FileNotFoundError:
                continue
            if now.is_same_file(before):
                check_unchanged(name, before, now)
