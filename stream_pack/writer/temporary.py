"""The unfinished file beside a target: made under a name of its own, and removed when its writer was killed.

A living writer holds a lock (flock) on its file from the start, and the kernel releases that lock when the process
ends, however it ends.  So a file of this machine that can be locked has no writer any more.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from zlib import crc32

__all__ = ["create_temporary", "sweep"]

PREFIX, SUFFIX = ".stream_pack-", ".tmp"


def create_temporary(folder: str) -> tuple[int, str]:
    """A new, empty file in ``folder``, open and locked: its descriptor, and its path.

    The lock ends with the last descriptor of this opening; where the file system has no locks, :func:`sweep` leaves
    such files alone.  Raises: OSError.
    """
    # 0o666: the kernel takes the umask off.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        path = os.path.join(folder, f"{_ours()}{os.urandom(8).hex()}{SUFFIX}")
        file = os.open(path, flags, 0o666)
        try:
            with suppress(OSError):  # no locks here
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file, path
        except BaseException:
            os.close(file)
            with suppress(OSError):
                os.unlink(path)
            raise
        os.close(file)  # swept by another process before it was locked: try again


def sweep(folder: str) -> None:
    """Remove what killed writers of this machine have left in ``folder``; what cannot be removed stays."""
    ours = _ours()
    with suppress(OSError):  # a folder may be writable and not readable
        with os.scandir(folder) as entries:
            left = [e.path for e in entries if e.name.startswith(ours) and e.name.endswith(SUFFIX)]
        for path in left:
            with suppress(OSError):  # it has a living writer, or belongs to another user
                _remove_if_dead(path)


def _remove_if_dead(path: str) -> None:
    """Raises: OSError (BlockingIOError) when the file has a writer, or locks tell nothing here."""
    # Without waiting for a FIFO, and not through a symbolic link: others may write into the folder, too.
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(file)


def _ours() -> str:
    # Some network file systems keep locks to one machine: the name tells whose the file is.
    return f"{PREFIX}{crc32(os.uname().nodename.encode()):08x}-"
